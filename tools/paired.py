"""The frame of a measurement in pairs: runs with something and without it, in turns, and the ratio of the two."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

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


def interval(ratios: Sequence[float]) -> str:
    """Return the geometric mean of the ratios with its 95 % confidence interval; empty for fewer than two ratios."""
    if len(ratios) < 2:
        return ""
    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.4f} ({math.exp(mean - error):.4f} to {math.exp(mean + error):.4f})"
