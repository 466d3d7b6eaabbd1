"""Decides whether schemas exclude each other: then "oneOf" of them is the same as "anyOf"."""

from __future__ import annotations

from typing import Any

from oaiserve.engine.grammars.json_schema.terms import SchemaDocument, filled_list, kinds_of, values_of
from oaiserve.engine.grammars.refusal import Refused

MOST_COMPARED = 20_000  # pairs of schemas
MOST_DEPTH = 5  # unions and properties within each other


class Exclusion:
    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._num_compared = 0
        self._known: dict[int, tuple[set[str] | None, set[str]]] = {}  # the values and types of compared schemas

    def check(self, value: Any, where: str) -> None:
        """Refuse the schemas of a "oneOf" unless no instance can be valid under two of them."""
        members = filled_list(value, where)
        for i, one in enumerate(members):
            for j in range(i):
                if not self._are_disjoint(members[j], one, where, 0):
                    raise Refused(
                        f"the keyword 'oneOf' at {where} is only supported where its schemas exclude each other, by "
                        f"type, 'const' or 'enum', or by those of a required property; {j} and {i} may both hold"
                    )

    def _are_disjoint(self, one: Any, other: Any, where: str, depth: int) -> bool:
        """Return whether certainly no instance is valid under both."""
        self._num_compared += 1
        if self._num_compared > MOST_COMPARED:
            raise Refused(
                f"the keyword 'oneOf' at {where} has too many schemas to tell whether they exclude each other"
            )
        one = self._document.resolved(one)
        other = self._document.resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or depth > MOST_DEPTH:
            return False
        for first, second in ((one, other), (other, one)):
            for name in ("anyOf", "oneOf"):
                if isinstance(first.get(name), list) and first[name]:
                    return all(self._are_disjoint(each, second, where, depth + 1) for each in first[name])
        values, kinds = self._about(one)
        other_values, other_kinds = self._about(other)
        if values is not None and other_values is not None:
            return not values & other_values
        if not kinds & other_kinds:
            return True
        if kinds & other_kinds != {"object"}:
            return False
        return any(
            self._are_disjoint(_property(one, name), _property(other, name), where, depth + 1)
            for name in {*_names(one, "required"), *_names(other, "required")}
        )

    def _about(self, schema: dict[str, Any]) -> tuple[set[str] | None, set[str]]:
        if id(schema) not in self._known:  # all are parts of the document
            self._known[id(schema)] = (values_of(schema), kinds_of(schema))
        return self._known[id(schema)]


def _property(schema: dict[str, Any], name: str) -> Any:
    """Return one of the schemas of a property."""
    listed = schema.get("properties")
    if isinstance(listed, dict) and name in listed:
        return listed[name]
    if "patternProperties" in schema:
        return True
    return schema.get("additionalProperties", True)


def _names(schema: dict[str, Any], keyword: str) -> list[str]:
    names = schema.get(keyword)
    if isinstance(names, list):
        return [name for name in names if isinstance(name, str)]
    return []
