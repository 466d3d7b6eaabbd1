"""How much prefill a step may carry while others decode, so that their tokens keep coming at the pace asked for.

Stdlib only; owned by the engine thread.
"""

from __future__ import annotations

LEAST_TOKENS = 16
MOST_SHRINK, MOST_GROWTH = 0.5, 1.25  # a step that was slow or fast for a reason of its own must not do much


class PrefillBudget:
    """Follows the measured time of steps instead of a constant: `tokens` shrinks in proportion when a step with both
    decodes and prefill took longer than the target, and grows when all of it was used and time was left."""

    def __init__(self, target_seconds: float, most_tokens: int) -> None:
        """Starts at `most_tokens`, and is never more."""
        self._target_ns = target_seconds * 1e9
        self._most_tokens = most_tokens
        self.tokens = most_tokens

    def observe(self, num_decodes: int, num_prefill_tokens: int, step_ns: int) -> None:
        if num_decodes == 0 or num_prefill_tokens == 0:
            return  # nobody waited for prefill, or there was none to blame
        if step_ns > self._target_ns:
            shrunk = num_prefill_tokens * max(MOST_SHRINK, self._target_ns / step_ns)
            self.tokens = max(LEAST_TOKENS, min(self.tokens, int(shrunk)))
        elif num_prefill_tokens >= self.tokens:
            grown = int(self.tokens * min(MOST_GROWTH, self._target_ns / step_ns)) + 1
            self.tokens = min(self._most_tokens, grown)
