"""Scheduling policies: the order in which sequences are admitted, and the reverse order in which they are preempted.

A policy gives each sequence a key when it arrives, which never changes. The lowest key is admitted first, the highest
key is preempted first.
"""

from __future__ import annotations

from collections.abc import Callable

from oaiserve.engine.sequence import Sequence

Key = tuple[int, ...]
Policy = Callable[[Sequence, int], Key]  # the sequence, and its place in the order of arrival

# The number of prompt tokens that one place in the order of arrival is worth under `shortest`: a prompt that is 3,200
# tokens longer than all others is overtaken by 100 of those that arrive later, and by no more.
AGEING_TOKENS = 32


def fcfs(sequence: Sequence, arrival: int) -> Key:
    """Order sequences by their arrival: first come, first served."""
    return (arrival,)


def priority(sequence: Sequence, arrival: int) -> Key:
    """Order sequences by the request field `priority`, lowest first, then by their arrival."""
    return (sequence.priority, arrival)


def shortest(sequence: Sequence, arrival: int) -> Key:
    """Order sequences by the length of their prompts, shortest first, with ageing, so that a long one gets its turn."""
    return (sequence.prompt_len + AGEING_TOKENS * arrival, arrival)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "shortest": shortest}
