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

# A single call into C, which holds the GIL, puts at most this many values into buckets: a fraction of a millisecond.
_VALUES_PER_CALL = 4096


class Origin(NamedTuple):
    """The span of a value, for exemplars."""

    trace_id: int
    span_id: int
    at_unix_ns: int


class Exemplar(NamedTuple):
    value: Number  # value in the series' unit
    origin: Origin


class Counter:
    """An exact sum for each combination of label values. `per_unit` make one unit of the metric: 10**9 for ns."""

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
        self.counts = [0] * num_buckets  # not cumulative; the last bucket has the values above all boundaries
        self.exemplars: dict[int, Exemplar] = {}  # keyed by bucket: the latest exemplar
        self.num = 0
        self.total: Number = 0


class Distribution:
    """A distribution keeps bucket counts and the sum of its values for each combination of label values.

    Its boundaries are all those of the metrics in `shown_as`, as integers: `per_unit` of them make one unit.
    """

    def __init__(self, *labels: str, shown_as: Iterable[Metric], per_unit: int = 1) -> None:
        self.labels = labels
        self.per_unit = per_unit
        self.boundaries = sorted({round(bound * per_unit) for metric in shown_as for bound in metric.buckets})
        num_buckets = len(self.boundaries) + 1
        # It only grows.
        self.children: dict[LabelValues, DistributionChild] = defaultdict(lambda: DistributionChild(num_buckets))

    def add(self, labels: LabelValues, value: Number, origin: Origin | None = None) -> None:
        child = self.children[labels]
        bucket = bisect_left(self.boundaries, value)  # `le`: the bucket includes its boundary
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
    """Return the map from labels of a series to those of a metric, or to None if the metric does not show them.

    A label of the metric that the series does not have, under the same name or that of `names.RENAMED`, is one of the
    `constants`. The metric adds up over labels of the series that it does not have, and over `names.RENAMED_VALUES`.
    """
    where = [(labels.index(label), value) for label, value in metric.where]
    names = [RENAMED.get(label, label) for label in metric.labels]
    # For each label of the metric: its position in the labels of the series, or -1 and a constant; and other names of
    # its values.
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
    """A counter family shows a `Counter` series. `constants` are those of `labelling`."""

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
    """A family of numbers from elsewhere, by a call of `read` for every page."""

    def __init__(self, metric: Metric, read: Callable[[], Mapping[LabelValues, Number]]) -> None:
        self.metric = metric
        self.points = read


class HistogramChild(NamedTuple):
    """One histogram of a family, which is the sum of one or more children of the series."""

    labels: LabelValues
    parts: list[DistributionChild]

    @property
    def num(self) -> int:
        return sum(part.num for part in self.parts)


class HistogramFamily:
    """A histogram family shows a `Distribution` series, whose boundaries must include the buckets of `metric`.

    `constants` are those of `labelling`.
    """

    def __init__(self, metric: Metric, series: Distribution, constants: Mapping[str, str] = NO_CONSTANTS) -> None:
        self.metric = metric
        self.per_unit = series.per_unit
        self._series = series
        self._shown = labelling(metric, series.labels, constants)
        self._num_seen = 0  # children of the series that are in `_children`, or that this family does not show
        self._children: dict[LabelValues, HistogramChild] = {}
        # For each bucket of the metric, the last bucket of the series within it.
        self._ends = [series.boundaries.index(round(bound * series.per_unit)) for bound in metric.buckets]
        self._ends.append(len(series.boundaries))

    def children(self) -> Iterable[HistogramChild]:
        """Return the histograms of the family in the order in which they first had a value."""
        series_children = self._series.children
        if len(series_children) > self._num_seen:
            for values, part in islice(series_children.items(), self._num_seen, None):
                labels = self._shown(values)
                if labels is not None:
                    self._children.setdefault(labels, HistogramChild(labels, [])).parts.append(part)
            self._num_seen = len(series_children)
        return self._children.values()

    def cumulative(self, child: HistogramChild) -> list[int]:
        """Return the number of values at or below each bucket boundary of the metric, and last that of all values."""
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
