"""Values that fit a JSON schema, nearly fit it, or do not fit at all, as strategies of hypothesis.

The schemas come from the types that the server itself decodes into, so they follow the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from hypothesis import strategies as st

MOST_ITEMS = 4
EDGES = st.sampled_from(
    [0, 1, -1, 2, 128, 129, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 0.0, -0.0, 0.5, 1.0, 2.0,
     1e-320, 1e308, -1e308, 1.5]
)  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["", "\0", "\u202e", "<|im_end|>", "x" * 5000, "e\u0301", "\ufeff", "user", "text", "demo"]
)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | EDGES | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=MOST_ITEMS) | st.dictionaries(TEXT, inner, max_size=MOST_ITEMS),
    max_leaves=6,
)
Schema = Mapping[str, Any]


def fitting(kind: type[msgspec.Struct], fixed: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Return objects that the type accepts. `fixed` has strategies for fields for which any value is too many."""
    schema = msgspec.json.schema(kind)
    fields = schema["$defs"][kind.__name__]
    return _object(fields, schema["$defs"], fixed)


def mutated(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return objects of which a few fields, known ones or new ones, have any value."""

    def change(value: dict[str, Any]) -> st.SearchStrategy[Any]:
        names = (st.sampled_from(sorted(value)) | TEXT) if value else TEXT
        changes = st.dictionaries(names, ANYTHING, min_size=1, max_size=3)
        return changes.map(lambda changed: value | changed)

    return values.flatmap(change)


def _value(schema: Schema, definitions: Schema) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return _value(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return st.one_of(*(_value(each, definitions) for each in schema["anyOf"]))
    match schema.get("type"):
        case "string":
            return TEXT
        case "integer":
            return EDGES.filter(lambda number: isinstance(number, int)) | st.integers(-3, 200)
        case "number":
            return EDGES | st.floats(-2, 2)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(_value(schema.get("items", {}), definitions), max_size=MOST_ITEMS)
        case "object" if "properties" in schema:
            return _object(schema, definitions, {})
        case "object":
            inner = schema.get("additionalProperties", {})
            return st.dictionaries(TEXT, _value(inner if isinstance(inner, dict) else {}, definitions), max_size=3)
    return ANYTHING


def _object(
    schema: Schema, definitions: Schema, fixed: Mapping[str, st.SearchStrategy[Any]]
) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with the required and the fixed fields, and a few of the others."""
    needed = set(schema.get("required", ())) | set(fixed)
    values = {name: fixed[name] if name in fixed else _value(each, definitions) for name, each in
              schema["properties"].items()}  # fmt: skip
    others = sorted(values.keys() - needed)
    names = st.lists(st.sampled_from(others), unique=True, max_size=3) if others else st.just([])
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({name: values[name] for name in (*sorted(needed), *chosen)})
    )
