"""The rate at which the queue drains, and the retry delay that follows from it. Stdlib only.

The engine thread measures the rate. Any thread may call `retry_after_seconds`.
"""

from __future__ import annotations

import math

MEASURE_NS = 500_000_000
WEIGHT = 0.3  # weight of the newest measurement, so that old ones fade within seconds
MOST_RETRY_SECONDS = 30  # the longest wait of OpenAI's SDK is in this range


class DrainRate:
    """The rate at which sequences leave the queue per second, measured while some wait."""

    def __init__(self) -> None:
        self.per_second = 0.0
        self._since_ns: int | None = None
        self._num_left = 0

    def observe(self, num_left: int, num_waiting: int, now_ns: int) -> None:
        """Take a measurement: the number of sequences that have left so far. Nothing is measured while the queue is
        empty."""
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
        """Return the expected time until the queue has drained; one second while the rate is unknown."""
        return drain_seconds(self.per_second, num_waiting)


def drain_seconds(per_second: float, num_waiting: int) -> int:
    """Return the time until this many have left a queue at this rate, between 1 second and MOST_RETRY_SECONDS."""
    if per_second <= 0:
        return 1
    return max(1, min(MOST_RETRY_SECONDS, math.ceil(num_waiting / per_second)))
