"""Lists of unique items. No automaton remembers items, so a few such lists are written out."""

from __future__ import annotations

import json
from itertools import permutations
from math import perm
from typing import Any

from oaiserve.engine.grammars.json_schema.terms import SchemaDocument, is_of, kind_of, kinds_of, plain, step
from oaiserve.engine.grammars.refusal import Refused

MOST_LISTS = 5_000  # lists of a document
MOST_CHARACTERS = 2**18  # characters of all these lists together
MOST_PARTS = 100  # schemas that together determine the values of the items
_LIST = {"type", "items", "minItems", "maxItems", "uniqueItems"}
_ANNOTATIONS = {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description"} | {
    "examples", "readOnly", "title", "writeOnly"
}  # fmt: skip


class UniqueItems:
    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._num_lists = self._num_characters = 0

    def written_out(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """Return a schema without "uniqueItems", with an "enum" of all its lists in its place. Raises Refused."""
        if "uniqueItems" not in schema:
            return schema
        others = {name: value for name, value in schema.items() if name != "uniqueItems"}
        where = step(place, "uniqueItems")
        wanted = schema["uniqueItems"]
        if not isinstance(wanted, bool):
            raise Refused(f"{where} must be true or false, got {kind_of(wanted)}")
        if not wanted or schema.get("maxItems") in (0, 1):
            return others
        is_plain = schema.get("type") == "array" and schema.keys() - _ANNOTATIONS <= _LIST
        if is_plain:
            items = _values(schema.get("items", True), self._document)
        else:
            items = None
        if items is None:
            raise Refused(
                f"the keyword 'uniqueItems' at {where} is only supported where the items are of few values ('enum', "
                "'const', boolean or null), in a list with no other keywords than 'minItems' and 'maxItems'"
            )
        low = schema.get("minItems", 0)
        high = schema.get("maxItems", len(items))
        if not isinstance(low, int) or not isinstance(high, int) or not 0 <= low <= min(high, len(items)):
            raise Refused(f"there is no list with the items at {step(place, 'items')} for the 'minItems' next to it")
        lengths = range(low, min(high, len(items)) + 1)
        self._count(items, lengths, where)
        rest = {name: value for name, value in others.items() if name not in _LIST}
        return {**rest, "enum": [list(each) for length in lengths for each in permutations(items, length)]}

    def _count(self, items: list[Any], lengths: range, where: str) -> None:
        sizes = sorted((len(json.dumps(item)) + 1 for item in items), reverse=True)
        for length in lengths:
            num_lists = perm(len(items), length)
            self._num_lists += num_lists
            self._num_characters += num_lists * sum(sizes[:length])
            if self._num_lists > MOST_LISTS or self._num_characters > MOST_CHARACTERS:
                raise Refused(
                    f"the keyword 'uniqueItems' at {where} is only supported up to {MOST_LISTS} different lists in a "
                    f"schema, with {MOST_CHARACTERS} characters: a lower 'maxItems' leaves fewer"
                )


def _values(schema: Any, document: SchemaDocument) -> list[Any] | None:
    """Return all instances of a schema, each once; None if there may be others."""
    choices: list[Any] = []
    waiting = [schema]
    for _ in range(MOST_PARTS):
        if not waiting:
            return list({json.dumps(plain(value), sort_keys=True): value for value in choices}.values())
        subschema = waiting.pop(0)
        if isinstance(subschema, dict):
            keywords = subschema.keys() - _ANNOTATIONS
        else:
            keywords = set()
        if keywords == {"$ref"} and isinstance(subschema["$ref"], str):
            waiting.insert(0, document.find(subschema["$ref"], "$ref")[0])
        elif keywords == {"anyOf"} and isinstance(subschema["anyOf"], list):
            waiting[:0] = subschema["anyOf"]
        elif keywords and keywords <= {"type", "enum", "const"}:
            kinds = kinds_of({"type": subschema["type"]} if "type" in subschema else {})
            if "const" in subschema:
                values = [subschema["const"]]
            else:
                values = subschema.get("enum", [False, True, None])
            if (keywords == {"type"} and not kinds <= {"boolean", "null"}) or not isinstance(values, list):
                return None
            choices += [value for value in values if is_of(value, kinds)]
        else:
            return None
    return None
