"""The load of the engine, summed up over time for routers. Stdlib only.

A momentary number scatters, so that many who look at it flee from chance. A mean over time does not.
"""

from __future__ import annotations

from typing import NamedTuple


class LoadTotals(NamedTuple):
    """The present load with its beginning, and its sums up to then. Two of these give the mean between them."""

    at_ns: int = 0
    num_open: int = 0  # requests that have been submitted and have not ended
    uncomputed_tokens: int = 0  # of their prompts
    open_ns: int = 0  # requests times nanoseconds
    uncomputed_token_ns: int = 0  # tokens times nanoseconds

    def after(self, now_ns: int, num_open: int, uncomputed_tokens: int) -> LoadTotals:
        """Return the totals with the load from now on."""
        past_ns = now_ns - self.at_ns
        return LoadTotals(
            now_ns,
            num_open,
            uncomputed_tokens,
            self.open_ns + past_ns * self.num_open,
            self.uncomputed_token_ns + past_ns * self.uncomputed_tokens,
        )

    def mean_since(self, before: LoadTotals) -> tuple[float, float]:
        """Return the mean numbers of open requests and of uncomputed tokens between two totals, of which this is the
        later one."""
        passed_ns = max(1, self.at_ns - before.at_ns)
        open_ns = self.open_ns - before.open_ns
        return open_ns / passed_ns, (self.uncomputed_token_ns - before.uncomputed_token_ns) / passed_ns
