"""Lists whose items all differ. No automaton remembers items, so such lists are written out where they are few."""

from __future__ import annotations

import json
from itertools import permutations
from math import perm
from typing import Any

from oaiserve.engine.json_schema.references import Document
from oaiserve.engine.json_schema.terms import is_of, kind_of, kinds_of, plain, step
from oaiserve.engine.refusal import Refused

MOST_LISTS = 2_000
MOST_CHARACTERS = 2**17  # of all lists together
MOST_STEPS = 10  # of references and unions to the values of items
_LIST = {"type", "items", "minItems", "maxItems", "uniqueItems"}
_ANNOTATIONS = {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description"} | {
    "examples", "readOnly", "title", "writeOnly"
}  # fmt: skip


def without_unique_items(schema: dict[str, Any], document: Document, place: str) -> dict[str, Any]:
    """Return a schema without "uniqueItems", with an "enum" of all its lists in its place. Raises Refused."""
    others = {name: value for name, value in schema.items() if name != "uniqueItems"}
    where, wanted = step(place, "uniqueItems"), schema.get("uniqueItems", False)
    if not isinstance(wanted, bool):
        raise Refused(f"{where} must be true or false, got {kind_of(wanted)}")
    if not wanted or schema.get("maxItems") in (0, 1):
        return others
    is_plain = schema.get("type") == "array" and schema.keys() - _ANNOTATIONS <= _LIST
    items = _values(schema.get("items", True), document, MOST_STEPS) if is_plain else None
    if items is None:
        raise Refused(
            f"the keyword 'uniqueItems' at {where} is only supported where the items are of few values ('enum', "
            "'const', boolean or null), in a list with no other keywords than 'minItems' and 'maxItems'"
        )
    low, high = schema.get("minItems", 0), schema.get("maxItems", len(items))
    if not isinstance(low, int) or not isinstance(high, int) or not 0 <= low <= min(high, len(items)):
        raise Refused(f"there is no list with the items at {step(place, 'items')} for the 'minItems' beside it")
    lengths = range(low, min(high, len(items)) + 1)
    num_lists = sum(perm(len(items), length) for length in lengths)
    longest = sum(len(json.dumps(item)) + 1 for item in items)
    if num_lists > MOST_LISTS or num_lists * longest > MOST_CHARACTERS:
        raise Refused(
            f"the keyword 'uniqueItems' at {where} is only supported for up to {MOST_LISTS} lists with "
            f"{MOST_CHARACTERS} characters in all, and here are {num_lists}: a 'maxItems' makes them fewer"
        )
    kept = {name: value for name, value in others.items() if name not in _LIST}
    return {**kept, "enum": [list(each) for length in lengths for each in permutations(items, length)]}


def _values(schema: Any, document: Document, most_steps: int) -> list[Any] | None:
    """Return all instances that a schema has, each once; None if there may be others."""
    keywords = schema.keys() - _ANNOTATIONS if isinstance(schema, dict) else set()
    if not keywords or most_steps == 0:
        return None
    found: list[Any] | None = None
    if keywords == {"$ref"} and isinstance(schema["$ref"], str):
        return _values(document.find(schema["$ref"], "$ref")[0], document, most_steps - 1)
    if keywords == {"anyOf"} and isinstance(schema["anyOf"], list):
        members = [_values(member, document, most_steps - 1) for member in schema["anyOf"]]
        found = None if None in members else [value for member in members for value in member or ()]
    elif keywords <= {"type", "enum", "const"}:
        values = [schema["const"]] if "const" in schema else schema.get("enum", [False, True, None])
        kinds = kinds_of({"type": schema["type"]} if "type" in schema else {})
        if isinstance(values, list) and ("const" in schema or "enum" in schema or kinds <= {"boolean", "null"}):
            found = [value for value in values if is_of(value, kinds)]
    return found and list({json.dumps(plain(value), sort_keys=True): value for value in found}.values())
