"""Basic terms of schemas: places, types, values, and references within a document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from oaiserve.engine.grammars.json_schema.uris import names_parts, resolve
from oaiserve.engine.grammars.refusal import Refused

LARGEST_NUMBER = 2**53 - 1  # llguidance reads numbers as floats, which hold only some of the larger integers
LARGEST_BOUND = 9_223_372_036_854_656_000  # the largest number below 2^63 that llguidance reads and writes exactly
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_PLAIN_KEY = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]{0,60}", re.ASCII)


def step(place: str, key: str | int) -> str:
    """Return the JSON path of a key's value, as in $.properties.a.items[0]."""
    if isinstance(key, int):
        return f"{place}[{key}]"
    if _PLAIN_KEY.fullmatch(key):
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
    """Return the only values that a schema allows, each in one spelling; None if there may be others."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {json.dumps(plain(value), sort_keys=True) for value in values}


def plain(value: Any) -> Any:
    """Return a value with 1.0 replaced by 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


def is_large(value: Any) -> bool:
    """Return whether a value is a number that llguidance would change."""
    if not is_number(value) or abs(value) <= LARGEST_NUMBER:
        return False
    return bool(abs(value) > LARGEST_BOUND or float(value) != value)


def is_written_exactly(number: float) -> bool:
    """Return whether the shortest decimal text of a float, which is what llguidance writes, has exactly its value."""
    return Decimal(repr(number)) == number


def has_large(value: Any) -> bool:
    """Return whether a value is a large number or contains one."""
    if isinstance(value, dict | list):
        return any(map(has_large, value.values() if isinstance(value, dict) else value))
    return is_large(value)


def with_small_numbers(value: Any) -> Any:
    """Return a value whose large numbers are replaced by the largest one that isn't."""
    if isinstance(value, dict):
        return {name: with_small_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [with_small_numbers(each) for each in value]
    return LARGEST_NUMBER if is_large(value) else value


def stated_values(schema: dict[str, Any]) -> list[Any]:
    """Return the values in the "enum" or "const" of a schema."""
    values: list[Any] = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values


def holds_for_number(schema: dict[str, Any], number: float) -> bool:
    """Return whether a number is within the bounds of a schema, and is one of its multiples."""
    return (
        number >= schema.get("minimum", number)
        and number <= schema.get("maximum", number)
        and ("exclusiveMinimum" not in schema or number > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or number < schema["exclusiveMaximum"])
        and ("multipleOf" not in schema or Fraction(str(number)) % Fraction(str(schema["multipleOf"])) == 0)
    )


class SchemaDocument:
    """The whole schema, in which references are looked up. Nothing is ever fetched."""

    def __init__(self, root: Any) -> None:
        """References by URI are replaced in the document itself. Raises Refused."""
        self.root = root
        if any(map(names_parts, _objects(root))) and any("$ref" in each for each in _objects(root)):
            resolve(root)

    def find(self, reference: str, where: str) -> tuple[Any, str]:
        base, _, fragment = reference.partition("#")
        if base:
            raise Refused(f"{where} refers to {shown(reference)}, outside the schema; nothing is fetched")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            raise Refused(f"{where} refers to {shown(reference)}, which is not in the schema")
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


def _objects(document: Any) -> Iterator[dict[str, Any]]:
    waiting = [document]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
