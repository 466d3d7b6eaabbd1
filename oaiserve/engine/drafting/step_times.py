"""Measured times of steps by their number of tokens, by which drafts are weighed. Engine thread only, no torch."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

MOST_STEP_TOKENS = 32  # all tokens of a step with drafts; larger steps are bound by compute, not by reading weights
# Step sizes that are measured separately. A number of tokens in between belongs to the next larger size.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, MOST_STEP_TOKENS)
# The assumed times of steps relative to a step of one token, until they are measured.
ASSUMED = [0.85 + 0.15 * number for number in range(MOST_STEP_TOKENS + 1)]
_INDEX = [bisect_left(SIZES, number) for number in range(MOST_STEP_TOKENS + 1)]


class StepTimes:
    """Recent step times by number of tokens, relative to each other.

    Each step is compared with those just before it, so a machine that is busy for a while changes no ratio. A ratio is
    a mean over many steps, because the time of a single one says little on a busy machine.
    """

    SPEED_WEIGHT = 0.2  # weight of the newest step in the speed of the machine
    ASSUMED_STEPS = 4  # The assumed ratio weighs as much as this many measured steps.
    MOST_STEPS = 128  # approximate number of steps that a mean covers
    MOST_GROWTH = 2  # cap of measured / expected time of one step; anything above has other causes

    def __init__(self) -> None:
        self._unit_ns = 0.0  # time of a step with one token, from the latest steps
        self._ratios = [1.0] * len(SIZES)  # measured / assumed time, for each size
        self._num_measured = [0] * len(SIZES)  # steps that each ratio is the mean of

    def observe(self, num_tokens: int, step_ns: int) -> None:
        if num_tokens > MOST_STEP_TOKENS:
            return
        index = _INDEX[num_tokens]
        assumed = ASSUMED[num_tokens]
        if not self._unit_ns:
            self._unit_ns = max(1, step_ns) / assumed
        if not self._num_measured[index]:
            self._ratios[index] = self.expected()[num_tokens] / assumed
        before = self._ratios[index]
        number = min(self._num_measured[index] + 1, self.MOST_STEPS)
        ratio = min(step_ns / self._unit_ns / assumed, self.MOST_GROWTH * before)
        self._ratios[index] += (ratio - before) / (number + self.ASSUMED_STEPS)
        self._unit_ns *= 1 + self.SPEED_WEIGHT * (ratio / before - 1)
        self._num_measured[index] = number

    def num_measured(self, num_tokens: int) -> int:
        """Return the number of steps that the mean time for this number of tokens is taken over."""
        return self._num_measured[_INDEX[num_tokens]]

    def expected(self) -> list[float]:
        """Return the step time for each number of tokens, relative to each other. Times never fall.

        Where means fall with the number of tokens, the difference is noise, so their common mean is used. The time of a
        size that was never measured is scaled from the nearest measured ones by the assumed ratio.
        """
        pools: list[tuple[float, int, list[int]]] = []  # the mean, its steps, and the sizes
        for size, ratio, num_steps in zip(SIZES, self._ratios, self._num_measured, strict=True):
            if not num_steps:
                continue
            mean = ratio * ASSUMED[size]
            sizes = [size]
            while pools and pools[-1][0] >= mean:
                other, steps_before, sizes_before = pools.pop()
                mean = (mean * num_steps + other * steps_before) / (num_steps + steps_before)
                num_steps = num_steps + steps_before
                sizes = sizes_before + sizes
            pools.append((mean, num_steps, sizes))
        if not pools:
            return ASSUMED
        ratios = {size: mean / ASSUMED[size] for mean, _, sizes in pools for size in sizes}
        times = np.interp(range(len(ASSUMED)), [*ratios], [*ratios.values()]) * ASSUMED
        return [float(time) for time in np.maximum.accumulate(times)]
