"""Calibrates forecasts online, so that nine in ten intervals hold whatever the load does. Stdlib only.

The score of a forecast is the logarithm of the actual time divided by the forecast one. Each bound of an interval is
the forecast, moved by a quantile of the last scores. The level of that quantile rises or falls with each bound that was
exceeded or held (Gibbs and Candes, "Adaptive conformal inference under distribution shift", 2021), separately for both
bounds and the median, as in conformal quantile regression (Romano, Patterson and Candes, 2019). So the share of
intervals that hold is right in the long run without any assumption about errors. Good forecasts make them narrow.
"""

from __future__ import annotations

from math import exp, log

from oaiserve.engine.forecast.last_values import LastValues
from oaiserve.facts.forecast import LEVELS

ENOUGH = 100  # Fewer scores don't make a promise.
MOST_SCORES = 400  # The scores of earlier requests are dropped.
PACE = 0.01  # step of a level's adaptation
BEYOND = 0.2  # how far a bound moves past all scores, as a logarithm, for a level that exceeds its range by one

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
    """The calibration of one time of one kind of request, such as the first token after several other prompts.

    Until it has enough scores of its own, it uses the calibration of a wider kind.
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
        """Return the low, median and high value of a forecast, moved by the errors of earlier ones."""
        if self._wider is not None and not self._knows_enough:
            return self._wider.calibrated(raw)
        moved = sorted(value * exp(bound.offset) for value, bound in zip(raw, self._bounds, strict=True))
        return moved[0], moved[1], moved[2]

    def learn(self, raw: Three, told: Three, came: float) -> None:
        """Learn from the actual time, the forecast before calibration, and the calibrated forecast."""
        for bound, value, bound_told in zip(self._bounds, raw, told, strict=True):
            bound.learn(log(max(came, 1.0) / max(value, 1.0)), was_below=came <= bound_told)
        if self._wider is not None:
            self._wider.learn(raw, told, came)
