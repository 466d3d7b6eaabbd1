"""Renders the page for /metrics in Prometheus' text format or in OpenMetrics 1.

A page is requested every few seconds, or twenty times a second by a router, and most numbers have not changed since the
previous request. So the rendered lines of each histogram are cached. This module is not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cache, partial
from itertools import chain

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as LibraryMetric
from prometheus_client.utils import floatToGoString

from oaiserve.facts.metric import Metric
from oaiserve.telemetry.series import (
    NS_PER_SECOND,
    CallbackFamily,
    CounterFamily,
    Family,
    HistogramChild,
    HistogramFamily,
    LabelValues,
    Number,
)

CLIENT = "client"  # the label with the name of a client


class Form(StrEnum):
    """The formats of the page; the value of each is its content type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def negotiate(accept: str | None) -> Form:
    """Return the first supported format in the Accept header, or the classic text format."""
    for media_range in (accept or "").split(","):
        kind, *params = (part.strip() for part in media_range.split(";"))
        version = next((param for param in params if param.startswith("version=")), "version=1.0.0")
        if kind == "application/openmetrics-text" and version == "version=1.0.0":
            return Form.OPENMETRICS
    return Form.TEXT


# Results of the client library's own collectors are cached this long, because collecting them takes a third of the time
# of most pages.
REGISTRY_SECONDS = 1.0


class Page:
    """Renders the given families, and then the metrics of `registry`, which are up to REGISTRY_SECONDS old."""

    def __init__(
        self,
        families: Iterable[Family],
        registry: CollectorRegistry,
        clock_ns: Callable[[], int],
    ) -> None:
        self._clock_ns = clock_ns
        self._blocks: list[_Histograms | _Numbers] = [_block(family) for family in families]
        self._registry = registry
        self._collected_ns: int | None = None
        # Both formats share these results, so that a counter never seems to decrease from one format to the other.
        self._blocks_of_registry: list[_Numbers] = []

    def add(self, family: Family) -> None:
        self._blocks.append(_block(family))

    def render(self, form: Form, *, names_clients: bool = True) -> bytes:
        """Return the page. Without `names_clients`, the series of all clients are added up under an empty name."""
        now_ns = self._clock_ns()
        if self._collected_ns is None or now_ns - self._collected_ns > REGISTRY_SECONDS * NS_PER_SECOND:
            self._collected_ns = now_ns
            self._blocks_of_registry = [
                _Numbers(_family_of(metric)) for metric in self._registry.collect() if metric.samples
            ]
        end = b"# EOF\n" if form is Form.OPENMETRICS else b""
        blocks = chain(self._blocks, self._blocks_of_registry)
        return b"".join((*(block.render(form, names_clients) for block in blocks), end))


def _block(family: Family) -> _Histograms | _Numbers:
    return _Histograms(family) if isinstance(family, HistogramFamily) else _Numbers(family)


def _family_of(metric: LibraryMetric) -> CallbackFamily:
    first = metric.samples[0]
    points = {tuple(sample.labels.values()): sample.value for sample in metric.samples}
    return CallbackFamily(
        Metric(first.name, metric.type, metric.documentation, labels=(*first.labels,)), lambda: points
    )


class _Numbers:
    """Renders a family of counters, gauges or infos: one line per sample, the same in both formats."""

    def __init__(self, family: CounterFamily | CallbackFamily) -> None:
        self._headers = _headers(family.metric)
        self._family = family
        self._start = cache(partial(_start_of_line, family.metric))
        self._of_client = family.metric.labels.index(CLIENT) if CLIENT in family.metric.labels else None

    def render(self, form: Form, names_clients: bool) -> bytes:
        points = self._family.points()
        if self._of_client is not None and not names_clients:
            points = _without_names(points, self._of_client)
        lines = (f"{self._start(values)}{_number(value)}\n" for values, value in points.items())
        return self._headers[form] + "".join(lines).encode()


def _without_names(points: Mapping[LabelValues, Number], place: int) -> Mapping[LabelValues, Number]:
    """Return the sums of points that differ only in the label at this index, which is empty in the result."""
    sums: dict[LabelValues, Number] = {}
    for values, value in points.items():
        unnamed = (*values[:place], "", *values[place + 1 :])
        sums[unnamed] = sums.get(unnamed, 0) + value
    return sums


class _Histograms:
    """Renders a family of histograms or summaries: the buckets, if it has any, the count and the sum."""

    def __init__(self, family: HistogramFamily) -> None:
        self._headers = _headers(family.metric)
        self._family = family
        self._histograms: dict[LabelValues, _Histogram] = {}

    def render(self, form: Form, names_clients: bool) -> bytes:
        for child in self._family.children():
            if child.labels not in self._histograms:
                self._histograms[child.labels] = _Histogram(self._family, child)
        samples = b"".join(histogram.render(form) for histogram in self._histograms.values())
        return self._headers[form] + samples


class _Histogram:
    def __init__(self, family: HistogramFamily, child: HistogramChild) -> None:
        start = partial(_start_of_line, family.metric, child.labels)
        if family.metric.buckets:
            bounds = (*family.metric.buckets, float("inf"))
        else:
            bounds = ()
        self._buckets = [start("_bucket", le=_number(bound)) for bound in bounds]
        self._count = start("_count")
        self._sum = start("_sum")
        self._family = family
        self._child = child
        self._num = dict.fromkeys(Form, -1)
        self._rendered = dict.fromkeys(Form, b"")

    def render(self, form: Form) -> bytes:
        if self._child.num != self._num[form]:
            self._num[form] = self._child.num
            self._rendered[form] = self._text(form).encode()
        return self._rendered[form]

    def _text(self, form: Form) -> str:
        family = self._family
        child = self._child
        total = _number(family.total(child))
        counts = family.cumulative(child) if self._buckets else ()
        exemplars = dict.fromkeys(range(len(counts)), "")
        for bucket, (value, origin) in family.exemplars(child).items() if form is not Form.TEXT else ():
            at_seconds = origin.at_unix_ns / NS_PER_SECOND
            trace_id = f"{origin.trace_id:032x}"
            exemplars[bucket] = f' # {{trace_id="{trace_id}"}} {_number(value / family.per_unit)} {at_seconds}'
        lines = zip(self._buckets, counts, exemplars.values(), strict=True)
        buckets = "".join(f"{start}{count}.0{exemplar}\n" for start, count, exemplar in lines)
        return f"{buckets}{self._count}{child.num}.0\n{self._sum}{total}\n"


def _headers(metric: Metric) -> dict[Form, bytes]:
    """Return the HELP and TYPE lines of a metric in each format, and the UNIT line, which only OpenMetrics has.

    In OpenMetrics, the suffixes `_total` and `_info` belong to the names of the samples, not to that of the family.
    """
    help_text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    kind = "gauge" if metric.type == "info" else metric.type
    text = f"# HELP {metric.name} {help_text}\n# TYPE {metric.name} {kind}\n"
    suffix = {"counter": "_total", "info": "_info"}.get(metric.type, "")
    help_text = help_text.replace('"', r"\"")
    name = metric.name.removesuffix(suffix)
    unit = f"# UNIT {name} {metric.unit}\n" if metric.unit else ""
    openmetrics = f"# HELP {name} {help_text}\n# TYPE {name} {metric.type}\n{unit}"
    return {Form.TEXT: text.encode(), Form.OPENMETRICS: openmetrics.encode()}


def _start_of_line(metric: Metric, values: LabelValues, suffix: str = "", **more: str) -> str:
    labels = sorted((dict(zip(metric.labels, values, strict=True)) | more).items())
    inner = ",".join(f'{label}="{_escape(value)}"' for label, value in labels)
    if inner:
        return f"{metric.name}{suffix}{{{inner}}} "
    return f"{metric.name}{suffix} "


def _escape(value: str) -> str:
    # A lone surrogate cannot be encoded, so a single one would make the whole page fail.
    whole = value.encode("utf-8", "replace").decode()
    return whole.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: Number) -> str:
    if isinstance(value, int):
        return f"{value}.0"
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
