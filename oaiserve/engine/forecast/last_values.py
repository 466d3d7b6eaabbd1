"""`LastValues` holds the newest values of a series in order, for recent quantiles. Stdlib only."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class LastValues:
    """The last values of a series, up to a maximum number, in order. Adding one doesn't sort them again."""

    __slots__ = ("_in_time", "_most", "in_order")

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_time: deque[float] = deque()
        self.in_order: list[float] = []

    def add(self, value: float) -> None:
        if len(self._in_time) >= self._most:
            del self.in_order[bisect_left(self.in_order, self._in_time.popleft())]
        self._in_time.append(value)
        insort(self.in_order, value)
