"""Rewrites single schemas: converts older drafts to the newest, turns formats into patterns, and refuses
contradictions."""

from __future__ import annotations

from math import inf, nextafter
from typing import Any

from oaiserve.engine.grammars.json_schema.conditions import is_multiple_of_any
from oaiserve.engine.grammars.json_schema.formats import FORMATS, NUMBER_FORMATS
from oaiserve.engine.grammars.json_schema.terms import (
    LARGEST_BOUND,
    LARGEST_NUMBER,
    TYPES,
    holds_for_number,
    is_number,
    is_of,
    is_written_exactly,
    kinds_of,
    shown,
    stated_values,
    step,
)
from oaiserve.engine.grammars.refusal import Contradiction, Refused

_BOUNDS = (
    *((f"min{kind}", f"max{kind}") for kind in ("imum", "Length", "Items", "Properties")),
    *(("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "exclusiveMaximum")),
)
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def modern(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a schema of an older draft in the keywords of 2020-12."""
    changed = dict(schema)
    for limit in ("Minimum", "Maximum"):
        exclusive = f"exclusive{limit}"
        plain = limit.lower()
        if isinstance(schema.get(exclusive), bool):  # draft 4
            del changed[exclusive]
            if schema[exclusive] and plain in schema:
                changed[exclusive] = changed.pop(plain)
    if "multipleOf" in schema and is_multiple_of_any(schema):
        del changed["multipleOf"]
    if isinstance(schema.get("items"), list):  # before 2020-12
        if "prefixItems" in schema:
            raise Refused(
                f"the keyword 'items' at {step(place, 'items')} must not be a list together with 'prefixItems'", "items"
            )
        changed = {("prefixItems" if name == "items" else name): value for name, value in changed.items()}
        if "additionalItems" in schema:
            changed["items"] = schema["additionalItems"]
        if not changed["prefixItems"]:
            del changed["prefixItems"]
    return changed


def finish(prepared: dict[str, Any], place: str, *, closes: bool) -> None:
    """Check the keywords of a prepared schema against each other, and correct those that depend on others. If `closes`,
    objects with listed properties have no others unless the schema mentions them."""
    _keep_values_of_types(prepared, place)
    if isinstance(prepared.get("multipleOf"), int):  # Its multiples are integers, so the end of a number is known.
        kinds = prepared.get("type", list(TYPES))
        kinds = kinds if isinstance(kinds, list) else [kinds]
        prepared["type"] = list(dict.fromkeys("integer" if kind == "number" else kind for kind in kinds))
    _apply_format(prepared, place)
    _check_bounds(prepared, place)
    _keep_values_within(prepared, place)
    _round_bounds(prepared, place)
    listed = prepared.get("properties", {})
    needs_no_others = (
        bool(listed or prepared.get("patternProperties"))
        and all(name in listed for name in prepared.get("required", ()))
        and prepared.get("minProperties", 0) <= len(listed)
    )
    if closes and needs_no_others:
        prepared.setdefault("additionalProperties", False)
    num_required = len(set(prepared.get("required", ())))
    missing = prepared.get("minProperties", 0) - num_required
    if missing > 1:
        # A name may occur twice among additional properties, and then counts only once.
        raise Refused(
            f"the keyword 'minProperties' at {step(place, 'minProperties')} is not supported where more than one "
            "of the properties is not named in 'required'",
            "minProperties",
        )


def _keep_values_of_types(prepared: dict[str, Any], place: str) -> None:
    """Drop the values of other types from "enum". llguidance gets no type together with values."""
    if "enum" not in prepared and "const" not in prepared:
        return
    name = "enum" if "enum" in prepared else "const"
    kinds = kinds_of({"type": prepared.pop("type")} if "type" in prepared else {})
    fitting = [value for value in stated_values(prepared) if is_of(value, kinds)]
    if not fitting:
        raise Contradiction(f"no value of {step(place, name)} is of the type at {step(place, 'type')}", name)
    if name == "enum":
        prepared["enum"] = fitting


def _check_bounds(prepared: dict[str, Any], place: str) -> None:
    for low, high in _BOUNDS:
        least = prepared.get(low)
        most = prepared.get(high)
        if least is None or most is None:
            continue
        is_exclusive = "exclusive" in low + high
        if least > most or (least == most and is_exclusive):
            if is_exclusive:
                relation = "must be less than"
            else:
                relation = "must not be greater than"
            raise Contradiction(f"{step(place, low)} {relation} '{high}', got {shown(least)} and {shown(most)}", high)


def _keep_values_within(prepared: dict[str, Any], place: str) -> None:
    """Drop the numbers in "enum" for which the other keywords don't hold, and these keywords."""
    values = stated_values(prepared)
    if not values or prepared.keys().isdisjoint(_NUMERIC):
        return
    fitting = [value for value in values if not is_number(value) or holds_for_number(prepared, value)]
    if not fitting:
        name = "enum" if "enum" in prepared else "const"
        raise Contradiction(f"no value of {step(place, name)} is within the bounds at {place}", name)
    for keyword in _NUMERIC:
        prepared.pop(keyword, None)
    if "enum" in prepared:
        prepared["enum"] = fitting


def _round_bounds(prepared: dict[str, Any], place: str) -> None:
    """Replace bounds beyond 2^53 - 1 by the next tighter ones that llguidance reads and writes exactly."""
    if prepared.keys().isdisjoint(_NUMERIC):
        return
    for plain, other, sign in (("minimum", "maximum", 1), ("maximum", "minimum", -1)):
        exclusive = f"exclusive{plain.capitalize()}"
        for name in (exclusive, plain):
            if abs(prepared.get(name, 0)) <= LARGEST_NUMBER:
                continue
            bound = _rounded_up(sign * prepared.pop(name), step(place, name), is_exclusive=name == exclusive)
            prepared[plain] = sign * max(bound, sign * prepared.get(plain, sign * bound))
            if bound >= 10**18:  # llguidance can't leave the opposite side open.
                prepared.setdefault(other, sign * LARGEST_BOUND)
    if prepared.get("minimum", -inf) > prepared.get("maximum", inf):
        raise Refused(f"the bounds at {place} are too close to each other for numbers beyond 2^53 - 1", "maximum")


def _rounded_up(bound: float, place: str, *, is_exclusive: bool) -> int:
    number = float(max(bound, -LARGEST_BOUND))
    while number < bound or (is_exclusive and number == bound) or not is_written_exactly(number):
        if number > LARGEST_BOUND:
            break
        number = nextafter(number, inf)
    if number > LARGEST_BOUND:
        raise Refused(f"the bound at {place} must be at most {LARGEST_BOUND}", place.rpartition(".")[2])
    return int(number)


def _apply_format(prepared: dict[str, Any], place: str) -> None:
    if "format" not in prepared:
        return
    name = prepared["format"]
    if "string" not in kinds_of(prepared):
        del prepared["format"]  # Other formats concern strings.
        if bounds := NUMBER_FORMATS.get(name):
            prepared["minimum"] = max(bounds[0], prepared.get("minimum", bounds[0]))
            prepared["maximum"] = min(bounds[1], prepared.get("maximum", bounds[1]))
    elif name not in FORMATS:
        known = ", ".join(FORMATS)
        raise Refused(f"the format at {step(place, 'format')} must be one of {known}, got {shown(name)}", "format")
    elif (pattern := FORMATS[name]) is not None:
        del prepared["format"]
        if "pattern" in prepared:
            prepared.setdefault("allOf", []).append({"pattern": f"^{pattern}$"})
        else:
            prepared["pattern"] = f"^{pattern}$"
    if name == "hostname":
        prepared["maxLength"] = min(253, prepared.get("maxLength", 253))
