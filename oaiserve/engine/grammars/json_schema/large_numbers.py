"""Prepared schemas with numbers that no float holds exactly, such as the bounds of 64-bit integers, as Lark.

llguidance reads numbers as floats. So each schema that contains or references such a number is written as Lark here,
and its other subschemas stay JSON Schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from oaiserve.engine.grammars.json_schema.terms import LARGEST_NUMBER, TYPES, is_number
from oaiserve.engine.grammars.refusal import Refused

SEPARATORS = (", ", ": ")  # between items, and between a key and its value
_WIDEST = LARGEST_NUMBER - 1  # exclusive bounds have a next integer, too
_LOW = ("minimum", "exclusiveMinimum")
_HIGH = ("maximum", "exclusiveMaximum")
_BOUNDS = (*_LOW, *_HIGH)
_NUMERIC = {*_BOUNDS, "type", "multipleOf"}
_JOINED = {"$ref", "allOf", "anyOf", "enum", "const"}
MOST_DEPTH = 30  # references within each other, around such a number
_MESSAGE = f"the schema has a number beyond {LARGEST_NUMBER} together with keywords about more than one value"
_SHAPES = {
    "object": {"type", "properties", "required", "additionalProperties"},
    "array": {"type", "items", "minItems", "maxItems"},
}


def has_large(document: Any) -> bool:
    """Return whether a schema has such a number anywhere."""
    if isinstance(document, dict):
        return any(map(has_large, document.values()))
    if isinstance(document, list):
        return any(map(has_large, document))
    return is_number(document) and abs(document) > _WIDEST


def check_large_numbers(document: dict[str, Any]) -> None:
    """Raise Refused if a prepared document has such a number where it cannot be obeyed."""
    if has_large(document):
        LargeNumbers(document, "part")


class LargeNumbers:
    """Writes a prepared document as rules of Lark. Its subschemas without large numbers are documents in `parts`."""

    def __init__(self, document: dict[str, Any], name: str, separators: tuple[str, str] = SEPARATORS) -> None:
        """The rules call the parts by the `name` and a number: `@NAME_0`, `@NAME_1` and so on. Raises Refused if a
        schema combines a large number with keywords about more than one value."""
        self._definitions = document.get("$defs", {})
        self._name = name
        self._separators = separators
        self._rules: dict[str, str] = {}
        self._depth = 0
        self.parts: list[dict[str, Any]] = []
        large = {each for each, schema in self._definitions.items() if has_large(schema)}
        while more := {
            each
            for each, schema in self._definitions.items()
            if each not in large and large.intersection(_references(schema))
        }:
            large |= more
        self._large = large
        start = self._of({key: value for key, value in document.items() if key != "$defs"})
        self.lark = "\n".join([f"start: {start}", *(f"{rule}: {text}" for rule, text in self._rules.items())])

    def _of(self, schema: Any) -> str:
        leads_to_large = bool(self._large.intersection(_references(schema)))
        if not has_large(schema) and not leads_to_large:
            self.parts.append(
                {**(schema if isinstance(schema, dict) else {"allOf": [schema]}), "$defs": self._definitions}
            )
            return f"@{self._name}_{len(self.parts) - 1}"
        try:
            return self._written(schema)
        except Refused:
            if leads_to_large:
                raise
            return self._of(_narrowed(schema))  # Narrower bounds allow only valid numbers.

    def _written(self, schema: dict[str, Any]) -> str:
        keywords = set(schema)
        if keywords == {"$ref"}:
            return self._reference(schema["$ref"].removeprefix("#/$defs/"))
        if keywords == {"anyOf"}:
            return f"({' | '.join(map(self._of, schema['anyOf']))})"
        if keywords == {"allOf"} and len(schema["allOf"]) == 1:
            return self._of(schema["allOf"][0])
        if keywords in ({"enum"}, {"const"}):
            return self._values(schema["enum"] if "enum" in schema else [schema["const"]])
        if not keywords.isdisjoint(_JOINED):
            raise Refused(_MESSAGE)
        kinds = schema.get("type", [kind for kind in TYPES if kind != "integer"])
        if isinstance(kinds, list):
            return f"({' | '.join(self._of(_of_type(schema, kind)) for kind in kinds)})"
        if kinds in ("integer", "number") and keywords <= _NUMERIC:
            return self._numbers(schema)
        if keywords <= _SHAPES.get(kinds, set()):
            if kinds == "object":
                return self._object(schema)
            return self._array(schema)
        raise Refused(_MESSAGE)

    def _reference(self, name: str) -> str:
        rule = f"large_{name}"
        if rule not in self._rules:
            self._rules[rule] = ""  # The rule may refer to itself.
            self._depth += 1
            if self._depth > MOST_DEPTH:
                raise Refused(f"the schema has a number over {LARGEST_NUMBER} after more than {MOST_DEPTH} '$ref'")
            self._rules[rule] = self._of(self._definitions[name])
            self._depth -= 1
        return rule

    def _values(self, values: list[Any]) -> str:
        texts = (json.dumps(value, ensure_ascii=False, separators=self._separators) for value in values)
        return f"({' | '.join(map(_quoted, texts))})"

    def _numbers(self, schema: dict[str, Any]) -> str:
        if "multipleOf" in schema:
            raise Refused(_MESSAGE)
        low = max((int(schema[key]) + (key != "minimum") for key in _LOW if key in schema), default=None)
        high = min((int(schema[key]) - (key != "maximum") for key in _HIGH if key in schema), default=None)
        if low is not None and high is not None and low > high:
            raise Refused(f"the schema has bounds beyond {LARGEST_NUMBER} with no integer between them")
        integers = f"/{integers_between(low, high)}/"
        if schema["type"] == "integer":
            return integers
        bounds = {key: max(-_WIDEST, min(_WIDEST, schema[key])) for key in _BOUNDS if key in schema}
        if max(low or 0, -(high or 0)) >= _WIDEST:
            return integers
        return f"({integers} | {self._of({'type': 'number', **bounds})})"

    def _object(self, schema: dict[str, Any]) -> str:
        if schema.get("additionalProperties") is not False or set(schema.get("required", ())) - set(
            schema.get("properties", ())
        ):
            raise Refused(_MESSAGE)
        comma, colon = self._separators
        required = set(schema.get("required", ()))
        later = ""  # text that may follow another property
        first = ""  # text that may follow the opening brace
        # They become rules, because both are in those of the property before.
        for name, each in reversed(schema.get("properties", {}).items()):
            written = self._named(f"{_quoted(json.dumps(name, ensure_ascii=False) + colon)} {self._of(each)}")
            more = f"{_quoted(comma)} {written}"
            if name in required:
                first = self._named(f"{written} {later}")
                later = self._named(f"{more} {later}")
            else:
                if first:
                    first = self._named(f"{written} {later} | {first}")
                else:
                    first = self._named(f"({written} {later})?")
                later = self._named(f"({more})? {later}")
        return f'"{{" {first} "}}"'

    def _named(self, text: str) -> str:
        name = f"part_{len(self._rules)}"
        self._rules[name] = text
        return name

    def _array(self, schema: dict[str, Any]) -> str:
        low = schema.get("minItems", 0)
        high = schema.get("maxItems")
        if high == 0:
            return '"[]"'
        item = self._of(schema["items"])
        most = "" if high is None else high - 1
        items = f"{item} ({_quoted(self._separators[0])} {item}){{{max(0, low - 1)},{most}}}"
        if low:
            return f'"[" {items} "]"'
        return f'"[" ({items})? "]"'


def _narrowed(schema: Any) -> Any:
    """Return a schema with bounds that floats hold exactly. Raises Refused where only larger numbers are valid."""
    if isinstance(schema, list):
        return [_narrowed(each) for each in schema]
    if isinstance(schema, dict):
        signs = {**dict.fromkeys(_LOW, -1), **dict.fromkeys(_HIGH, 1)}
        return {
            key: signs[key] * _WIDEST if key in signs and has_large(each) and each * signs[key] > 0 else _narrowed(each)
            for key, each in schema.items()
        }
    if has_large(schema):
        raise Refused(_MESSAGE)
    return schema


def _of_type(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a schema for instances of one type. Keywords about numbers stay only for types of numbers."""
    is_numeric = kind in ("integer", "number")
    keywords = {key: value for key, value in schema.items() if is_numeric or key not in (*_BOUNDS, "multipleOf")}
    return {key: value for key, value in keywords.items() if not is_numeric or key in _NUMERIC} | {"type": kind}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].removeprefix("#/$defs/")
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _quoted(text: str) -> str:
    return json.dumps(text)


def integers_between(low: int | None, high: int | None) -> str:
    """Return a regex of the integers in a range, as JSON writes them. None: the range has no such end."""
    forms: list[str] = []
    if low is None or low < 0:
        negative = _naturals(1 if high is None or high >= 0 else -high, None if low is None else -low)
        forms += (f"-{each}" for each in negative)
    if high is None or high >= 0:
        forms += _naturals(max(0, low or 0), high)
    return f"({'|'.join(forms)})"


def _naturals(low: int, high: int | None) -> Iterator[str]:
    for length in range(len(str(low)), len(str(low if high is None else high)) + 1):
        least = max(low, 10 ** (length - 1) if length > 1 else 0)
        most = 10**length - 1
        yield _between(str(least), str(most if high is None else min(high, most)))
    if high is None:
        yield f"[1-9][0-9]{{{len(str(low))},}}"


def _between(low: str, high: str) -> str:
    """Return a regex of the numbers from `low` to `high`, which have the same number of digits."""
    if low == high:
        return low
    if low.strip("0") == "" and high.strip("9") == "":
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return low[0] + _between(low[1:], high[1:])
    rest = len(low) - 1
    first = int(low[0])
    last = int(high[0])
    forms = []
    if rest and low[1:].strip("0"):
        forms.append(low[0] + _between(low[1:], "9" * rest))
        first += 1
    if rest and high[1:].strip("9"):
        forms.append(high[0] + _between("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        forms.append(f"[{first}-{last}]")
        if rest:
            forms[-1] += f"[0-9]{{{rest}}}"
    return f"({'|'.join(forms)})"
