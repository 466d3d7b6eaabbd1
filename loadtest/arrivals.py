"""Compute when requests are sent: pure functions from options and a seed to seconds after the start.

Times are absolute, so a client that falls behind catches up instead of shifting the rest of the schedule.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from loadtest.errors import UsageError

ArrivalProcess = Literal["closed", "constant", "poisson", "ramp", "at-once", "trace"]
NEEDS_RATE = {"constant", "poisson", "ramp"}
STEADY = {"constant", "poisson"}  # the rate stays the same, so a growing number in flight is overload


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The options that decide when requests are sent."""

    arrival: ArrivalProcess = "closed"
    """When requests are sent. closed: by users who wait for their answer before they send the next request. constant,
    poisson: at --rate. ramp: from --rate to --ramp-to. at-once: all at the start. trace: at the "timestamp" of each
    line of --requests."""

    concurrency: int = 1
    """Number of users of a closed loop."""

    rate: float | None = None
    """Requests per second."""

    sweep: str | None = None
    """Run one point for each of several values, as in 1,2,4: values of --rate, or of --concurrency in a closed loop."""

    ramp_to: float | None = None
    """Rate at the end of a ramp."""

    ramp_seconds: float = 0.0
    """Length of the ramp. In a closed loop the users start one by one within this time."""

    duration_seconds: float | None = None
    """Stop sending after this time. Requests in flight are waited for."""

    def __post_init__(self) -> None:
        if self.arrival in NEEDS_RATE and self.rate is None and self.sweep is None:
            raise UsageError(f"--arrival {self.arrival} needs a --rate in requests per second, or a --sweep.")
        if self.rate is not None and self.arrival not in NEEDS_RATE:
            raise UsageError(
                f"--rate has no meaning with --arrival {self.arrival}. Use --arrival poisson, for example."
            )
        if self.rate is not None and not self.rate > 0:
            raise UsageError(f"--rate is {self.rate:g}, but must be more than 0.")
        if self.duration_seconds is not None and not self.duration_seconds > 0:
            raise UsageError(f"--duration-seconds is {self.duration_seconds:g}, but must be more than 0.")
        if self.ramp_seconds < 0:
            raise UsageError(f"--ramp-seconds is {self.ramp_seconds:g}, but must be at least 0.")
        if self.concurrency < 1:
            raise UsageError(f"--concurrency is {self.concurrency}, but must be at least 1.")
        if self.arrival == "ramp" and (self.ramp_to is None or self.ramp_to <= 0 or self.ramp_seconds <= 0):
            raise UsageError("--arrival ramp needs --ramp-to (requests per second) and --ramp-seconds.")

    @property
    def label(self) -> str:
        if not self.is_open:
            return f"{self.concurrency} user" + "s" * (self.concurrency > 1)
        return self.arrival if self.rate is None else f"{self.arrival}, {self.rate:g} requests/s"

    @property
    def ends_by_itself(self) -> bool:
        """Return whether the schedule itself determines the number of requests."""
        return self.arrival not in ("closed", "at-once") and self.duration_seconds is not None

    @property
    def is_open(self) -> bool:
        return self.arrival != "closed"


def schedule(arrivals: Arrivals, num_requests: int, seed: int, timestamps: list[float] | None = None) -> list[float]:
    """Return the send times of at most `num_requests` requests, in seconds after the start, in order.

    `timestamps` are those of a trace. A closed loop has no schedule: ValueError.
    """
    offsets = itertools.islice(_offsets(arrivals, random.Random(seed), timestamps), num_requests)
    if arrivals.duration_seconds is not None:
        limit = arrivals.duration_seconds
        offsets = itertools.takewhile(lambda offset: offset <= limit, offsets)  # type: ignore[assignment]
    return list(offsets)


def _offsets(arrivals: Arrivals, rng: random.Random, timestamps: list[float] | None) -> Iterator[float]:
    rate = arrivals.rate or 1.0
    match arrivals.arrival:
        case "constant":
            return (i / rate for i in itertools.count())
        case "poisson":
            return _poisson(rate, rng)
        case "ramp":
            return (
                _ramp_time(area, rate, arrivals.ramp_to or rate, arrivals.ramp_seconds) for area in _poisson(1, rng)
            )
        case "at-once":
            return itertools.repeat(0.0)
        case "trace":
            if timestamps is None:
                raise UsageError('--arrival trace needs --requests with a "timestamp" (seconds) in each line.')
            first = min(timestamps, default=0.0)
            return iter(sorted(t - first for t in timestamps))
        case "closed":
            raise ValueError("a closed loop has no schedule")


def _poisson(rate: float, rng: random.Random) -> Iterator[float]:
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())


def _ramp_time(area: float, first: float, last: float, seconds: float) -> float:
    """Return the time at which the integral of the rate reaches `area`. Applied to a Poisson process of rate 1, this
    gives a Poisson process whose rate follows the ramp."""
    total = (first + last) / 2 * seconds
    if area >= total:
        return seconds + (area - total) / last
    slope = (last - first) / seconds
    if slope == 0:
        return area / first
    return float(((first**2 + 2 * slope * area) ** 0.5 - first) / slope)
