"""A limit on waiting work, which no client can use up at the expense of others. Stdlib only."""

from __future__ import annotations

from threading import Lock


class SharedLimit:
    """A count of waiting work by client, in any unit, and its limit. Any thread may call its methods.

    One client may take all of the limit while nobody else needs it. The others may still take their shares then, equal
    for all waiting clients: beyond the limit, as long as they would fit without the client that has taken the most. So
    all clients together take at most twice the limit, or the limit and one large request.
    """

    def __init__(self, most: int | None) -> None:
        """Start with nothing. None is no limit."""
        self._most = most
        self._lock = Lock()
        self._taken: dict[str, int] = {}  # by client, of those that have any
        self.total = 0

    def take(self, client: str, number: int) -> bool:
        """Take so many, or return False if there is no room. If nothing is taken, any number may be."""
        with self._lock:
            if not self._has_room(client, number):
                return False
            self.total += number
            if number:
                self._taken[client] = self._taken.get(client, 0) + number
            return True

    def give_back(self, client: str, number: int) -> None:
        """Give back some of the client's amount."""
        if not number:
            return
        with self._lock:
            self.total -= number
            left = self._taken.pop(client) - number
            if left:
                self._taken[client] = left

    def _has_room(self, client: str, number: int) -> bool:
        if self._most is None or not self.total or self.total + number <= self._most:
            return True
        own, num_others = self._taken.get(client, 0), len(self._taken.keys() - {client})
        without_largest = self.total - max(self._taken.values())
        return own + number <= self._most // (num_others + 1) and without_largest + number <= self._most
