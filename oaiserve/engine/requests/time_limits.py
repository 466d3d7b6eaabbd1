"""Time limits of open requests: their deadlines, and the errors for missing them. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import Protocol

from oaiserve.engine.request import Request
from oaiserve.engine.requests.open_request import Bounds
from oaiserve.errors import APIError, DeadlineMissed, TimeLimitExceeded, Unavailable
from oaiserve.facts.times import RequestTimes

LEAST_DEADLINES = 4096  # deadlines that are stored before any are removed


class Limit(StrEnum):
    """The time limits of a request: two set by the server, and two by the request."""

    QUEUE = "queue"  # limits the time before the first step
    REQUEST = "request"
    FIRST_TOKEN = "first_token"
    END = "end"


class Deadlines:
    """The deadlines of requests. Those of requests that have ended are removed now and then."""

    def __init__(self, is_open: Callable[[str], bool]) -> None:
        self._is_open = is_open
        self._heap: list[tuple[int, str, Limit]] = []
        self._most = LEAST_DEADLINES  # above this, the deadlines of ended requests are removed

    def add(self, at_ns: int, request_id: str, limit: Limit) -> None:
        heappush(self._heap, (at_ns, request_id, limit))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if self._is_open(entry[1])]
            heapify(self._heap)
            self._most = max(LEAST_DEADLINES, 2 * len(self._heap))

    def take_expired(self, now_ns: int) -> Iterator[tuple[str, Limit]]:
        """Yield request and limit of each expired deadline, once."""
        while self._heap and self._heap[0][0] <= now_ns:
            yield heappop(self._heap)[1:]

    @property
    def next_ns(self) -> int | None:
        if self._heap:
            return self._heap[0][0]
        return None


class Limited(Protocol):
    """An open request, with its stamps so far."""

    @property
    def request(self) -> Request: ...
    @property
    def times(self) -> RequestTimes: ...


class TimeLimits:
    """The deadlines of open requests, from the server's bounds and from each request."""

    def __init__(self, bounds: Bounds, is_open: Callable[[str], bool]) -> None:
        """Begin without requests."""
        self._bounds = bounds
        self.deadlines = Deadlines(is_open)

    def begin(self, request: Request, submitted_ns: int) -> None:
        """Note the deadlines of a request, which count from `submitted_ns`."""
        queue_seconds = self._bounds.queue_timeout_seconds
        seconds = self._bounds.request_timeout_seconds
        if request.is_background:  # only its own deadlines apply
            queue_seconds = seconds = 0
        for at_ns, limit in (
            (queue_seconds and submitted_ns + int(queue_seconds * 1e9), Limit.QUEUE),
            (seconds and submitted_ns + int(seconds * 1e9), Limit.REQUEST),
            (request.first_token_deadline_ns, Limit.FIRST_TOKEN),
            (request.deadline_ns, Limit.END),
        ):
            if at_ns:
                self.deadlines.add(int(at_ns), request.request_id, limit)

    def overdue(self, opened: Limited, limit: Limit, retry_after_seconds: int) -> APIError | None:
        """Return the error of a request that has exceeded one of its limits, or None if it hasn't."""
        times = opened.times
        match limit:
            case Limit.QUEUE if times.scheduled is None:
                seconds = f"{self._bounds.queue_timeout_seconds:g}"
                message = f"The request waited {seconds} seconds and was not begun; try again later."
                return Unavailable(message, retry_after_seconds=retry_after_seconds)
            case Limit.REQUEST:
                seconds = f"{self._bounds.request_timeout_seconds:g}"
                return TimeLimitExceeded(f"The request took longer than {seconds} seconds, the limit here.")
            case Limit.FIRST_TOKEN if times.first_token is None:
                missed = "begun"
                at_ns = opened.request.first_token_deadline_ns
            case Limit.END:
                missed = "ended"
                at_ns = opened.request.deadline_ns
            case _:
                return None
        within_ms = ((at_ns or 0) - (times.received or 0)) / 1e6
        return DeadlineMissed(f"The answer has not {missed} within {within_ms:,.0f} ms, as the request asks for.")
