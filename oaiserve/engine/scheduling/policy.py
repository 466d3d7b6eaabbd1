"""Scheduling policies: the order in which sequences are admitted, and the reverse order in which they are preempted.

A policy gives each sequence a key when it arrives, which never changes. The lowest key is admitted first, the highest
key is preempted first. If clients take turns, the turns of clients and requests come first, and the key decides between
equals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oaiserve.engine.sequences.sequence import Sequence

# How many prompt tokens one place in the order of arrival is worth under `shortest`: a prompt that is 3,200 tokens
# longer than all others is overtaken by 100 later ones at most.
AGEING_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Policy:
    """How waiting sequences are ordered, and whether clients take turns (see `waiting.py`)."""

    key: Callable[[Sequence, int], tuple[int, ...]]  # sort key of a sequence and its place in the order of arrival
    by_client: bool = False  # whether clients take turns, and a client's requests do


fcfs = Policy(lambda sequence, arrival: (arrival,))  # first come, first served
fair = Policy(fcfs.key, by_client=True)
priority = Policy(lambda sequence, arrival: (sequence.priority, arrival))  # the lowest first, then by arrival
# The shortest prompt first, with ageing, so that a long one gets its turn.
shortest = Policy(lambda sequence, arrival: (sequence.prompt_len + AGEING_TOKENS * arrival, arrival))

POLICIES = {"fcfs": fcfs, "fair": fair, "priority": priority, "shortest": shortest}
