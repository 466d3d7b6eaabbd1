"""Measured times of steps by their number of tokens, by which drafts are weighed. Engine thread only, no torch."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

MOST_STEP_TOKENS = 32  # of a step with drafts, in all; larger steps compute, and hardly wait for the weights


class StepTimes:
    """Moving averages of the recent times of steps, by their number of tokens."""

    WEIGHT = 0.2  # of the newest step
    MOST_GROWTH = 2  # by one step, which may be slow for other reasons
    MOST_AGE = 256  # in steps; a time that was measured before is forgotten, since sequences have grown or ended

    def __init__(self) -> None:
        self._ns = [0.0] * (MOST_STEP_TOKENS + 1)
        self._measured = [0] * (MOST_STEP_TOKENS + 1)  # in which step, the last time
        self._num_steps = 0

    def observe(self, num_tokens: int, step_ns: int) -> None:
        self._num_steps += 1
        if num_tokens > MOST_STEP_TOKENS:
            return
        if self._is_known(num_tokens):
            before_ns = self._ns[num_tokens]
            after_ns = before_ns + self.WEIGHT * (min(step_ns, self.MOST_GROWTH * before_ns) - before_ns)
            # Times not measured since then have changed alike: the machine is slower, or sequences are longer.
            for number, measured in enumerate(self._measured):
                if measured < self._measured[num_tokens]:
                    self._ns[number] *= after_ns / before_ns
            self._ns[num_tokens] = after_ns
        else:
            self._ns[num_tokens] = step_ns
        self._measured[num_tokens] = self._num_steps

    def expected_ns(self) -> list[float]:
        """Return the times of steps by their number of tokens, each at least those of smaller steps.

        Unmeasured numbers get their least possible time, so they are tried, and then measured. Between two measured
        ones, there is a line. It goes on behind the largest one, since further tokens cost more rather than less; with
        only one measured, it is flat. Below the smallest one, a number takes its share of that.
        """
        known = [number for number in range(1, len(self._ns)) if self._is_known(number)]
        if not known:
            return [1.0] * len(self._ns)
        least_ns = [*accumulate((self._ns[number] for number in reversed(known)), min)][::-1]
        if len(known) > 1:
            slope_ns = (least_ns[-1] - least_ns[-2]) / (known[-1] - known[-2])
            least_ns.append(least_ns[-1] + slope_ns * (MOST_STEP_TOKENS + 1 - known[-1]))
            known.append(MOST_STEP_TOKENS + 1)
        return np.interp(range(len(self._ns)), [0, *known], [0.0, *least_ns]).tolist()

    def _is_known(self, num_tokens: int) -> bool:
        measured = self._measured[num_tokens]
        return measured > 0 and self._num_steps - measured < self.MOST_AGE
