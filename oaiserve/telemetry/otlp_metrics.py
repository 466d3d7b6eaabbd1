"""The metrics of /metrics, sent to an OpenTelemetry collector every so often, where the OTEL_* variables ask for it.

A thread of its own sends them. A collector that is down or slow costs nothing but one line in the log when it begins
to fail, and one when it works again: the numbers are cumulative, so the next export makes up for those that failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from threading import Event, Thread

from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics import export as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from oaiserve.telemetry import names
from oaiserve.telemetry.complaints import Complaints
from oaiserve.telemetry.otel_environment import exporter_kind
from oaiserve.telemetry.series import HistogramPoint, LabelValues, Points

logger = logging.getLogger(__name__)

LAST_TRY_SECONDS = 1.0  # at the end, where exports failed before: the exporter would go on trying for ten

Collect = Callable[[], list[tuple[names.Metric, Points]]]


def exporter_from_environment(environ: Mapping[str, str]) -> otel.MetricExporter | None:
    """The exporter that the standard variables ask for; None: they ask for none, and nothing is sent.

    Raises StartupError for one that this server does not have.
    """
    kind = exporter_kind(environ, "metrics")
    if kind == "console":
        return otel.ConsoleMetricExporter()
    if kind is None:
        return None
    # Imported here: it brings an HTTP client that nobody else needs.
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()  # reads endpoint, headers, timeout and the rest from the environment


class MetricsExport:
    """Sends what `collect` gives, every `interval_seconds` and once more at the end."""

    def __init__(
        self,
        exporter: otel.MetricExporter,
        collect: Collect,
        *,
        resource: Resource,
        version: str,
        interval_seconds: float,
    ) -> None:
        self._exporter = exporter
        self._collect = collect
        self._resource = resource
        self._scope = InstrumentationScope(names.SERVICE_NAME, version)
        self._interval_seconds = interval_seconds
        self._start_unix_ns = time.time_ns()
        self._stop = Event()
        self._is_failing = False
        self._complaints = Complaints(exporter)
        self._thread = Thread(target=self._run, name="metrics-export", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begins the last export, and does not wait for it."""
        self._stop.set()

    def close(self, timeout_seconds: float) -> bool:
        """The last export, waiting no longer than that. False: the collector has not got the last numbers."""
        self.stop()
        was_failing = self._is_failing
        self._thread.join(min(LAST_TRY_SECONDS, timeout_seconds) if was_failing else timeout_seconds)
        has_ended = not self._thread.is_alive()
        self._exporter.shutdown()  # also ends its wait for another try
        if has_ended:
            self._complaints.stop()
        is_complete = has_ended and not self._is_failing
        if not is_complete and not was_failing:  # else that has been said
            why = self._complaints.first or "no answer"
            logger.warning("The last metrics did not reach the collector within %.1f s: %s", timeout_seconds, why)
        return is_complete

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self._export()
        self._export()

    def _export(self) -> None:
        self._complaints.first = None
        error: Exception | None = None
        try:
            is_exported = self._exporter.export(self._data()) is otel.MetricExportResult.SUCCESS
        except Exception as caught:  # exporters are not ours; the thread must outlive whatever they do
            is_exported, error, self._complaints.first = False, caught, repr(caught)
        if is_exported and self._is_failing:
            logger.info("Metrics reach the collector again.")
        if not is_exported and not self._is_failing and not self._stop.is_set():  # else `close` tells
            logger.warning(
                "Metrics do not reach the collector: %s. Trying every %g s; the next line comes when one gets there.",
                (self._complaints.first or "the exporter gave no reason").rstrip("."),
                self._interval_seconds,
                exc_info=error,
            )
        self._is_failing = not is_exported

    def _data(self) -> otel.MetricsData:
        now_unix_ns = time.time_ns()
        metrics = [
            _metric(metric, points, self._start_unix_ns, now_unix_ns) for metric, points in self._collect() if points
        ]
        scope_metrics = otel.ScopeMetrics(self._scope, metrics, schema_url="")
        return otel.MetricsData([otel.ResourceMetrics(self._resource, [scope_metrics], schema_url="")])


def _metric(metric: names.Metric, points: Points, start_unix_ns: int, now_unix_ns: int) -> otel.Metric:
    """Names as OpenTelemetry has them: the type says what in Prometheus a suffix says."""
    cumulative = otel.AggregationTemporality.CUMULATIVE
    data: otel.DataT
    if isinstance(points, list):
        data = otel.Histogram([_histogram(metric, point, start_unix_ns, now_unix_ns) for point in points], cumulative)
    else:
        numbers = [
            otel.NumberDataPoint(_attributes(metric, labels), start_unix_ns, now_unix_ns, value)
            for labels, value in points.items()
        ]
        is_sum = metric.type == "counter"
        data = otel.Sum(numbers, cumulative, is_monotonic=True) if is_sum else otel.Gauge(numbers)
    return otel.Metric(metric.otel_name or metric.name.removesuffix("_total"), metric.help, _unit(metric.unit), data)


def _histogram(
    metric: names.Metric, point: HistogramPoint, start_unix_ns: int, now_unix_ns: int
) -> otel.HistogramDataPoint:
    return otel.HistogramDataPoint(
        attributes=_attributes(metric, point.labels),
        start_time_unix_nano=start_unix_ns,
        time_unix_nano=now_unix_ns,
        count=sum(point.counts),
        sum=point.total,
        bucket_counts=point.counts,
        explicit_bounds=metric.buckets,  # a summary has none: one bucket for all
        min=None,  # type: ignore[arg-type]  # optional in OTLP, and not known
        max=None,  # type: ignore[arg-type]
        exemplars=[
            sdk.Exemplar({}, value, origin.at_unix_ns, origin.span_id, origin.trace_id)
            for value, origin in point.exemplars.values()
        ],
    )


def _attributes(metric: names.Metric, labels: LabelValues) -> dict[str, str]:
    """An empty label is an attribute that is not there."""
    attributes = {label: str(value) for label, value in zip(metric.labels, labels, strict=True) if value}
    if not metric.otel_name:
        return attributes
    return {names.OTEL_ATTRIBUTES[label]: value for label, value in attributes.items()}


def _unit(unit: str) -> str:
    """In UCUM: things that are counted stand in braces."""
    return {"": "", "seconds": "s", "ratio": "1"}.get(unit, f"{{{unit.removesuffix('s')}}}")
