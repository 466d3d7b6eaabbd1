"""Chooses the request that the encoder works on next, by turns of clients. Engine thread only, no torch.

As for steps (`engine/scheduling/waiting.py`), each client has a counter of what was encoded for it, divided by its
share. The client with the lowest counter is next. The counter of a client that comes back is raised to the lowest
counter of those that wait. So however many images a client has, another client waits for one of them at most, besides
its own earlier ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

Waiting = TypeVar("Waiting")

_service = attrgetter("service")
MOST_ABSENT = 1024  # clients that are remembered although none of their requests waits


@dataclass(slots=True, eq=False)
class _Client(Generic[Waiting]):
    name: str
    service: float = 0.0
    waiting: deque[Waiting] = field(default_factory=deque)


class EncoderTurns(Generic[Waiting]):
    """The waiting requests by client, each client's in order of arrival."""

    def __init__(self, *, by_client: bool) -> None:
        self._by_client = by_client
        self._clients: dict[str, _Client[Waiting]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, one: Waiting, client: str) -> None:
        known = self._of(client)
        present = [other.service for other in self._clients.values() if other.waiting]
        if not known.waiting and present:
            known.service = max(known.service, min(present))
        known.waiting.append(one)
        self._num_waiting += 1

    def remove(self, one: Waiting, client: str) -> None:
        self._of(client).waiting.remove(one)
        self._num_waiting -= 1
        if not self._num_waiting:  # Past service doesn't matter while nothing waits.
            self._clients.clear()
        elif len(self._clients) > 2 * MOST_ABSENT:
            absent = sorted((other for other in self._clients.values() if not other.waiting), key=_service)
            for other in absent[:-MOST_ABSENT]:
                del self._clients[other.name]

    def first(self) -> Waiting:
        """Return the next request. Raises ValueError if none waits."""
        return min((client for client in self._clients.values() if client.waiting), key=_service).waiting[0]

    def served(self, client: str, rows: int, share: float) -> None:
        """Count what was encoded for a client, in rows of vectors."""
        self._of(client).service += rows / share

    def _of(self, client: str) -> _Client[Waiting]:
        name = client if self._by_client else ""
        return self._clients.setdefault(name, _Client(name))
