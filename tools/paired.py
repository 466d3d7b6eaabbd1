"""The frames of measurements in pairs, with something and without it in turns, and the ratio of the two.

A pair is two runs, or two slices of one run: a few steps of an engine, with something that can be taken away and given
back while it runs. A machine that others share becomes faster and slower within seconds. Slices that follow each other
at once are nearly alike, so that pairs of slices resolve a tenth of a percent where pairs of runs resolve some percent.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

RESAMPLES = 2000
TRIMMED = 0.1  # of the ratios, as many of the highest and of the lowest ones

Found = TypeVar("Found")
Run = Callable[[int], Found]  # takes a seed


def measure_pairs(run_with: Run[Found], run_without: Run[Found], num_pairs: int) -> list[tuple[Found, Found]]:
    """Return what both runs found, by pair. The order changes from pair to pair. One more pair before is the warm-up.
    No seed comes twice, so that no prompt is in the prefix cache."""
    pairs = []
    for seed in range(0, 2 * num_pairs + 2, 2):
        if seed % 4:
            pairs.append((run_with(seed), run_without(seed + 1)))
        else:
            without = run_without(seed)
            pairs.append((run_with(seed + 1), without))
    return pairs[1:]


class Slices:
    """Divides equal steps that follow each other into slices of `size` steps, which are with something or without it.

    Two slices are a pair, and which of them is the one with it is drawn at random. What is found is the time of a step
    in each of them, in ns: the mean, and the median, which a few slow steps do not change.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self._size = size
        self._random = random.Random(seed)
        self._first = self._drawn()  # whether the first slice of the pair is the one with it
        self._ended_ns: list[int] = []  # of the steps of the pair, and of the one before
        self.means: list[tuple[float, float]] = []  # with and without, by pair
        self.medians: list[tuple[float, float]] = []

    def ended(self, at_ns: int) -> bool:
        """Note the end of a step, and return whether the time from now to the next one is with it."""
        ended_ns = self._ended_ns
        ended_ns.append(at_ns)
        num_steps = len(ended_ns) - 1
        if num_steps == 2 * self._size:
            self._close()
            num_steps = 0
        return self._first if num_steps < self._size else not self._first

    def interrupted(self) -> None:
        """Drop the pair that is under way: a step came that is not like the others."""
        self._ended_ns, self._first = [], self._drawn()

    def _close(self) -> None:
        gaps = [b - a for a, b in zip(self._ended_ns, self._ended_ns[1:], strict=False)]
        one, other = gaps[: self._size], gaps[self._size :]
        with_it, without = (one, other) if self._first else (other, one)
        self.means.append((statistics.fmean(with_it), statistics.fmean(without)))
        self.medians.append((statistics.median(with_it), statistics.median(without)))
        self._ended_ns, self._first = self._ended_ns[-1:], self._drawn()

    def _drawn(self) -> bool:
        return self._random.random() < 0.5


def interval(ratios: Sequence[float]) -> str:
    """Return the geometric mean of the ratios with its 95 % confidence interval; empty for fewer than two ratios."""
    if len(ratios) < 2:
        return ""
    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.4f} ({math.exp(mean - error):.4f} to {math.exp(mean + error):.4f})"


def trimmed_interval(pairs: Sequence[tuple[float, float]], seed: int = 0) -> tuple[float, float, float]:
    """Return the mean ratio of pairs, and the ends of its 95 % interval by bootstrap.

    The mean is geometric, without the highest and the lowest tenth: in these, something else slowed one side down.
    """
    logs = [math.log(a / b) for a, b in pairs]
    drawn = random.Random(seed)
    means = sorted(_trimmed_mean(drawn.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    low, high = means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]
    return math.exp(_trimmed_mean(logs)), math.exp(low), math.exp(high)


def _trimmed_mean(values: Sequence[float]) -> float:
    cut = int(TRIMMED * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])
