"""Who goes first among those that wait, and last when blocks run out: one ordering per policy.

A policy gives each sequence a key when it arrives; the key never changes. The lowest waits shortest, the highest is
preempted first.
"""

from __future__ import annotations

from collections.abc import Callable

from oaiserve.engine.sequence import Sequence

Key = tuple[int, ...]
Policy = Callable[[Sequence, int], Key]  # the sequence, and its place in the order of arrival

# Under `shortest`, how many prompt tokens a place in the order of arrival is worth: a prompt that is 3,200 tokens
# longer than all others is overtaken by 100 of those that come later, then by none.
AGEING_TOKENS = 32


def fcfs(sequence: Sequence, arrival: int) -> Key:
    """First come, first served."""
    return (arrival,)


def priority(sequence: Sequence, arrival: int) -> Key:
    """The lowest number of the request field `priority` first; then first come, first served."""
    return (sequence.priority, arrival)


def shortest(sequence: Sequence, arrival: int) -> Key:
    """The shortest prompt first, with ageing, so that a long one gets its turn."""
    return (sequence.prompt_len + AGEING_TOKENS * arrival, arrival)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "shortest": shortest}
