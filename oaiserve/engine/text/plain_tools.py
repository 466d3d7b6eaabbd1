"""Simplifies the schemas of tools for simple chat templates: some fail at a list of types, at `true` in place of a
schema, or at an object without `additionalProperties`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    parameters = {"properties": {}, **_plain(function.get("parameters"), _MOST_DEPTH)}
    return {**tool, "function": {**function, "parameters": {"type": "object", **parameters}}}


def _plain(schema: object, depth: int) -> dict[str, Any]:
    if not isinstance(schema, Mapping) or not depth:
        return {}
    plain = {name: value for name, value in schema.items() if name != "description" or isinstance(value, str)}
    if "type" in plain:
        if isinstance(plain["type"], list):
            types = plain["type"]
        else:
            types = [plain["type"]]
        plain["type"] = next((one for one in types if isinstance(one, str) and one != "null"), "string")
    if isinstance(properties := plain.get("properties"), Mapping):
        plain["properties"] = {name: _plain(each, depth - 1) for name, each in properties.items()}
    if "items" in plain:
        plain["items"] = _plain(plain["items"], depth - 1)
    if plain.get("type") == "object" and depth < _MOST_DEPTH:
        other = plain.get("additionalProperties")
        if isinstance(other, Mapping):
            plain["additionalProperties"] = _plain(other, depth - 1)
        else:
            plain["additionalProperties"] = bool(other)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(plain.get(name), list):
            plain[name] = [_plain(each, depth - 1) for each in plain[name]]
    return plain
