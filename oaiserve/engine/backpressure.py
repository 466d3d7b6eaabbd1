"""Backpressure: limits on waiting work, the drain rate of the queue, and deadlines of open requests. Stdlib only.

The engine thread owns the last two. Only `retry_after_seconds` of them may be called from any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from heapq import heapify, heappop, heappush
from threading import Lock

MEASURE_NS = 500_000_000
WEIGHT = 0.3  # weight of the newest measurement, so that the rate forgets in some seconds
LEAST_DEADLINES = 4096  # deadlines stored before any is dropped
MOST_RETRY_SECONDS = 30  # the longest wait of OpenAI's SDK is in this range


def is_within_share(most: float, taken: Mapping[str, int], client: str, number: int) -> bool:
    """Return whether a client may take `number` more of a limit that all clients together have used up.

    It may if it stays within its share, which is equal for all clients, and if all would fit without the largest one.
    """
    own = taken.get(client, 0)
    num_others = len(taken.keys() - {client})
    without_largest = sum(taken.values()) - max(taken.values(), default=0)
    return own + number <= most // (num_others + 1) and without_largest + number <= most


class SharedLimit:
    """A count of waiting work by client, in any unit, and its limit. Any thread may call its methods.

    One client may take all of the limit while nobody else needs it. The others may still take their shares then, equal
    for all waiting clients: beyond the limit, as long as they would fit without the largest client. So
    all clients together take at most twice the limit, or the limit and one large request.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._taken: dict[str, int] = {}  # by client, of those that have any
        self.total = 0

    def take(self, client: str, number: int) -> bool:
        """Take this number, or return False if there is no room. If nothing is taken yet, any number may be."""
        if not number:
            return True
        with self._lock:
            is_full = self.total and self.total + number > self._most
            if is_full and not is_within_share(self._most, self._taken, client, number):
                return False
            self.total += number
            self._taken[client] = self._taken.get(client, 0) + number
            return True

    def give_back(self, client: str, number: int) -> None:
        if not number:
            return
        with self._lock:
            self.total -= number
            left = self._taken.pop(client) - number
            if left:
                self._taken[client] = left


class DrainRate:
    """The rate at which sequences leave the queue per second, measured while some wait."""

    def __init__(self) -> None:
        self.per_second = 0.0
        self._since_ns: int | None = None
        self._num_left = 0

    def observe(self, num_left: int, num_waiting: int, now_ns: int) -> None:
        """Take the next measurement: the number of sequences that have gone so far. An empty queue measures nothing."""
        if num_waiting == 0 or self._since_ns is None:
            self._since_ns = now_ns if num_waiting else None
            self._num_left = num_left
            return
        if now_ns - self._since_ns < MEASURE_NS:
            return
        newest = (num_left - self._num_left) * 1e9 / (now_ns - self._since_ns)
        if self.per_second == 0:
            self.per_second = newest
        else:
            self.per_second = WEIGHT * newest + (1 - WEIGHT) * self.per_second
        self._since_ns = now_ns
        self._num_left = num_left

    def retry_after_seconds(self, num_waiting: int) -> int:
        """Return the expected time until the queue has drained; one second if the rate is unknown."""
        if self.per_second <= 0:
            return 1
        return max(1, min(MOST_RETRY_SECONDS, math.ceil(num_waiting / self.per_second)))


class Limit(StrEnum):
    """The limits on the time of a request: two of the server, and two of its own."""

    QUEUE = "queue"  # until it enters a step
    REQUEST = "request"
    FIRST_TOKEN = "first_token"
    END = "end"


class Deadlines:
    """The deadlines of requests. Some of these may have ended before theirs, and are forgotten now and then."""

    def __init__(self, is_open: Callable[[str], bool]) -> None:
        self._is_open = is_open
        self._heap: list[tuple[int, str, Limit]] = []
        self._most = LEAST_DEADLINES  # before those of ended requests are forgotten

    def add(self, at_ns: int, request_id: str, limit: Limit) -> None:
        heappush(self._heap, (at_ns, request_id, limit))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if self._is_open(entry[1])]
            heapify(self._heap)
            self._most = max(LEAST_DEADLINES, 2 * len(self._heap))

    def take_expired(self, now_ns: int) -> Iterator[tuple[str, Limit]]:
        """Yield the request and the limit of each deadline once after it."""
        while self._heap and self._heap[0][0] <= now_ns:
            yield heappop(self._heap)[1:]

    @property
    def next_ns(self) -> int | None:
        if self._heap:
            return self._heap[0][0]
        return None
