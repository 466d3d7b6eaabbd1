"""Simplifies the schemas of tools for simple chat templates. Some of these fail at a list of types, at `true` instead
of a schema, or at an object without `additionalProperties`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oaiserve.engine.text.schema_types import SchemaTypes

_MOST_DEPTH = 16
ODD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "types": {"type": ["string", "null"], "description": None},
        "any": True,
        "nothing": {"type": "null"},
        "nested": {"type": "object", "properties": {"list": {"type": "array", "items": True}}},
    },
}


def plain_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of the API with a plainer schema of its parameters."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    schema = function.get("parameters")
    parameters = {"properties": {}, **_plain(schema, SchemaTypes(schema), _MOST_DEPTH)}
    return {**tool, "function": {**function, "parameters": {"type": "object", **parameters}}}


def _plain(schema: object, types_in: SchemaTypes, depth: int) -> dict[str, Any]:
    if not isinstance(schema, Mapping) or not depth:
        return {}
    plain = {name: value for name, value in schema.items() if name != "description" or isinstance(value, str)}
    for name in ("anyOf", "oneOf"):
        if isinstance(plain.get(name), list):
            plain = _with_alternatives(plain, name, types_in)
    types = [each for each in types_in.of(plain) if each != "null"]
    if "type" in plain:
        plain["type"] = types[0] if types else "string"
    elif len(types) == 1:
        plain["type"] = types[0]
    if isinstance(properties := plain.get("properties"), Mapping):
        plain["properties"] = {name: _plain(each, types_in, depth - 1) for name, each in properties.items()}
    if "items" in plain:
        plain["items"] = _plain(plain["items"], types_in, depth - 1)
    if plain.get("type") == "object" and depth < _MOST_DEPTH:
        other = plain.get("additionalProperties")
        if isinstance(other, Mapping):
            plain["additionalProperties"] = _plain(other, types_in, depth - 1)
        else:
            plain["additionalProperties"] = bool(other)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(plain.get(name), list):
            plain[name] = [_plain(each, types_in, depth - 1) for each in plain[name]]
    return plain


def _with_alternatives(schema: dict[str, Any], name: str, types_in: SchemaTypes) -> dict[str, Any]:
    """Return a schema without its null alternative. If a single alternative remains, merge it into the schema."""
    others = [each for each in schema[name] if types_in.of(each) != ("null",)]
    if len(others) == 1 and isinstance(others[0], Mapping):
        return {**others[0], **{key: value for key, value in schema.items() if key != name}}
    return {**schema, name: others or schema[name]}
