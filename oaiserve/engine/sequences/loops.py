"""Finds loops: answers that end in the same tokens again and again. Stdlib only."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from oaiserve.engine.types.loop_rule import USUAL, LoopRule

MOST_BETWEEN_CHECKS = 32  # tokens


class Loop(NamedTuple):
    """The loop in which an answer ends."""

    period: int  # tokens that are repeated
    length: int  # last tokens that have this period


class LoopWatch:
    """Takes the tokens of one choice, and reports when they end in a loop.

    It checks at fixed intervals of tokens, so a choice ends at the same token in every batch.
    """

    def __init__(self, rule: LoopRule) -> None:
        self.rule = rule
        self._token_ids = array("i")
        shortest = rule.least_length(rule.min_pattern_size)
        self._interval = min(max(shortest // 4, 1), MOST_BETWEEN_CHECKS)
        self._next_check = shortest

    def push(self, token_id: int) -> bool:
        """Take the next token, and return whether a check finds a loop now."""
        token_ids = self._token_ids
        token_ids.append(token_id)
        if len(token_ids) < self._next_check:
            return False
        self._next_check += self._interval
        return _shortest_period(token_ids, self.rule) is not None


def loop_at_end(token_ids: Iterable[int], rule: LoopRule = USUAL) -> Loop | None:
    """Return the loop of the shortest period in which these tokens end, or None."""
    ids = array("i", token_ids)
    period = _shortest_period(ids, rule)
    if period is None:
        return None
    return Loop(period, _length(_reversed(ids), period, len(ids)))


def _shortest_period(token_ids: array[int], rule: LoopRule) -> int | None:
    """Return the shortest period of a loop in which these tokens end.

    The last tokens of a loop also occur one period earlier, so these are searched for, in C. The time is linear: a
    candidate that fails excludes some longer ones.
    """
    backward = _reversed(token_ids[-rule.least_length(rule.max_pattern_size) :])
    size = token_ids.itemsize
    excluded = rule.min_pattern_size - 1
    while excluded < rule.max_pattern_size:
        num_repeated = rule.least_repeated(excluded)
        last = backward[: num_repeated * size]
        if len(last) < num_repeated * size:
            return None
        place = backward.find(last, (excluded + 1) * size, (rule.max_pattern_size + num_repeated) * size)
        while place % size and place != -1:  # between two tokens
            place = backward.find(last, place + 1, (rule.max_pattern_size + num_repeated) * size)
        if place == -1:
            return None
        period = place // size
        length = _length(backward, period, rule.least_length(period))
        if length >= rule.least_length(period):
            return period
        # If p < q are both periods of the last p + q tokens, they have a common divisor that is a period, too. So no
        # period up to `length - period` reaches further back than this one.
        excluded = max(period, length - period)
    return None


def _reversed(token_ids: array[int]) -> bytes:
    """Return the bytes of these ids in reverse order."""
    backward = token_ids[:]
    backward.reverse()
    return backward.tobytes()


def _length(backward: bytes, period: int, most: int) -> int:
    """Return how many of the last tokens have this period, at most `most`."""
    size = array("i").itemsize
    earlier = backward[period * size : most * size]
    later = backward[: len(earlier)]
    differing_bits = (int.from_bytes(earlier) ^ int.from_bytes(later)).bit_length()
    num_same_bytes = len(earlier) - (differing_bits + 7) // 8
    return period + num_same_bytes // size
