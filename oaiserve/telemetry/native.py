"""Native histograms have buckets by a rule, 8 for each doubling of the value, instead of a chosen list of boundaries.

The upper boundary of bucket i is 2 ** (i / 8) units: Prometheus' schema 3. Only buckets with values are kept and shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from math import ceil, floor, log2
from typing import NamedTuple

SCHEMA = 3
ZERO_THRESHOLD = 2.0**-128  # the usual one of Prometheus' libraries: of our values, only 0 is below it
_PER_DOUBLING = 8  # 2 ** SCHEMA
_LARGEST = 40 * _PER_DOUBLING  # the last bucket: of a terabyte, or of ten thousand years


class NativeBuckets(NamedTuple):
    """The numbers of values that are 0 and, by bucket, of others, with the number of empty buckets before each one."""

    num_zeros: int
    gaps: list[int]  # the first is the bucket's own number, which may be negative
    counts: list[int]


@cache
def native_boundaries(per_unit: int) -> list[int]:
    """Return the upper boundaries of the bucket of 0 and of all others, in integers of which `per_unit` make a unit."""
    buckets = range(_first(per_unit), _LARGEST + 1)
    return [0, *(floor(2 ** (bucket / _PER_DOUBLING) * per_unit) for bucket in buckets)]


def native_buckets(per_unit: int, counts_by_place: Iterable[Mapping[int, int]]) -> NativeBuckets:
    """Return the sum of counts by place in the boundaries."""
    added: Counter[int] = Counter()
    for counts in counts_by_place:
        added.update(counts)
    num_zeros, places = added.pop(0, 0), sorted(added)
    gaps = [place - before - 1 for before, place in zip([-_first(per_unit), *places], places, strict=False)]
    return NativeBuckets(num_zeros, gaps, [added[place] for place in places])


def _first(per_unit: int) -> int:
    """Return the bucket of the integer 1, which has the place 1."""
    return ceil(-_PER_DOUBLING * log2(per_unit))
