"""Scheduling policies: the order in which sequences are admitted, and the reverse order in which they are preempted.

A policy gives each sequence a key when it arrives, which never changes. The lowest key is admitted first, the highest
key is preempted first. If clients take turns, those of a client's requests come first, and this decides between equals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oaiserve.engine.sequences.sequence import Sequence

# The number of prompt tokens that one place in the order of arrival is worth under `shortest`: a prompt that is 3,200
# tokens longer than all others is overtaken by 100 of those that arrive later, and by no more.
AGEING_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Policy:
    """How waiting sequences are ordered, by arrival or otherwise, and whether clients take turns (see `waiting.py`)."""

    key: Callable[[Sequence, int], tuple[int, ...]]  # sort key of a sequence and its place in the order of arrival
    by_client: bool = False  # clients take turns, and their requests do


fcfs = Policy(lambda sequence, arrival: (arrival,))  # first come, first served
fair = Policy(fcfs.key, by_client=True)
priority = Policy(lambda sequence, arrival: (sequence.priority, arrival))  # the lowest first, then by arrival
# The shortest prompt first, with ageing, so that a long one gets its turn.
shortest = Policy(lambda sequence, arrival: (sequence.prompt_len + AGEING_TOKENS * arrival, arrival))

POLICIES = {"fcfs": fcfs, "fair": fair, "priority": priority, "shortest": shortest}
