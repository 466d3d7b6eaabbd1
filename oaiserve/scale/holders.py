"""`Holders` notes which replicas hold which beginnings of prompts, within a bound whatever the traffic."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

MOST_HOLDERS = 64  # of one beginning; what so many hold, the next in its order most probably hold, too

Replica = TypeVar("Replica")


class Holders(Generic[Replica]):
    """Replicas by the key of what they hold. The least recently used keys are forgotten first, and of a key with too
    many holders the one that was noted first, which may have left."""

    def __init__(self, most_keys: int) -> None:
        self._most_keys = most_keys
        self._holders: OrderedDict[int, tuple[Replica, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def find(self, key: int) -> tuple[Replica, ...]:
        return self._holders.get(key, ())

    def add(self, key: int, replica: Replica) -> None:
        """Note that a replica holds something, or is about to compute it."""
        holders = self._holders.get(key)
        if holders is None:
            self._holders[key] = (replica,)
            if len(self._holders) > self._most_keys:
                self._holders.popitem(last=False)
            return
        self._holders.move_to_end(key)
        if replica not in holders:
            self._holders[key] = (*holders[len(holders) >= MOST_HOLDERS :], replica)

    def discard(self, key: int, replica: Replica) -> None:
        """Note that a replica holds something no longer."""
        holders = self._holders.get(key, ())
        if replica in holders:
            rest = tuple(one for one in holders if one is not replica)
            if rest:
                self._holders[key] = rest
            else:
                del self._holders[key]
