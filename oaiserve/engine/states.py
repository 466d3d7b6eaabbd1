"""The pool of states, and the prefix cache of them: integers and hashes, no torch."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush

from oaiserve.engine.blocks import BlockHash

SHORTEST_KEPT = 64  # tokens that a kept state must save: where one is kept, a prompt is computed in one step more


class StatePool:
    """The pool of `num_states` states, of models whose layers have a state in place of keys and values.

    A state has the same size for sequences of any length. It belongs to one sequence, or it is cached: a copy, found by
    the hash of the last block of its tokens. When a sequence needs a state, the least recently used copies go first.
    The lowest free state is handed out first: unneeded memory is never touched.
    """

    def __init__(self, num_states: int, shortest_kept: int = SHORTEST_KEPT) -> None:
        if num_states < 1:
            raise ValueError(f"a pool has at least one state, got {num_states}")
        self.num_states = num_states
        self.shortest_kept = shortest_kept
        self._free = list(range(num_states))  # a heap
        self._kept: OrderedDict[BlockHash, int] = OrderedDict()

    @property
    def num_owned(self) -> int:
        return self.num_states - len(self._free) - len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def allocate(self) -> int | None:
        """Return a state for a sequence, or None if all belong to others. It has the last owner's content."""
        if self._free:
            return heappop(self._free)
        return self._kept.popitem(last=False)[1] if self._kept else None

    def release(self, state: int) -> None:
        if state in self._free or state in self._kept.values():
            raise AssertionError(f"state {state} was released twice")
        heappush(self._free, state)

    def keep(self, block_hash: BlockHash) -> int | None:
        """Return the place for a copy under this hash, or None if there is one already, or no free state."""
        if self.find(block_hash) is not None:
            return None
        state = self.allocate()
        if state is not None:
            self._kept[block_hash] = state
        return state

    def forget_kept(self) -> None:
        for state in self._kept.values():
            heappush(self._free, state)
        self._kept.clear()

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the cached state of these tokens, or None. The next `allocate` may reuse it."""
        state = self._kept.get(block_hash)
        if state is not None:
            self._kept.move_to_end(block_hash)
        return state
