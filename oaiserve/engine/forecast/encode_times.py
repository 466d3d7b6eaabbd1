"""`EncodeTimes` estimates how long images and sounds will take to encode, from the last ones. Stdlib only."""

from __future__ import annotations

from bisect import bisect_left

from oaiserve.engine.forecast.last_values import LastValues

LAST = 64  # requests


class EncodeTimes:
    """The times in which the media of the last requests were encoded, one request after the other."""

    def __init__(self) -> None:
        self._row_ns = LastValues(LAST)
        self._ends_ns = LastValues(LAST)

    def learn(self, num_rows: int, tokenized_ns: int, encoded_ns: int) -> None:
        """Learn from a request whose `num_rows` tokens of media were encoded between these stamps. Time in which the
        request before it was still being encoded doesn't count."""
        ends_ns = self._ends_ns.in_order
        place = bisect_left(ends_ns, encoded_ns)
        since_ns = max(tokenized_ns, ends_ns[place - 1]) if place else tokenized_ns
        self._ends_ns.add(encoded_ns)
        if num_rows:
            self._row_ns.add((encoded_ns - since_ns) / num_rows)

    def expected_ns(self, num_rows: int) -> float:
        """Return how long `num_rows` tokens of media will take, by the median; 0 before the first request."""
        in_order = self._row_ns.in_order
        return num_rows * in_order[len(in_order) // 2] if in_order else 0.0
