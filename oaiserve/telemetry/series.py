"""Series hold counts and distributions by label values; metric families show them under a name.

Each quantity is recorded once, in one series. Several families may show the same series, each under its own name, with
its own labels and a subset of the buckets. This module knows neither requests nor output formats. It is not
thread-safe: the caller holds a lock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import accumulate, islice
from types import MappingProxyType
from typing import NamedTuple

from oaiserve.facts.metric import Metric
from oaiserve.telemetry.names import RENAMED, RENAMED_VALUES

LabelValues = tuple[str, ...]
Number = int | float

NS_PER_SECOND = 1_000_000_000
NO_CONSTANTS: Mapping[str, str] = MappingProxyType({})

# The most values that one call into C, which holds the GIL, puts into buckets. It takes a fraction of a millisecond.
_VALUES_PER_CALL = 4096


class Origin(NamedTuple):
    """The span that a value comes from, for exemplars."""

    trace_id: int
    span_id: int
    at_unix_ns: int


class Exemplar(NamedTuple):
    value: Number  # value in the series' unit
    origin: Origin


class Counter:
    """An exact sum for each combination of label values. `per_unit` of it are one unit of the metric: 10**9 for
    nanoseconds."""

    def __init__(self, *labels: str, per_unit: int = 1) -> None:
        self.labels = labels
        self.per_unit = per_unit
        self.values: dict[LabelValues, int] = {}

    def add(self, labels: LabelValues, amount: int = 1) -> None:
        self.values[labels] = self.values.get(labels, 0) + amount


class DistributionChild:
    """The distribution of the values with one combination of label values."""

    __slots__ = ("counts", "exemplars", "num", "total")

    def __init__(self, num_buckets: int) -> None:
        self.counts = [0] * num_buckets  # not cumulative; the last bucket holds the values above all boundaries
        self.exemplars: dict[int, Exemplar] = {}  # the latest exemplar of each bucket, keyed by its index
        self.num = 0
        self.total: Number = 0


class Distribution:
    """A distribution keeps bucket counts and the sum of its values for each combination of label values.

    Its boundaries are the union of those of the metrics in `shown_as`, as integers, of which `per_unit` are one unit.
    """

    def __init__(self, *labels: str, shown_as: Iterable[Metric], per_unit: int = 1) -> None:
        self.labels = labels
        self.per_unit = per_unit
        self.boundaries = sorted({round(bound * per_unit) for metric in shown_as for bound in metric.buckets})
        num_buckets = len(self.boundaries) + 1
        # Children are only added, never removed.
        self.children: dict[LabelValues, DistributionChild] = defaultdict(lambda: DistributionChild(num_buckets))

    def add(self, labels: LabelValues, value: Number, origin: Origin | None = None) -> None:
        child = self.children[labels]
        bucket = bisect_left(self.boundaries, value)  # a bucket includes its upper boundary, as `le` means
        child.counts[bucket] += 1
        child.num += 1
        child.total += value
        if origin is not None:
            child.exemplars[bucket] = Exemplar(value, origin)

    def add_all(self, labels: LabelValues, values: array[int], origin: Origin | None) -> None:
        if not values:
            return
        child = self.children[labels]
        for start in range(0, len(values), _VALUES_PER_CALL):
            part = values[start : start + _VALUES_PER_CALL]
            buckets = list(map(partial(bisect_left, self.boundaries), part))
            for bucket, num in Tally(buckets).items():
                child.counts[bucket] += num
            if origin is not None:
                for bucket, value in dict(zip(buckets, part, strict=True)).items():
                    child.exemplars[bucket] = Exemplar(value, origin)
            child.total += sum(part)
        child.num += len(values)


def labelling(
    metric: Metric, labels: tuple[str, ...], constants: Mapping[str, str]
) -> Callable[[LabelValues], LabelValues | None]:
    """Return a function that maps label values of a series to those of a metric, or to None if the metric doesn't show
    them.

    A label of the metric that the series lacks, also under the name in `names.RENAMED`, has its value from `constants`.
    Values that differ only in labels that the metric lacks, or that `names.RENAMED_VALUES` maps to the same value, are
    added up.
    """
    where = [(labels.index(label), value) for label, value in metric.where]
    names = [RENAMED.get(label, label) for label in metric.labels]
    # For each label of the metric, its position in the labels of the series, or -1 and a constant, and its renamed
    # values.
    parts: list[tuple[int, str, Mapping[str, str]]] = []
    for label, name in zip(metric.labels, names, strict=True):
        if name in labels:
            parts.append((labels.index(name), "", RENAMED_VALUES.get(label, NO_CONSTANTS)))
        else:
            parts.append((-1, constants[label], NO_CONSTANTS))

    def shown(values: LabelValues) -> LabelValues | None:
        if any(values[position] != value for position, value in where):
            return None
        return tuple(
            constant if position < 0 else renamed.get(values[position], values[position])
            for position, constant, renamed in parts
        )

    return shown


class CounterFamily:
    """A counter family shows a `Counter` series. For `constants`, see `labelling`."""

    def __init__(self, metric: Metric, series: Counter, constants: Mapping[str, str] = NO_CONSTANTS) -> None:
        self.metric = metric
        self._series = series
        self._shown = cache(labelling(metric, series.labels, constants))

    def points(self) -> Mapping[LabelValues, Number]:
        totals: dict[LabelValues, Number] = {}
        for values, amount in self._series.values.items():
            shown = self._shown(values)
            if shown is not None:
                totals[shown] = totals.get(shown, 0) + amount
        if self._series.per_unit == 1:
            return totals
        return {shown: total / self._series.per_unit for shown, total in totals.items()}


class CallbackFamily:
    """A family of numbers that other components maintain. `read` returns them for each page."""

    def __init__(self, metric: Metric, read: Callable[[], Mapping[LabelValues, Number]]) -> None:
        self.metric = metric
        self.points = read


class HistogramChild(NamedTuple):
    """One histogram of a family. It adds up one or more children of the series."""

    labels: LabelValues
    parts: list[DistributionChild]

    @property
    def num(self) -> int:
        return sum(part.num for part in self.parts)


class HistogramFamily:
    """A histogram family shows a `Distribution` series, whose boundaries must include the buckets of `metric`.

    For `constants`, see `labelling`.
    """

    def __init__(self, metric: Metric, series: Distribution, constants: Mapping[str, str] = NO_CONSTANTS) -> None:
        self.metric = metric
        self.per_unit = series.per_unit
        self._series = series
        self._shown = labelling(metric, series.labels, constants)
        self._num_seen = 0  # children of the series that were already added to `_children`, or found not to be shown
        self._children: dict[LabelValues, HistogramChild] = {}
        # For each bucket of the metric, the last bucket of the series within it.
        self._ends = [series.boundaries.index(round(bound * series.per_unit)) for bound in metric.buckets]
        self._ends.append(len(series.boundaries))

    def children(self) -> Iterable[HistogramChild]:
        """Return the histograms of the family, in the order of their first values."""
        series_children = self._series.children
        if len(series_children) > self._num_seen:
            for values, part in islice(series_children.items(), self._num_seen, None):
                labels = self._shown(values)
                if labels is not None:
                    self._children.setdefault(labels, HistogramChild(labels, [])).parts.append(part)
            self._num_seen = len(series_children)
        return self._children.values()

    def cumulative(self, child: HistogramChild) -> list[int]:
        """Return the number of values at or below each bucket boundary of the metric, and finally the number of all
        values."""
        counts = [part.counts for part in child.parts]
        added = counts[0] if len(counts) == 1 else map(sum, zip(*counts, strict=True))
        sums = list(accumulate(added))
        return [sums[end] for end in self._ends]

    def total(self, child: HistogramChild) -> float:
        return sum(part.total for part in child.parts) / self.per_unit

    def exemplars(self, child: HistogramChild) -> dict[int, Exemplar]:
        """Return the latest exemplar of each bucket of the metric, keyed by the index of the bucket."""
        latest: dict[int, Exemplar] = {}
        for part in child.parts:
            for fine, exemplar in part.exemplars.items():
                bucket = bisect_left(self._ends, fine)
                other = latest.get(bucket)
                if other is None or other.origin.at_unix_ns <= exemplar.origin.at_unix_ns:
                    latest[bucket] = exemplar
        return latest


Family = CounterFamily | CallbackFamily | HistogramFamily
