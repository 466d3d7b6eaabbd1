"""`Holders` notes the replicas of each prefix key, within a bound for any traffic."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

MOST_HOLDERS = 64  # of one prefix; what so many hold, the next in its order most probably hold, too

Replica = TypeVar("Replica")


class Holders(Generic[Replica]):
    """Replicas by prefix key. The least recently used keys are forgotten first, and of too many holders the oldest."""

    def __init__(self, most_keys: int) -> None:
        self._most_keys = most_keys
        self._holders: OrderedDict[int, tuple[Replica, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def find(self, key: int) -> tuple[Replica, ...]:
        return self._holders.get(key, ())

    def add(self, key: int, replica: Replica) -> None:
        """Note a prefix that a replica holds, or is about to compute."""
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
        """Note a prefix that a replica no longer holds."""
        holders = self._holders.get(key, ())
        if replica in holders:
            rest = tuple(one for one in holders if one is not replica)
            if rest:
                self._holders[key] = rest
            else:
                del self._holders[key]
