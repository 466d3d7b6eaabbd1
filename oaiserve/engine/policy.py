"""Scheduling policies: the order in which sequences are admitted, and the reverse order in which they are preempted.

A policy gives each sequence a key when it arrives, which never changes. The lowest key is admitted first, the highest
key is preempted first. If clients take turns, this is the order among the sequences of one client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oaiserve.engine.sequence import Sequence

Key = tuple[int, ...]

# The number of prompt tokens that one place in the order of arrival is worth under `shortest`: a prompt that is 3,200
# tokens longer than all others is overtaken by 100 of those that arrive later, and by no more.
AGEING_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy is an order of sequences, by arrival or otherwise, and whether clients take turns (`engine/waiting`)."""

    key: Callable[[Sequence, int], Key]  # of a sequence, and its place in the order of arrival
    by_client: bool = False  # clients take turns


def _by_arrival(sequence: Sequence, arrival: int) -> Key:
    return (arrival,)


def _by_priority(sequence: Sequence, arrival: int) -> Key:
    return (sequence.priority, arrival)


def _by_length(sequence: Sequence, arrival: int) -> Key:
    return (sequence.prompt_len + AGEING_TOKENS * arrival, arrival)


fcfs = Policy(_by_arrival)  # first come, first served
fair = Policy(_by_arrival, by_client=True)
priority = Policy(_by_priority)  # by the request field `priority`, lowest first, then by arrival
shortest = Policy(_by_length)  # the shortest prompt first, with ageing, so that a long one gets its turn

POLICIES = {"fcfs": fcfs, "fair": fair, "priority": priority, "shortest": shortest}
