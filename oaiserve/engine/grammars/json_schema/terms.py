"""The terms for schemas: places, types, values, and references within a document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from oaiserve.engine.grammars.refusal import Refused

LARGEST_NUMBER = 2**53 - 1  # llguidance reads numbers as floats, which hold no larger integers exactly
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")


def step(place: str, key: str | int) -> str:
    """Return the place of a key's value, as in $.properties.a.items[0]."""
    if isinstance(key, int):
        return f"{place}[{key}]"
    if re.fullmatch(r"[A-Za-z_$][A-Za-z0-9_$-]{0,60}", key, re.ASCII):
        return f"{place}.{key}"
    if len(key) > 60:
        key = f"{key[:60]}..."
    return f"{place}[{json.dumps(key, ensure_ascii=False)}]"


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= 60:
        return text
    return f"{text[:60]}..."


def kind_of(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def filled_list(value: Any, where: str) -> list[Any]:
    if value == []:
        raise Refused(f"{where} must be a list that is not empty, got []")
    if not isinstance(value, list):
        raise Refused(f"{where} must be a list that is not empty, got {kind_of(value)}")
    return value


def checked_string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{where} must be a string, got {kind_of(value)}")
    return value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_of(value: Any, kinds: set[str]) -> bool:
    if is_number(value):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names[type(value)] in kinds


def kinds_of(schema: dict[str, Any]) -> set[str]:
    """Return the types of an instance. Every integer is also a number."""
    if (values := values_of(schema)) is not None:
        return {kind for value in map(json.loads, values) for kind in TYPES if is_of(value, {kind})}
    kinds = schema.get("type", list(TYPES))
    if not isinstance(kinds, list):
        kinds = [kinds]
    named = {kind for kind in kinds if isinstance(kind, str)}
    if "number" in named:
        named.add("integer")
    return named


def values_of(schema: dict[str, Any]) -> set[str] | None:
    """Return the only values of a schema, each in one spelling; None if there may be others."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {json.dumps(plain(value), sort_keys=True) for value in values}


def plain(value: Any) -> Any:
    """Return a value in which 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


class SchemaDocument:
    """The whole schema, in which references are looked up. Nothing is ever fetched."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._anchors = {
            each[keyword]: each
            for each in _objects(root)
            for keyword in ("$anchor", "$dynamicAnchor")
            if isinstance(each.get(keyword), str)
        }
        self._base = root.get("$id") if isinstance(root, dict) else None

    def find(self, reference: str, where: str) -> tuple[Any, str]:
        base, _, fragment = reference.partition("#")
        if base and base != str(self._base).rstrip("#"):
            raise Refused(f"{where} refers to {shown(reference)}, outside the schema; nothing is fetched")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if fragment not in self._anchors:
                raise Refused(f"{where} refers to {shown(reference)}, which is not in the schema")
            return self._anchors[fragment], f"#{shown(fragment)}"
        value = self.root
        place = "$"
        for part in fragment.split("/")[1:]:
            key: Any = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and re.fullmatch("[0-9]{1,6}", key, re.ASCII) and int(key) < len(value):
                key = int(key)
            elif not isinstance(value, dict) or key not in value:
                raise Refused(f"{where} refers to {shown(reference)}, which is not in the schema")
            value = value[key]
            place = step(place, key)
        return value, place

    def resolved(self, schema: Any) -> Any:
        """Return the target of a schema with a reference, without the keywords next to it."""
        for _ in range(10):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            schema, _ = self.find(schema["$ref"], "$ref")
        return True


def has_reference(schema: Any) -> bool:
    return any("$ref" in each for each in _objects(schema))


def _objects(document: Any) -> Iterator[dict[str, Any]]:
    waiting = [document]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
