"""Reads the parameter that ends a choice in a loop. It has vLLM's name and fields, and `min_length`."""

from __future__ import annotations

from oaiserve.engine.types.loop_rule import USUAL, LoopRule
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.object_types import (
    MAX_LOOP_LENGTH,
    MAX_PATTERN_COUNT,
    MAX_PATTERN_SIZE,
    Integer,
    RepetitionDetection,
)

PARAM = "repetition_detection"


def loop_rule(value: bool | RepetitionDetection | None) -> LoopRule | None:
    """Return the rule by which a choice ends in a loop, or None if nothing ends it. Raises InvalidRequest."""
    if isinstance(value, bool) or value is None:
        return USUAL if value else None
    longest = _integer("max_pattern_size", value.max_pattern_size, 0, MAX_PATTERN_SIZE)
    shortest = _integer("min_pattern_size", value.min_pattern_size, 0, MAX_PATTERN_SIZE)
    min_length = _integer("min_length", value.min_length, 0, MAX_LOOP_LENGTH)
    if shortest > longest:
        raise invalid(
            PARAM, f"must be <= max_pattern_size ({longest}), got {shortest}", where=f"{PARAM}.min_pattern_size"
        )
    if not longest:
        return None
    return LoopRule(
        max_pattern_size=longest,
        min_pattern_size=max(1, shortest),
        min_count=_integer("min_count", value.min_count, 2, MAX_PATTERN_COUNT),
        min_length=min_length,
    )


def _integer(name: str, value: Integer | None, low: int, high: int) -> int:
    number = 0 if value is None else value
    where = f"{PARAM}.{name}"
    if isinstance(number, float) and not number.is_integer():
        raise invalid(PARAM, f"must be an integer, got {show(number)}", where=where)
    if not low <= number <= high:
        raise invalid(PARAM, f"must be {low} to {high}, got {show(value)}", where=where)
    return int(number)
