"""`EncodeTimes` tells how long images and sounds will take to be encoded, by how long others took. Stdlib only."""

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
        """Learn of a request whose `num_rows` tokens of media were encoded between these stamps. Until the request
        before it was done, it waited."""
        ends_ns = self._ends_ns.in_order
        place = bisect_left(ends_ns, encoded_ns)
        since_ns = max(tokenized_ns, ends_ns[place - 1]) if place else tokenized_ns
        self._ends_ns.add(encoded_ns)
        if num_rows:
            self._row_ns.add((encoded_ns - since_ns) / num_rows)

    def expected_ns(self, num_rows: int) -> float:
        """Return how long so many tokens of media will take: by the median, or 0 while nothing is known."""
        in_order = self._row_ns.in_order
        return num_rows * in_order[len(in_order) // 2] if in_order else 0.0
