"""`Forecast` is the promise to a request at its admission: when its first token comes, and its last if the length of
the answer is known. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import accumulate
from math import log
from statistics import NormalDist
from typing import Any

from oaiserve.facts.fact import fact
from oaiserve.facts.times import RequestTimes

FORECAST_HEADER = "x-oaiserve-forecast"
LEVELS = (0.05, 0.5, 0.95)  # shares of requests that are earlier than an interval's beginning, its median and its end
_TIMES = ("first_token_low_ns", "first_token_ns", "first_token_high_ns", "end_low_ns", "end_ns", "end_high_ns")
_NORMAL = NormalDist()
_HIGH_DEVIATION = _NORMAL.inv_cdf(LEVELS[2])  # distance from the median, in standard deviations


class Held(StrEnum):
    """Whether a time was before, in or after its interval."""

    WITHIN = "within"
    EARLIER = "earlier"
    LATER = "later"


@dataclass(frozen=True, slots=True)
class Forecast:
    """The times of a request's first and last token, each as an interval that holds nine in ten, and as its median.

    They count from the stamp `received`. Times that are not promised are 0. The times of each interval are in order,
    and no time of the end comes before that of the first token: any earlier one is raised.
    """

    is_calibrated: bool = False  # enough answers were compared with their forecasts
    first_token_low_ns: int = 0  # One request in twenty is earlier.
    first_token_ns: int = fact(
        "The forecast time to first token: half of the requests have it earlier.",
        log="forecast_first_token_ms",
        span="oaiserve.forecast.first_token_ns",
        when="is_calibrated",
    )
    first_token_high_ns: int = fact(
        "One request in twenty has its first token later.",
        span="oaiserve.forecast.first_token_high_ns",
        span_when="is_calibrated",
    )
    end_low_ns: int = 0  # like those of the first token
    end_ns: int = fact(
        "The forecast time to the last token: half of the requests have it earlier.",
        log="forecast_end_ms",
        span="oaiserve.forecast.end_ns",
        when="has_end",
    )
    end_high_ns: int = fact(
        "One request in twenty has its last token later.",
        span="oaiserve.forecast.end_high_ns",
        span_when="has_end",
    )

    def __post_init__(self) -> None:
        first_token_ns = tuple(accumulate(self.first_token_interval_ns, max))
        end_ns = accumulate(map(max, self.end_interval_ns, first_token_ns), max) if self.has_end else (0, 0, 0)
        for name, ns in zip(_TIMES, (*first_token_ns, *end_ns), strict=True):
            object.__setattr__(self, name, ns)

    @property
    def has_end(self) -> bool:
        """Return whether the end is promised, too."""
        return self.end_high_ns > 0

    @property
    def first_token_interval_ns(self) -> tuple[int, int, int]:
        return self.first_token_low_ns, self.first_token_ns, self.first_token_high_ns

    @property
    def end_interval_ns(self) -> tuple[int, int, int]:
        return self.end_low_ns, self.end_ns, self.end_high_ns

    @property
    def intervals_ns(self) -> tuple[int, ...]:
        """Return the low end, the median and the high end of each interval that is promised."""
        return (*self.first_token_interval_ns, *(self.end_interval_ns if self.has_end else ()))

    def held(self, times: RequestTimes) -> Iterator[tuple[str, Held]]:
        """Yield how the first token and the end turned out, as far as they were promised and came."""
        for name, stamp, (low_ns, _, high_ns), is_promised in (
            ("first_token", times.first_token, self.first_token_interval_ns, self.is_calibrated),
            ("end", times.last_token, self.end_interval_ns, self.has_end),
        ):
            if is_promised and times.received is not None and stamp is not None:
                came_ns = stamp - times.received
                yield name, Held.EARLIER if came_ns < low_ns else Held.LATER if came_ns > high_ns else Held.WITHIN

    def shown(self) -> dict[str, Any]:
        if not self.is_calibrated:
            return {"is_calibrated": False}
        return {name: value for name, value in asdict(self).items() if self.has_end or not name.startswith("end_")}

    def in_header(self) -> str:
        """Return the value of the header, in milliseconds, in the form of `server-timing`."""
        if not self.is_calibrated:
            return "calibrating"
        intervals = {"first_token": self.first_token_interval_ns}
        if self.has_end:
            intervals["end"] = self.end_interval_ns
        return ", ".join(
            f"{name};dur={median_ns / 1e6:.1f};low={low_ns / 1e6:.1f};high={high_ns / 1e6:.1f}"
            for name, (low_ns, median_ns, high_ns) in intervals.items()
        )

    def first_token_after(self, limit_ns: int) -> float | None:
        """Return the probability that the first token comes later than this; None while nothing is promised."""
        return self._after(limit_ns, *self.first_token_interval_ns)

    def end_after(self, limit_ns: int) -> float | None:
        """Return the probability that the last token comes later than that; None if no end is promised."""
        return self._after(limit_ns, *self.end_interval_ns) if self.has_end else None

    def _after(self, limit_ns: int, low_ns: int, median_ns: int, high_ns: int) -> float | None:
        if not self.is_calibrated:
            return None
        if limit_ns <= 0:
            return 1.0
        # On a logarithmic scale, each side of the median is treated as half of a normal distribution.
        if limit_ns > median_ns:
            width = log(high_ns / median_ns)
        else:
            width = log(median_ns / low_ns)
        distance = log(limit_ns / median_ns)
        if not width:
            if not distance:
                return 0.5
            return float(distance < 0)
        return 1 - _NORMAL.cdf(distance / width * _HIGH_DEVIATION)


NO_FORECAST = Forecast()
