"""Percentiles, and confidence intervals of means and shares, in plain Python. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Interval = tuple[float, float]

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom. Above 30, the normal quantile is close enough.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)  # fmt: skip


def percentile(ordered: Sequence[float], q: float) -> float:
    """Return the percentile `q` (0 to 100) of ordered values, interpolated linearly, as numpy does by default."""
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return Student's 95 % interval for the mean of repeated runs, or None for fewer than two."""
    if len(values) < 2:
        return None
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def ratio_interval(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Return a 95 % interval for mean(b) / mean(a), by Welch's method on logarithms. Returns None unless each side has
    at least two values and all are positive."""
    if min(len(a), len(b)) < 2 or min(*a, *b) <= 0:
        return None
    logs = [[math.log(value) for value in values] for values in (a, b)]
    variances = [statistics.variance(values) / len(values) for values in logs]
    total = sum(variances)
    ratio = math.log(statistics.fmean(b) / statistics.fmean(a))
    if total == 0:
        return math.exp(ratio), math.exp(ratio)
    degrees = total**2 / sum(v**2 / (len(values) - 1) for v, values in zip(variances, logs, strict=True))
    half = t_quantile(degrees) * math.sqrt(total)
    return math.exp(ratio - half), math.exp(ratio + half)


def wilson_interval(successes: int, trials: int) -> Interval:
    """Return Wilson's 95 % interval for the share of successes."""
    if trials == 0:
        return 0.0, 1.0
    z = 1.96
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def t_quantile(degrees: float) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    if degrees < len(_T) + 1:
        return _T[max(1, int(degrees)) - 1]
    return 1.96
