"""Measured times of steps by their number of tokens, by which drafts are weighed. Engine thread only, no torch."""

from __future__ import annotations

import numpy as np

MOST_STEP_TOKENS = 32  # of a step with drafts, in all; larger steps compute, and hardly wait for the weights
# The assumed times of steps in relation to a step of one token, until they are measured.
ASSUMED = [0.9 + 0.1 * number for number in range(MOST_STEP_TOKENS + 1)]


class StepTimes:
    """The recent times of steps by their number of tokens, in relation to one another.

    Each step is compared with those just before it, so a machine that is busy for a while changes no ratio. A ratio is
    a mean over many steps, because the time of a single one says little on a busy machine.
    """

    SPEED_WEIGHT = 0.2  # of the newest step in the speed of the machine
    ASSUMED_STEPS = 4  # measured steps that the assumed ratio counts for
    MOST_STEPS = 256  # over which a mean is taken, about
    MOST_GROWTH = 2  # as much as one step may take longer than expected; the rest has other reasons
    MOST_AGE = 2048  # in steps; a ratio not measured since then is forgotten, since sequences have grown or ended

    def __init__(self) -> None:
        self._unit_ns = 0.0  # the time of a step with one token, by the newest steps
        self._ratios = ASSUMED.copy()
        self._num_measured = [0] * len(ASSUMED)  # steps that each ratio is the mean of
        self._last_step = [0] * len(ASSUMED)  # in which it was measured
        self._num_steps = 0

    def observe(self, num_tokens: int, step_ns: int) -> None:
        self._num_steps += 1
        if num_tokens > MOST_STEP_TOKENS:
            return
        if not self._unit_ns:
            self._unit_ns = max(1, step_ns) / ASSUMED[num_tokens]
        if not self._is_known(num_tokens):
            self._ratios[num_tokens] = self.expected()[num_tokens]
            self._num_measured[num_tokens] = 0
        before, number = self._ratios[num_tokens], self._num_measured[num_tokens]
        ratio = min(step_ns / self._unit_ns, self.MOST_GROWTH * before)
        self._ratios[num_tokens] += (ratio - before) / (number + 1 + self.ASSUMED_STEPS)
        self._unit_ns *= 1 + self.SPEED_WEIGHT * (ratio / before - 1)
        self._num_measured[num_tokens] = min(number + 1, self.MOST_STEPS)
        self._last_step[num_tokens] = self._num_steps

    def num_measured(self, num_tokens: int) -> int:
        """Return the number of steps that the time of this number of tokens is a mean of."""
        return self._num_measured[num_tokens] if self._is_known(num_tokens) else 0

    def expected(self) -> list[float]:
        """Return the times of steps by their number of tokens, in relation to one another. They never fall.

        Where means fall with the number of tokens, the difference is noise, and their common mean is taken instead.
        Numbers without a mean relate to the nearest ones as assumed.
        """
        known = [number for number in range(1, len(ASSUMED)) if self._is_known(number)]
        if not known:
            return ASSUMED
        pools: list[tuple[float, int, int]] = []  # the mean, its steps, and how many numbers of tokens it is for
        for number in known:
            mean, num_steps, size = self._ratios[number], self._num_measured[number], 1
            while pools and pools[-1][0] >= mean:
                other, steps_before, size_before = pools.pop()
                mean = (mean * num_steps + other * steps_before) / (num_steps + steps_before)
                num_steps, size = num_steps + steps_before, size + size_before
            pools.append((mean, num_steps, size))
        means = [mean for mean, _, size in pools for _ in range(size)]
        relative = [mean / ASSUMED[number] for number, mean in zip(known, means, strict=True)]
        times = np.interp(range(len(ASSUMED)), known, relative) * ASSUMED
        return [float(time) for time in np.maximum.accumulate(times)]

    def _is_known(self, num_tokens: int) -> bool:
        last_step = self._last_step[num_tokens]
        return last_step > 0 and self._num_steps - last_step <= self.MOST_AGE
