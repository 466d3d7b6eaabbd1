"""Rewrites one schema: older drafts in the words of the newest, formats as patterns, contradictions refused."""

from __future__ import annotations

from typing import Any

from oaiserve.engine.grammars.json_schema.formats import FORMATS, NUMBER_FORMATS
from oaiserve.engine.grammars.json_schema.terms import TYPES, is_of, kinds_of, shown, step
from oaiserve.engine.grammars.refusal import Refused

_BOUNDS = (
    *((f"min{kind}", f"max{kind}") for kind in ("imum", "Length", "Items", "Properties")),
    *(("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "exclusiveMaximum")),
)


def modern(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a schema of an older draft in the words of 2020-12."""
    changed = dict(schema)
    for limit in ("Minimum", "Maximum"):
        exclusive = f"exclusive{limit}"
        plain = limit.lower()
        if isinstance(schema.get(exclusive), bool):  # draft 4
            del changed[exclusive]
            if schema[exclusive] and plain in schema:
                changed[exclusive] = changed.pop(plain)
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


def finish(prepared: dict[str, Any], place: str, is_alone: bool) -> None:
    """Check the keywords of a prepared schema against each other, and correct dependent ones."""
    _keep_values_of_types(prepared, place)
    if isinstance(prepared.get("multipleOf"), int):  # Its multiples are integers, so the end of a number is known.
        kinds = prepared.get("type", list(TYPES))
        kinds = kinds if isinstance(kinds, list) else [kinds]
        prepared["type"] = list(dict.fromkeys("integer" if kind == "number" else kind for kind in kinds))
    _check_bounds(prepared, place)
    _apply_format(prepared, place)
    listed = prepared.get("properties", {})
    needs_no_others = (
        bool(listed or prepared.get("patternProperties"))
        and all(name in listed for name in prepared.get("required", ()))
        and prepared.get("minProperties", 0) <= len(listed)
    )
    if is_alone and needs_no_others:
        prepared.setdefault("additionalProperties", False)
    missing = prepared.get("minProperties", 0) - len(set(prepared.get("required", ())))
    if missing > 1:
        # A name may occur twice among the additional ones, and then counts once.
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
    values = prepared["enum"] if name == "enum" else [prepared["const"]]
    fitting = [value for value in values if is_of(value, kinds)]
    if not fitting:
        raise Refused(f"no value of {step(place, name)} is of the type at {step(place, 'type')}", name)
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
            raise Refused(f"{step(place, low)} {relation} '{high}', got {shown(least)} and {shown(most)}", high)


def _apply_format(prepared: dict[str, Any], place: str) -> None:
    if "format" not in prepared:
        return
    name = prepared["format"]
    kinds = kinds_of(prepared)
    if "string" not in kinds and name in NUMBER_FORMATS:
        del prepared["format"]
        if bounds := NUMBER_FORMATS[name]:
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
    elif name == "hostname":
        prepared["maxLength"] = min(253, prepared.get("maxLength", 253))
