"""Clients take turns: who waits longest for a turn gets the next one, however much another client asks for.

Stdlib only. The owner brings the lock.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """Waiting items, first come, first served for each client, while the clients take turns.

    Between two items of a client, each other client that waited at the first of them has got one. A client without
    waiting items is forgotten, so clients cost no memory.
    """

    def __init__(self) -> None:
        self._items: dict[str, deque[Item]] = {}  # no deque is empty
        self._order: deque[str] = deque()  # each client of `_items` once

    def __bool__(self) -> bool:
        return bool(self._order)

    def add(self, client: str, item: Item) -> None:
        self._of(client).append(item)

    def put_back(self, client: str, item: Item) -> None:
        """Let an item wait for another turn of its client, before the client's later ones."""
        self._of(client).appendleft(item)

    def take(self) -> Item:
        """Take the first item of the client whose turn it is. There must be one."""
        client = self._order.popleft()
        items = self._items[client]
        item = items.popleft()
        if items:
            self._order.append(client)
        else:
            del self._items[client]
        return item

    def take_all(self) -> list[Item]:
        return [self.take() for _ in range(sum(map(len, self._items.values())))]

    def _of(self, client: str) -> deque[Item]:
        if client not in self._items:
            self._items[client] = deque()
            self._order.append(client)
        return self._items[client]
