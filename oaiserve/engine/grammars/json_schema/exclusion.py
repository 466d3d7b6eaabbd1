"""Makes the schemas of a "oneOf" mutually exclusive, so that it means the same as "anyOf"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oaiserve.engine.grammars.json_schema.conditions import negated
from oaiserve.engine.grammars.json_schema.terms import SchemaDocument, filled_list, kinds_of, values_of
from oaiserve.engine.grammars.refusal import Refused

MOST_COMPARED = 20_000  # pairs of schemas
MOST_JOINED = 8000  # alternatives to other schemas: a schema with more has too many schemas anyway
MOST_DEPTH = 5  # nesting depth of unions and properties


@dataclass(slots=True)
class _Change:
    """What a schema must additionally require so that it excludes the instances of other schemas."""

    without: set[str] = field(default_factory=set)  # properties that an object must not have
    required: set[str] = field(default_factory=set)
    joined: list[Any] = field(default_factory=list)

    def made(self, schema: Any, target: Any) -> Any:
        """Return a changed copy of the schema `target`, or of the schema that it refers to."""
        if self.without or self.required:
            others = {} if "properties" in target else {"additionalProperties": True}
            schema = {**others, **target, "type": "object"}
            if self.without:
                schema["properties"] = {**target.get("properties", {}), **dict.fromkeys(sorted(self.without), False)}
            if self.required:
                schema["required"] = [*dict.fromkeys([*_names(target, "required"), *sorted(self.required)])]
        return {"allOf": [schema, *self.joined]} if self.joined else schema


class Exclusion:
    def __init__(self, document: SchemaDocument, *, is_lenient: bool = False) -> None:
        """If `is_lenient`, no valid instance may be excluded to make schemas disjoint."""
        self._document = document
        self._is_lenient = is_lenient
        self._num_compared = 0
        self._num_joined = 0
        self._negated: dict[int, list[Any] | None] = {}  # alternatives to compared schemas, by their ids
        self._known: dict[int, tuple[set[str] | None, set[str]]] = {}  # the values and types of compared schemas

    def separated(self, value: Any, where: str) -> list[Any]:
        """Return the schemas of a "oneOf", changed so that no instance is valid under two of them. Raises Refused.

        An object that could be valid under two schemas may have only the property that one of them requires, or must
        have the property that distinguishes them. Other values must not be valid under the other schema.
        """
        members = filled_list(value, where)
        changes = [_Change() for _ in members]
        for i, one in enumerate(members):
            for j in range(i):
                if not self._are_disjoint(members[j], one, where, 0) and not self._exclude(
                    (members[j], changes[j]), (one, changes[i]), where
                ):
                    raise Refused(
                        f"the keyword 'oneOf' at {where} is only supported where its schemas exclude each other, by "
                        "type, 'const' or 'enum', or by those of a property, or each requires a property that the "
                        f"other doesn't; {j} and {i} may both hold"
                    )
        return [
            change.made(member, self._document.resolved(member))
            for member, change in zip(members, changes, strict=True)
        ]

    def _exclude(self, one: tuple[Any, _Change], other: tuple[Any, _Change], where: str) -> bool:
        """Change two schemas so that they exclude each other. Return whether that is possible."""
        first, change = one
        second, other_change = other
        if self._stands_alone(first) and self._stands_alone(second):
            names = self._only_required(first, second), self._only_required(second, first)
            if names[0] is not None and names[1] is not None:
                change.without.add(names[1])
                other_change.without.add(names[0])
                return True
            if self._is_lenient:
                return False
            if name := self._discriminator(first, second, where):
                change.required.add(name)
                other_change.required.add(name)
                return True
            schemas = [self._document.resolved(each) for each in (first, second)]
            negations = [self._alternatives(each) for each in schemas]
            if (
                negations[0]
                and negations[1]
                and (_may_fit(schemas[0], negations[1]) or _may_fit(schemas[1], negations[0]))
            ):
                self._num_joined += len(negations[0]) + len(negations[1])
                if self._num_joined > MOST_JOINED:
                    raise Refused(f"the keyword 'oneOf' at {where} has too many schemas to exclude each other")
                change.joined.append({"anyOf": negations[1]})
                other_change.joined.append({"anyOf": negations[0]})
                return True
        return False

    def _alternatives(self, schema: Any) -> list[Any] | None:
        if id(schema) not in self._negated:
            self._negated[id(schema)] = negated(schema)
        return self._negated[id(schema)]

    def _stands_alone(self, schema: Any) -> bool:
        """Return whether `resolved` returns everything in a schema, which has no keywords next to a reference."""
        for _ in range(10):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return isinstance(schema, dict)
            if len(schema) > 1 or not isinstance(schema["$ref"], str):
                return False
            schema, _ = self._document.find(schema["$ref"], "$ref")
        return False

    def _discriminator(self, one: Any, other: Any, where: str) -> str | None:
        """Return a property that both schemas list and for which no value is valid under both."""
        one, other = map(self._document.resolved, (one, other))
        if not isinstance(one, dict) or not isinstance(other, dict):
            return None
        listed = [schema.get("properties") for schema in (one, other)]
        if not isinstance(listed[0], dict) or not isinstance(listed[1], dict):
            return None
        for name, schema in listed[0].items():
            is_in_both = name in listed[1] and False not in (schema, listed[1][name])
            if is_in_both and self._are_disjoint(schema, listed[1][name], where, 1):
                return str(name)
        return None

    def _only_required(self, one: Any, other: Any) -> str | None:
        """Return a property that the first schema requires and the second one doesn't; None if there is none."""
        one, other = map(self._document.resolved, (one, other))
        if not isinstance(one, dict) or not isinstance(other, dict) or "object" not in kinds_of(other):
            return None
        if not isinstance(other.get("properties", {}), dict):
            return None
        others = _names(other, "required")
        return next((name for name in _names(one, "required") if name not in others), None)

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
        if id(schema) not in self._known:  # Ids are unique, because all schemas are parts of the document.
            self._known[id(schema)] = (values_of(schema), kinds_of(schema))
        return self._known[id(schema)]


def _may_fit(schema: Any, alternatives: list[Any]) -> bool:
    """Return whether a schema shares a type with one of the alternatives."""
    return isinstance(schema, dict) and any(
        not isinstance(each, dict) or kinds_of(schema) & kinds_of(each) for each in alternatives
    )


def _property(schema: dict[str, Any], name: str) -> Any:
    """Return the schema of a property, or one of them."""
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
