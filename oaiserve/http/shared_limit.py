"""A limit on waiting work that clients share, such as bytes of bodies or choices in the queue. Stdlib only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock


def is_within_share(most: float, taken: Mapping[str, int], client: str, number: int) -> bool:
    """Return whether a client may take `number` more of a limit that all clients together have used up.

    It may if it stays within an equal share of the limit, and if the work of all but the largest client would fit.
    """
    own = taken.get(client, 0)
    num_others = len(taken.keys() - {client})
    without_largest = sum(taken.values()) - max(taken.values(), default=0)
    return own + number <= most // (num_others + 1) and without_largest + number <= most


class SharedLimit:
    """A count of waiting work by client, in any unit, and its limit. Any thread may call its methods.

    One client may take the whole limit while nobody else needs it. The other clients can then still take equal shares:
    they may exceed the limit as long as they would fit without the largest client. So all clients together take at most
    twice the limit, or the limit and one large request.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._taken: dict[str, int] = {}  # keyed by client, for clients that hold any
        self.total = 0
        # Called with each number that is given back, and its client, on the thread that gives it back.
        self.on_give_back: Callable[[str, int], object] = lambda client, number: None

    def take(self, client: str, number: int) -> bool:
        """Take this number, or return False if there is no room. The first to take some may exceed the limit."""
        if not number:
            return True
        with self._lock:
            is_full = self.total and self.total + number > self._most
            if is_full and not is_within_share(self._most, self._taken, client, number):
                return False
            self._add(client, number)
            return True

    def add(self, client: str, number: int) -> None:
        """Count this number, even beyond the limit: it is there already, and cannot be refused any more."""
        if number:
            with self._lock:
                self._add(client, number)

    def _add(self, client: str, number: int) -> None:
        self.total += number
        self._taken[client] = self._taken.get(client, 0) + number

    def give_back(self, client: str, number: int) -> None:
        if not number:
            return
        with self._lock:
            self.total -= number
            left = self._taken.pop(client) - number
            if left:
                self._taken[client] = left
        self.on_give_back(client, number)
