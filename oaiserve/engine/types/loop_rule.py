"""What counts as a loop: an answer that ends in the same tokens again and again. Stdlib only.

A text has a *period* of p tokens if each token equals the token p positions before it. Rows that vary, as in a table or
in code, have no period, and a few equal rows are too short for a loop.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoopRule:
    """How often the end of an answer must repeat to count as a loop.

    The first three fields are those of vLLM's `repetition_detection`.
    """

    max_pattern_size: int  # longest period, in tokens
    min_pattern_size: int = 1  # shortest period
    min_count: int = 2  # minimum number of times that the period occurs in a row, 2 or more
    min_length: int = 0  # minimum tokens of all these occurrences together

    def least_length(self, period: int) -> int:
        """Return the minimum number of tokens of a loop with this period."""
        return max(self.min_count * period, self.min_length)

    def least_repeated(self, above: int) -> int:
        """Return how many tokens follow the first period, at least, in any loop whose period exceeds `above` tokens."""
        turning_point = self.min_length // self.min_count  # For longer periods, `min_count` decides.
        periods = (min(max(period, above + 1), self.max_pattern_size) for period in (turning_point, turning_point + 1))
        return min(self.least_length(period) - period for period in periods)


# What the server reports as a loop, and where the chat page stops. "ha" fifty times, or a board of 8 x 8 zeros, is not
# one.
USUAL = LoopRule(max_pattern_size=512, min_count=4, min_length=300)
