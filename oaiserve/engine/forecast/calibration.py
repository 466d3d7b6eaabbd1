"""The online calibration of forecasts, so that nine in ten intervals hold whatever the load does. Stdlib only.

What came is compared with what was forecast, on a scale of logarithms: the score. A quantile is the forecast moved by a
quantile of the last scores. Which quantile of them is taken adapts by what held (Gibbs and Candes, "Adaptive conformal
inference under distribution shift", 2021), one by one for the bounds of the interval and its median, as for conformal
quantile regression (Romano, Patterson and Candes, 2019). So the share that holds is right in the long run without any
assumption about errors; how narrow an interval is depends on the forecast.
"""

from __future__ import annotations

from math import exp, log

from oaiserve.engine.forecast.last_values import LastValues
from oaiserve.facts.forecast import LEVELS

ENOUGH = 100  # scores, before anything is promised
MOST_SCORES = 400  # of the last requests
PACE = 0.01  # by which a level adapts
BEYOND = 0.2  # on the scale of logarithms: how far a bound moves beyond all scores for a level that is out by one

Three = tuple[float, float, float]


class _Bound:
    """One moved quantile."""

    __slots__ = ("last", "level", "offset", "taken")

    def __init__(self, level: float) -> None:
        self.level = self.taken = level
        self.last = LastValues(MOST_SCORES)
        self.offset = 0.0

    def learn(self, score: float, *, was_below: bool) -> None:
        self.last.add(score)
        self.taken += PACE * (self.level - was_below)
        scores = self.last.in_order
        place = self.taken * (len(scores) + 1) - 1
        low = min(max(int(place), 0), len(scores) - 1)
        high = min(low + 1, len(scores) - 1)
        inside = min(max(place, 0.0), len(scores) - 1.0)
        self.offset = scores[low] + (inside - low) * (scores[high] - scores[low])
        self.offset += BEYOND * (min(0.0, self.taken) + max(0.0, self.taken - 1))


class Calibration:
    """The calibration of one time of the requests of a kind, such as the first token behind several others.

    As long as it knows too few of its kind, that of a wider kind answers for it.
    """

    def __init__(self, wider: Calibration | None = None) -> None:
        self._wider = wider
        self._bounds = [_Bound(level) for level in LEVELS]

    @property
    def is_enough(self) -> bool:
        return self._knows_enough or (self._wider is not None and self._wider.is_enough)

    @property
    def _knows_enough(self) -> bool:
        return len(self._bounds[0].last.in_order) >= ENOUGH

    def calibrated(self, raw: Three) -> Three:
        """Return the low, median and high value of a forecast, moved by what is known of its errors."""
        if self._wider is not None and not self._knows_enough:
            return self._wider.calibrated(raw)
        moved = sorted(value * exp(bound.offset) for value, bound in zip(raw, self._bounds, strict=True))
        return moved[0], moved[1], moved[2]

    def learn(self, raw: Three, told: Three, came: float) -> None:
        """Learn from the time that came, the forecast before calibration, and what was told of it."""
        for bound, value, bound_told in zip(self._bounds, raw, told, strict=True):
            bound.learn(log(max(came, 1.0) / max(value, 1.0)), was_below=came <= bound_told)
        if self._wider is not None:
            self._wider.learn(raw, told, came)
