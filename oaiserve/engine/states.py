"""The pool of states: which place in it each sequence has. Integers, no torch."""

from __future__ import annotations

from heapq import heappop, heappush


class StatePool:
    """The pool hands out `num_states` states, of models with layers that keep a state in place of keys and values.

    A state has the same size however long its sequence is, and belongs to one sequence. The lowest free one is handed
    out first, so that memory which was never needed is never touched.
    """

    def __init__(self, num_states: int) -> None:
        if num_states < 1:
            raise ValueError(f"a pool has at least one state, got {num_states}")
        self.num_states = num_states
        self._free = list(range(num_states))  # a heap

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        """Return a state that nobody has, or None. What is in it means nothing: a sequence begins with zeros."""
        return heappop(self._free) if self._free else None

    def release(self, state: int) -> None:
        if state in self._free:
            raise AssertionError(f"state {state} was released twice")
        heappush(self._free, state)
