"""Rewrites keywords that depend on an instance's properties or on other keywords in terms of simpler ones.

A negation becomes a union of schemas, each of which is valid for some of the instances that the negated one rejects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import pairwise
from typing import Any

from oaiserve.engine.grammars import regexes
from oaiserve.engine.grammars.json_schema.terms import TYPES, is_number, is_of, stated_values

MOST_DEPENDENCIES = 8  # Each dependency of a schema doubles its alternatives.
MOST_EXCLUDED = 8  # numbers that a negation excludes; it has an alternative for each gap between them
MOST_CHARACTERS = 200  # characters of excluded texts; the pattern for all other texts has about the square of this
MOST_DEPTH = 20  # nesting depth of negated schemas
_DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")
# Keywords of other schemas that may evaluate properties or items as well.
_EVALUATING = {
    *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "contains"),
    *_DEPENDENCIES,
}
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_REWRITTEN = {*_UNEVALUATED, *_DEPENDENCIES, "not", "if"}


def without_conditions(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with fewer keywords that depend on others. It allows the same instances, or fewer of them."""
    if schema.keys().isdisjoint(_REWRITTEN):
        return schema
    schema = with_evaluated(schema)
    if not schema.keys().isdisjoint(_DEPENDENCIES):
        schema = _independent(schema)
    if "not" in schema and (alternatives := negated(schema["not"])):
        schema = _joined(schema, [_union(alternatives)], "not")
    if "if" in schema:
        schema = _without_if(schema)
    return schema


def with_evaluated(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace "unevaluated..." by "additional..." where no other schema evaluates any part."""
    if schema.keys().isdisjoint(_UNEVALUATED) or not schema.keys().isdisjoint(_EVALUATING):
        return schema
    changed = dict(schema)
    if "unevaluatedProperties" in changed:
        changed.setdefault("additionalProperties", changed.pop("unevaluatedProperties"))
    if "unevaluatedItems" in changed and not isinstance(changed.get("items"), list):
        changed.setdefault("items", changed.pop("unevaluatedItems"))
    return changed


def is_multiple_of_any(schema: dict[str, Any]) -> bool:
    """Return whether each integer is a multiple of the "multipleOf" of a schema for integers."""
    divisor: Any = schema.get("multipleOf")
    if schema.get("type") != "integer" or not is_number(divisor) or divisor <= 0:
        return False
    return Fraction(1) % Fraction(str(divisor)) == 0


def _independent(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace dependencies by unions: an object lacks a property, or satisfies what depends on it."""
    unions = []
    for keyword in _DEPENDENCIES:
        demands = schema.get(keyword, {})
        if not isinstance(demands, dict) or not all(map(_is_demand, demands.values())):
            return schema
        unions += [{"anyOf": [{"properties": {name: False}}, *more]} for name, more in _demands(demands)]
    if len(unions) > MOST_DEPENDENCIES:
        return schema
    return _joined(schema, unions, *_DEPENDENCIES)


def _demands(demands: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    for name, demand in demands.items():
        if isinstance(demand, list):
            if demand:
                yield name, [{"required": demand}]
        elif demand is not True:
            yield name, [demand]


def _is_demand(demand: Any) -> bool:
    if isinstance(demand, list):
        return all(isinstance(name, str) for name in demand)
    return isinstance(demand, dict | bool)


def _without_if(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a condition by two unions: "not if, or then" and "if, or else"."""
    unions = []
    if schema.get("then", True) is not True:
        alternatives = negated(schema["if"])
        if alternatives is None:
            return schema
        unions.append(_union([*alternatives, schema["then"]]))
    if schema.get("else", True) is not True:
        unions.append(_union([schema["if"], schema["else"]]))
    return _joined(schema, unions, "if", "then", "else")


def _joined(schema: dict[str, Any], others: list[Any], *without: str) -> dict[str, Any]:
    """Return a schema joined with others, without some keywords."""
    changed = {keyword: value for keyword, value in schema.items() if keyword not in without}
    joined = changed.get("allOf", [])
    if not isinstance(joined, list):
        return schema
    return {**changed, "allOf": [*joined, *others]} if others else changed


def _union(alternatives: list[Any]) -> Any:
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def negated(schema: Any, depth: int = 0) -> list[Any] | None:
    """Return the alternatives of a negated schema: [] if nothing is valid, None if it can't be expressed."""
    if isinstance(schema, bool):
        return [] if schema else [True]
    if not isinstance(schema, dict) or depth > MOST_DEPTH or not schema.keys().isdisjoint(_NOT_NEGATED):
        return None
    alternatives = []
    for keyword, value in schema.items():
        if keyword == "const" or keyword == "enum":
            more = _other_values(schema)
        elif keyword in _NEGATED:
            more = _NEGATED[keyword](value, depth + 1)
        else:
            continue
        if more is None:
            return None
        alternatives += more
    return alternatives


def _other_values(schema: dict[str, Any]) -> list[Any] | None:
    """Return alternatives to the values of an "enum" or "const". If a list or object is among them, no alternative is
    one."""
    values = stated_values(schema)
    if not isinstance(values, list):
        return None
    free = [kind for kind in TYPES if kind != "integer" and not any(is_of(value, {kind}) for value in values)]
    alternatives: list[Any] = [{"type": free}] if free else []
    if texts := {value for value in values if isinstance(value, str)}:
        if sum(map(len, texts)) > MOST_CHARACTERS or len(pattern := _other_texts(texts)) > regexes.MOST_CHARACTERS:
            return None
        alternatives.append({"type": "string", "pattern": pattern})
    if numbers := sorted({value for value in values if is_number(value)}):
        if len(numbers) > MOST_EXCLUDED:
            return None
        between = pairwise(numbers)
        alternatives += [
            {"type": "number", "exclusiveMaximum": numbers[0]},
            *({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in between),
            {"type": "number", "exclusiveMinimum": numbers[-1]},
        ]
    truths = {value for value in values if isinstance(value, bool)}
    if len(truths) == 1:
        alternatives.append({"const": not truths.pop()})
    return alternatives


def _other_texts(texts: set[str]) -> str:
    """Return a pattern for all strings except these: it branches off after each of their prefixes."""
    parts = []
    for beginning in sorted({text[:end] for text in texts for end in range(len(text) + 1)}):
        following = {text[len(beginning)] for text in texts if text.startswith(beginning) and text != beginning}
        other = f"[^{regexes.literal(''.join(sorted(following)))}]" if following else "."
        parts.append(f"{regexes.literal(beginning)}{other}.*")
        if beginning not in texts:
            parts.append(regexes.literal(beginning))
    return f"(?s)^(?:{'|'.join(parts)})$"


def _other_types(value: Any, _: int) -> list[Any]:
    kinds = value if isinstance(value, list) else [value]
    if "integer" in kinds or "number" in kinds:
        kinds = [*kinds, "number", "integer"]  # No schema is valid for fractions alone.
    others = [kind for kind in TYPES if kind not in kinds and kind != "integer"]
    return [{"type": others}] if others else []


def _lacking(value: Any, _: int) -> list[Any] | None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return None
    return [{"type": "object", "properties": {name: False}} for name in value]


def _with_another_value(value: Any, depth: int) -> list[Any] | None:
    alternatives = []
    for name, schema in value.items() if isinstance(value, dict) else ():
        others = negated(schema, depth)
        if others is None:
            return None
        if others:
            alternatives.append({"type": "object", "required": [name], "properties": {name: _union(others)}})
    return alternatives


def _against_any(value: Any, depth: int) -> list[Any] | None:
    return _all_known(negated(each, depth) for each in (value if isinstance(value, list) else [None]))


def _against_all(value: Any, depth: int) -> list[Any] | None:
    unions = [negated(each, depth) for each in (value if isinstance(value, list) else [None])]
    if None in unions:
        return None
    return [{"allOf": [_union(union) for union in unions if union is not None]}] if all(unions) else []


def _all_known(unions: Iterable[list[Any] | None]) -> list[Any] | None:
    alternatives = []
    for union in unions:
        if union is None:
            return None
        alternatives += union
    return alternatives


def _beyond(keyword: str, kind: str, step: int) -> Callable[[Any, int], list[Any] | None]:
    """Return the negation of a bound, by the keyword of the opposite bound."""

    def negation(value: Any, _: int) -> list[Any] | None:
        if not is_number(value):  # In draft 4, exclusive bounds are booleans.
            return None
        return [{"type": kind, keyword: value + step}] if value + step >= 0 or not step else []

    return negation


_NEGATED: dict[str, Callable[[Any, int], list[Any] | None]] = {
    "not": lambda value, _: [value],
    "type": _other_types,
    "required": _lacking,
    "properties": _with_another_value,
    "allOf": _against_any,
    "anyOf": _against_all,
    "minimum": _beyond("exclusiveMaximum", "number", 0),
    "maximum": _beyond("exclusiveMinimum", "number", 0),
    "exclusiveMinimum": _beyond("maximum", "number", 0),
    "exclusiveMaximum": _beyond("minimum", "number", 0),
    "minLength": _beyond("maxLength", "string", -1),
    "maxLength": _beyond("minLength", "string", 1),
    "minItems": _beyond("maxItems", "array", -1),
    "maxItems": _beyond("minItems", "array", 1),
}
# Keywords whose negation can't be expressed by other keywords.
_NOT_NEGATED = {
    *("$ref", "$dynamicRef", "$recursiveRef", "oneOf", "if", "then", "else", "multipleOf", "pattern", "format"),
    *("items", "additionalItems", "prefixItems", "unevaluatedItems", "contains", "minContains", "maxContains"),
    *("uniqueItems", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("minProperties", "maxProperties", "x-guidance", *_DEPENDENCIES),
}
