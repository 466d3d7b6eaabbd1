"""What was counted and measured, by label values, and the families that show it on a page.

A thing is counted or measured once. Any number of families may show it, each under its own name, with its own labels
and with a choice of its buckets. Knows neither requests nor formats. Not thread-safe: the caller has a lock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import accumulate, islice, pairwise
from operator import itemgetter
from typing import NamedTuple

from oaiserve.telemetry.names import Metric

LabelValues = tuple[str, ...]
Number = int | float

NS_PER_SECOND = 1_000_000_000

# So many values are sorted into buckets by a single call into C, which keeps other threads out for a fraction of a ms.
_VALUES_AT_ONCE = 4096


class Origin(NamedTuple):
    """Where a value comes from, for exemplars."""

    trace_id: int
    span_id: int
    at_unix_ns: int


class Exemplar(NamedTuple):
    value: Number  # in the unit of the series
    origin: Origin


class Counter:
    """Sums by label values. They are whole numbers, so that they stay exact: of `per_unit`, the family shows units."""

    def __init__(self, *labels: str, per_unit: int = 1) -> None:
        self.labels = labels
        self.per_unit = per_unit
        self.values: dict[LabelValues, int] = {}
        self.num_changes = 0

    def add(self, labels: LabelValues, amount: int = 1) -> None:
        self.values[labels] = self.values.get(labels, 0) + amount
        self.num_changes += 1


class Observed:
    """The values with the same labels."""

    __slots__ = ("counts", "exemplars", "num", "total")

    def __init__(self, num_buckets: int) -> None:
        self.counts = [0] * num_buckets  # not cumulative; the last one has what is above all boundaries
        self.exemplars: dict[int, Exemplar] = {}  # the last one of each bucket that has any
        self.num = 0
        self.total: Number = 0


class Distribution:
    """How many values fell between which boundaries, and their sum, by label values.

    `shown_as`: the metrics that will show it. Its boundaries are all of theirs, in whole parts of a unit.
    """

    def __init__(self, *labels: str, shown_as: Iterable[Metric], per_unit: int = 1) -> None:
        self.labels = labels
        self.per_unit = per_unit
        self.boundaries = sorted({round(bound * per_unit) for metric in shown_as for bound in metric.buckets})
        self.observed: dict[LabelValues, Observed] = {}  # only grows
        self.num_changes = 0
        self._bucket_of: Callable[[Number], int] = partial(bisect_left, self.boundaries)  # a boundary is its bucket's

    def add(self, labels: LabelValues, value: Number, origin: Origin | None = None) -> None:
        observed = self._of(labels)
        bucket = bisect_left(self.boundaries, value)
        observed.counts[bucket] += 1
        observed.num += 1
        observed.total += value
        if origin is not None:
            observed.exemplars[bucket] = Exemplar(value, origin)
        self.num_changes += 1

    def add_all(self, labels: LabelValues, values: array[int], origin: Origin) -> None:
        """The same for many values that belong together."""
        if not values:
            return
        observed = self._of(labels)
        for start in range(0, len(values), _VALUES_AT_ONCE):
            part = values[start : start + _VALUES_AT_ONCE]
            buckets = list(map(self._bucket_of, part))
            for bucket, num in Tally(buckets).items():
                observed.counts[bucket] += num
            for bucket, value in dict(zip(buckets, part, strict=True)).items():
                observed.exemplars[bucket] = Exemplar(value, origin)
            observed.total += sum(part)
        observed.num += len(values)
        self.num_changes += 1

    def _of(self, labels: LabelValues) -> Observed:
        observed = self.observed.get(labels)
        if observed is None:
            observed = self.observed[labels] = Observed(len(self.boundaries) + 1)
        return observed


class Labelling:
    """From the label values of a series to those of a family; None: not in this family.

    `where`: values that labels of the series must have. `renamed`: labels of the family that have another name in the
    series. `constant`: those with one value for all. What the family does not name is added up.
    """

    def __init__(
        self,
        metric: Metric,
        labels: tuple[str, ...],
        where: Mapping[str, str] | None = None,
        renamed: Mapping[str, str] | None = None,
        constant: Mapping[str, str] | None = None,
    ) -> None:
        self._where = [(labels.index(label), value) for label, value in (where or {}).items()]
        constant, renamed = constant or {}, renamed or {}
        self._parts: list[tuple[int, str]] = [  # the position in the series' labels, or -1 and a constant
            (-1, constant[label]) if label in constant else (labels.index(renamed.get(label, label)), "")
            for label in metric.labels
        ]

    def __call__(self, values: LabelValues) -> LabelValues | None:
        if any(values[position] != value for position, value in self._where):
            return None
        return tuple(constant if position < 0 else values[position] for position, constant in self._parts)


class HistogramPoint(NamedTuple):
    """One histogram of a family, as data of its own."""

    labels: LabelValues
    counts: list[int]  # of each bucket alone; the last one has what is above all boundaries
    total: float
    exemplars: dict[int, Exemplar]  # by bucket; in units, too


Points = Mapping[LabelValues, Number] | list[HistogramPoint]


class CounterFamily:
    """Shows a counter. The keywords are those of `Labelling`."""

    def __init__(self, metric: Metric, series: Counter, **labelling: Mapping[str, str]) -> None:
        self.metric = metric
        self._series = series
        self._shown = cache(Labelling(metric, series.labels, **labelling))

    @property
    def num_changes(self) -> int:
        return self._series.num_changes

    def samples(self) -> Mapping[LabelValues, Number]:
        totals: dict[LabelValues, Number] = {}
        for values, amount in self._series.values.items():
            shown = self._shown(values)
            if shown is not None:
                totals[shown] = totals.get(shown, 0) + amount
        if self._series.per_unit == 1:
            return totals
        return {shown: total / self._series.per_unit for shown, total in totals.items()}

    def points(self) -> Points:
        return self.samples()


class Reading:
    """Shows numbers that somebody else keeps: `read` is called for every page."""

    num_changes = None  # not known

    def __init__(self, metric: Metric, read: Callable[[], Mapping[LabelValues, Number]]) -> None:
        self.metric = metric
        self.samples = read

    def points(self) -> Points:
        return self.samples()


class Shown(NamedTuple):
    """One histogram of a family: what was observed with some labels of the series, added up."""

    labels: LabelValues
    parts: list[Observed]

    @property
    def num(self) -> int:
        return sum(part.num for part in self.parts)


class HistogramFamily:
    """Shows a distribution: the buckets of `metric` are among its boundaries. The keywords are those of `Labelling`."""

    def __init__(self, metric: Metric, series: Distribution, **labelling: Mapping[str, str]) -> None:
        self.metric = metric
        self.per_unit = series.per_unit
        self._series = series
        self._labelling = Labelling(metric, series.labels, **labelling)
        self._num_seen = 0  # children of the series that `_shown` has, or that are not shown
        self._shown: dict[LabelValues, Shown] = {}
        ends = [series.boundaries.index(round(bound * series.per_unit)) for bound in metric.buckets]
        ends.append(len(series.boundaries))
        self._ends = ends  # for each of our buckets, the last one of the series that is in it
        self._pick = itemgetter(*ends) if len(ends) > 1 else lambda counts: (counts[-1],)

    @property
    def num_changes(self) -> int:
        return self._series.num_changes

    def shown(self) -> Iterable[Shown]:
        """Grows at its end."""
        observed = self._series.observed
        if len(observed) > self._num_seen:
            for values, part in islice(observed.items(), self._num_seen, None):
                labels = self._labelling(values)
                if labels is not None:
                    self._shown.setdefault(labels, Shown(labels, [])).parts.append(part)
            self._num_seen = len(observed)
        return self._shown.values()

    def cumulative(self, shown: Shown) -> tuple[int, ...]:
        """For each bucket of the metric, how many values are at or below its boundary; then how many there are."""
        counts = [part.counts for part in shown.parts]
        added = counts[0] if len(counts) == 1 else map(sum, zip(*counts, strict=True))
        return self._pick(list(accumulate(added)))

    def total(self, shown: Shown) -> float:
        """The sum, in units."""
        return sum(part.total for part in shown.parts) / self.per_unit

    def exemplars(self, shown: Shown) -> dict[int, Exemplar]:
        """The last exemplar of each bucket of the metric that has one."""
        latest: dict[int, Exemplar] = {}
        for part in shown.parts:
            for fine, exemplar in part.exemplars.items():
                bucket = bisect_left(self._ends, fine)
                other = latest.get(bucket)
                if other is None or other.origin.at_unix_ns <= exemplar.origin.at_unix_ns:
                    latest[bucket] = exemplar
        return latest

    def points(self) -> Points:
        points = []
        for shown in self.shown():
            below = self.cumulative(shown)
            counts = [count - before for before, count in pairwise((0, *below))]
            exemplars = {
                bucket: Exemplar(value / self.per_unit, origin)
                for bucket, (value, origin) in self.exemplars(shown).items()
            }
            points.append(HistogramPoint(shown.labels, counts, self.total(shown), exemplars))
        return points


Family = CounterFamily | Reading | HistogramFamily
