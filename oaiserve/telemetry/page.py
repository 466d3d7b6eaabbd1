"""The page for /metrics is rendered in Prometheus' classic text format and in OpenMetrics.

A scrape comes every few seconds, or twenty times a second from a router, and most numbers have not changed since the
previous one. So each histogram keeps its rendered lines. This module is not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import cache, partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.utils import floatToGoString

from oaiserve.facts.times import monotonic_ns
from oaiserve.telemetry.names import Metric
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


class Form(StrEnum):
    """The two formats of the page; the value of each is its content type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def negotiate(accept: str | None) -> Form:
    """Return OpenMetrics if the Accept header asks for it, else the classic text format."""
    try:
        _, content_type = choose_encoder(accept or "")
    except TypeError:  # the client library compares version numbers, and a version that is not a number raises
        return Form.TEXT
    return Form.OPENMETRICS if content_type.startswith("application/openmetrics-text") else Form.TEXT


# The lines of the client library's own collectors are kept for so long: they are a third of the cost of most pages.
REGISTRY_SECONDS = 1.0


class Page:
    """A page renders its families, and then the metrics of `registry`, which are up to REGISTRY_SECONDS old."""

    def __init__(self, families: Iterable[Family], registry: CollectorRegistry) -> None:
        self._blocks = [
            _Histograms(family) if isinstance(family, HistogramFamily) else _Numbers(family) for family in families
        ]
        self._registry = registry
        self._collected_ns: int | None = None
        # Collected together, so that no counter goes back between formats.
        self._lines_of_registry: dict[Form, bytes] = {}

    def render(self, form: Form) -> bytes:
        parts = list(chain.from_iterable((block.headers[form], block.lines(form)) for block in self._blocks))
        now_ns = monotonic_ns()
        if self._collected_ns is None or now_ns - self._collected_ns > REGISTRY_SECONDS * NS_PER_SECOND:
            self._collected_ns = now_ns
            collected = list(self._registry.collect())
            moment: Any = SimpleNamespace(collect=lambda: collected)  # both encoders see the same numbers
            self._lines_of_registry = {
                Form.TEXT: generate_latest(moment),
                Form.OPENMETRICS: openmetrics.generate_latest(moment),  # type: ignore[no-untyped-call]
            }
        return b"".join((*parts, self._lines_of_registry[form]))


class _Numbers:
    """Renders a family of counters, gauges or infos: one line per sample, the same in both formats."""

    def __init__(self, family: CounterFamily | CallbackFamily) -> None:
        self.headers = _headers(family.metric)
        self._family = family
        self._start = cache(partial(_start_of_line, family.metric))

    def lines(self, form: Form) -> bytes:
        points = self._family.points().items()
        return "".join(f"{self._start(values)}{_number(value)}\n" for values, value in points).encode()


class _Histograms:
    """Renders a family of histograms or summaries: the buckets, if it has any, then the count and the sum."""

    def __init__(self, family: HistogramFamily) -> None:
        self.headers = _headers(family.metric)
        self._family = family
        self._histograms: dict[LabelValues, _Histogram] = {}

    def lines(self, form: Form) -> bytes:
        for child in self._family.children():
            if child.labels not in self._histograms:
                self._histograms[child.labels] = _Histogram(self._family, child)
        return "".join(histogram.lines(form) for histogram in self._histograms.values()).encode()


class _Histogram:
    def __init__(self, family: HistogramFamily, child: HistogramChild) -> None:
        metric = family.metric

        def start(suffix: str, **more: str) -> str:
            return _start_of_line(metric, child.labels, suffix, **more).replace("%", "%%")

        bounds = [_number(bound) for bound in (*metric.buckets, float("inf"))] if metric.buckets else []
        buckets = [start("_bucket", le=bound) for bound in bounds]
        end = f"{start('_count')}%d.0\n{start('_sum')}%s\n"
        # The %s of a bucket is its exemplar, or empty.
        self._template = "".join(f"{bucket}%d.0%s\n" for bucket in buckets) + end
        self._family = family
        self._child = child
        self._num = dict.fromkeys(Form, -1)
        self._lines = dict.fromkeys(Form, "")

    def lines(self, form: Form) -> str:
        num = self._child.num
        if num != self._num[form]:
            self._num[form] = num
            self._lines[form] = self._template % self._values(form)
        return self._lines[form]

    def _values(self, form: Form) -> tuple[object, ...]:
        """Return the values for the placeholders in the template."""
        family, child = self._family, self._child
        total = _number(family.total(child))
        if not family.metric.buckets:
            return (child.num, total)
        counts = family.cumulative(child)
        exemplars = [""] * len(counts)
        for bucket, (value, origin) in family.exemplars(child).items() if form is Form.OPENMETRICS else ():
            at_seconds = origin.at_unix_ns / NS_PER_SECOND
            exemplars[bucket] = (
                f' # {{trace_id="{origin.trace_id:032x}"}} {_number(value / family.per_unit)} {at_seconds}'
            )
        return (*chain.from_iterable(zip(counts, exemplars, strict=True)), counts[-1], total)


def _headers(metric: Metric) -> dict[Form, bytes]:
    """Return the HELP and TYPE lines of a metric in each format, and the UNIT line, which only OpenMetrics has.

    In OpenMetrics the suffixes `_total` and `_info` belong to the samples, and not to the name of the family.
    """
    help_text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    kind = "gauge" if metric.type == "info" else metric.type
    text = f"# HELP {metric.name} {help_text}\n# TYPE {metric.name} {kind}\n"
    suffix = {"counter": "_total", "info": "_info"}.get(metric.type, "")
    name, help_text = metric.name.removesuffix(suffix), help_text.replace('"', r"\"")
    unit = f"# UNIT {name} {metric.unit}\n" if metric.unit else ""
    return {
        Form.TEXT: text.encode(),
        Form.OPENMETRICS: f"# HELP {name} {help_text}\n# TYPE {name} {metric.type}\n{unit}".encode(),
    }


def _start_of_line(metric: Metric, values: LabelValues, suffix: str = "", **more: str) -> str:
    """Return the name and the labels of a sample: its line up to the value."""
    labels = sorted((dict(zip(metric.labels, values, strict=True)) | more).items())
    inner = ",".join(f'{label}="{_escape(value)}"' for label, value in labels)
    return f"{metric.name}{suffix}{{{inner}}} " if inner else f"{metric.name}{suffix} "


def _escape(value: str) -> str:
    # A lone surrogate cannot be encoded, so a single one would make the whole page fail.
    whole = value.encode("utf-8", "replace").decode()
    return whole.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: Number) -> str:
    if isinstance(value, int):
        return f"{value}.0"
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
