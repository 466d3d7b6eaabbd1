"""The prefill budget: how many prompt tokens a step may have while others decode, so that ITL keeps its target.

Stdlib only; owned by the engine thread.
"""

from __future__ import annotations

LEAST_TOKENS = 16
MOST_SHRINK, MOST_GROWTH = 0.5, 1.25  # bounds, because one step may be slow or fast for other reasons


class PrefillBudget:
    """The budget of prompt tokens in a step, which follows the measured time of steps.

    `tokens` shrinks in proportion if a step with both decodes and prefill took longer than the target. It grows if such
    a step used all of it and took less.
    """

    def __init__(self, target_seconds: float, most_tokens: int) -> None:
        self._target_ns = target_seconds * 1e9
        self._most_tokens = most_tokens
        self.tokens = most_tokens

    def observe(self, num_decodes: int, num_prefill_tokens: int, step_ns: int) -> None:
        if num_decodes == 0 or num_prefill_tokens == 0:
            return  # no decode was slowed down by a prefill
        if step_ns > self._target_ns:
            shrunk = num_prefill_tokens * max(MOST_SHRINK, self._target_ns / step_ns)
            self.tokens = max(LEAST_TOKENS, min(self.tokens, int(shrunk)))
        elif num_prefill_tokens >= self.tokens:
            grown = int(self.tokens * min(MOST_GROWTH, self._target_ns / step_ns)) + 1
            self.tokens = min(self._most_tokens, grown)
