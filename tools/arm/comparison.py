"""Compares greedy answers of two machines token by token, and tells a tie from a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Two tokens tie if both machines give them log-probabilities that differ by less than this.
TIE = 0.1
# Largest difference of the same token's log-probability on both machines.
MAX_DIFFERENCE = 0.25


class Position(NamedTuple):
    """One token of an answer, with the log-probabilities of the likeliest tokens by their ids, its own among them."""

    token_id: int
    logprobs: dict[int, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far two answers agree. `fault` is None if they are equal, or equal up to a tie."""

    num_equal: int  # tokens before the first difference
    num_tokens: int
    max_difference: float  # log-probabilities of equal tokens differ by up to this
    is_tie: bool = False
    fault: str | None = None


def compare(expected: Sequence[Position], actual: Sequence[Position]) -> Comparison:
    """Compare two answers up to their first difference, after which their contexts differ, too."""
    num_equal = 0
    max_difference = 0.0
    for ours, theirs in zip(actual, expected, strict=False):
        if ours.token_id != theirs.token_id:
            break
        difference = abs(ours.logprobs[ours.token_id] - theirs.logprobs[ours.token_id])
        if not difference <= MAX_DIFFERENCE:  # true for NaN, too
            fault = f"token {num_equal} has a log-probability that differs by {difference:.3f}"
            return Comparison(num_equal, len(expected), difference, fault=fault)
        max_difference = max(max_difference, difference)
        num_equal += 1
    result = Comparison(num_equal, len(expected), max_difference)
    if num_equal < min(len(expected), len(actual)):
        return _at_difference(result, expected[num_equal], actual[num_equal])
    if len(expected) != len(actual):
        fault = f"the answer has {len(actual)} tokens and not {len(expected)}"
        return Comparison(num_equal, len(expected), max_difference, fault=fault)
    return result


def _at_difference(result: Comparison, expected: Position, actual: Position) -> Comparison:
    gap = max(_gap(position, expected.token_id, actual.token_id) for position in (expected, actual))
    is_tie = gap < TIE
    fault = None
    if not is_tie:
        fault = (
            f"token {result.num_equal} is {actual.token_id} and not {expected.token_id}, and they are {gap:.3f} apart"
        )
    return Comparison(result.num_equal, result.num_tokens, result.max_difference, is_tie, fault)


def _gap(position: Position, one: int, other: int) -> float:
    """Return how far apart two tokens are, or infinity if one of them is not among the likeliest."""
    if one not in position.logprobs or other not in position.logprobs:
        return float("inf")
    return abs(position.logprobs[one] - position.logprobs[other])
