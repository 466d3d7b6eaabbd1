"""Reads which types a tool's schema states for values. Clients pass on schemas of third parties, which may be wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Types = tuple[str, ...]  # distinct types in the order of the schema

_MOST_DEPTH = 16  # maximum nesting of alternatives and references; anything deeper counts as of any type
_OF_VALUES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


class SchemaTypes:
    """Reads the types in the schema of a tool's parameters. References are resolved within that schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._of_references: dict[str, Types] = {}

    def of(self, schema: Any, depth: int = _MOST_DEPTH) -> Types:
        """Return the types of the values of a schema within the root, as far as it states them; () stands for any
        type."""
        if not isinstance(schema, Mapping) or not depth:
            return ()
        if (kind := schema.get("type")) is not None:
            return _once(each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str))
        if isinstance(reference := schema.get("$ref"), str):
            return self._of_reference(reference, depth)
        if "const" in schema:
            return _of_values([schema["const"]])
        if isinstance(values := schema.get("enum"), list):
            return _of_values(values)
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list):
                of_options = [self.of(option, depth - 1) for option in options]
                return _once(each for types in of_options for each in types) if all(of_options) else ()
        if isinstance(parts := schema.get("allOf"), list):
            return _of_all([self.of(part, depth - 1) for part in parts])
        return ()

    def _of_reference(self, reference: str, depth: int) -> Types:
        if reference not in self._of_references:
            self._of_references[reference] = ()  # in case the schema refers to itself
            self._of_references[reference] = self.of(self._at(reference), depth - 1)
        return self._of_references[reference]

    def _at(self, reference: str) -> Any:
        """Return the schema that a reference within the root names, or None."""
        if reference != "#" and not reference.startswith("#/"):
            return None
        place = self._root
        for name in reference.split("/")[1:]:
            place = place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        return place


def _of_values(values: Iterable[Any]) -> Types:
    return _once(_OF_VALUES[type(value)] for value in values if type(value) in _OF_VALUES)


def _of_all(of_parts: list[Types]) -> Types:
    """Return the types that values of any of the parts may have. A part that states none allows every type."""
    first, *others = [types for types in of_parts if types] or [()]
    return tuple(each for each in first if all(each in types for types in others))


def _once(types: Iterable[str]) -> Types:
    return tuple(dict.fromkeys(types))
