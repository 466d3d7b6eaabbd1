"""The metrics of /metrics are exported to an OpenTelemetry collector periodically, if the OTEL_* variables ask for it.

A separate thread exports them. A collector that is down or slow costs one log line when exports begin to fail and one
when they work again. No data is lost, because the numbers are cumulative and the next export has them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Literal

from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics import export as otel
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from oaiserve.telemetry import names
from oaiserve.telemetry.otel import Exporter, resource
from oaiserve.telemetry.series import HistogramPoint, LabelValues, Points

logger = logging.getLogger(__name__)

# The time for the last export if exports failed before. The exporter itself would retry for ten seconds.
LAST_TRY_SECONDS = 1.0

Collect = Callable[[], list[tuple[names.Metric, Points]]]


def exporter(kind: Literal["otlp", "console"]) -> otel.MetricExporter:
    if kind == "console":
        return otel.ConsoleMetricExporter()
    # A late import, because it loads an HTTP client that is not needed otherwise.
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()  # reads endpoint, headers, timeout and the rest from the environment


class MetricsExport:
    """The thread for exports of `collect`, every `interval_seconds` and once more when it is closed."""

    def __init__(
        self, exporter: otel.MetricExporter, collect: Collect, *, version: str, interval_seconds: float
    ) -> None:
        self._exporter = Exporter(exporter)
        self._collect = collect
        self._resource = resource(version)
        self._scope = InstrumentationScope(names.SERVICE_NAME, version)
        self._interval_seconds = interval_seconds
        self._start_unix_ns = time.time_ns()
        self._stop = Event()
        self._is_failing = False
        self._thread = Thread(target=self._run, name="metrics-export", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begin the last export without waiting for it."""
        self._stop.set()

    def close(self, timeout_seconds: float) -> bool:
        """Make the last export within the timeout, and return False if the collector did not get the last numbers."""
        self.stop()
        was_failing = self._is_failing
        self._thread.join(min(LAST_TRY_SECONDS, timeout_seconds) if was_failing else timeout_seconds)
        has_ended = not self._thread.is_alive()
        self._exporter.close(has_ended=has_ended)
        is_complete = has_ended and not self._is_failing
        if not is_complete and not was_failing:  # else the log has said so already
            why = self._exporter.first_warning or "no answer"
            logger.warning("The last metrics did not reach the collector within %.1f s: %s", timeout_seconds, why)
        return is_complete

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self._export()
        self._export()

    def _export(self) -> None:
        failure = self._exporter.export(self._data())
        if failure is None and self._is_failing:
            logger.info("Metrics reach the collector again.")
        if failure is not None and not self._is_failing and not self._stop.is_set():  # else `close` logs it
            logger.warning(
                "Metrics do not reach the collector: %s. Retrying every %g s; a line is logged when it works again.",
                failure.why,
                self._interval_seconds,
                exc_info=failure.error,
            )
        self._is_failing = failure is not None

    def _data(self) -> otel.MetricsData:
        now_unix_ns = time.time_ns()
        metrics = [
            _metric(metric, points, self._start_unix_ns, now_unix_ns) for metric, points in self._collect() if points
        ]
        scope_metrics = otel.ScopeMetrics(self._scope, metrics, schema_url="")
        return otel.MetricsData([otel.ResourceMetrics(self._resource, [scope_metrics], schema_url="")])


def _metric(metric: names.Metric, points: Points, start_unix_ns: int, now_unix_ns: int) -> otel.Metric:
    """Return a metric in OpenTelemetry's form, whose name has no suffix `_total` because the type already says it."""
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
    # In UCUM notation; the names of counted things stand in braces, as in {token}.
    unit = {"": "", "seconds": "s", "ratio": "1"}.get(metric.unit, f"{{{metric.unit.removesuffix('s')}}}")
    return otel.Metric(metric.otel_name or metric.name.removesuffix("_total"), metric.help, unit, data)


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
        explicit_bounds=metric.buckets,  # a summary has none, so all values are in one bucket
        min=None,  # type: ignore[arg-type]  # optional in OTLP, and unknown
        max=None,  # type: ignore[arg-type]
        exemplars=[
            sdk.Exemplar({}, value, origin.at_unix_ns, origin.span_id, origin.trace_id)
            for value, origin in point.exemplars.values()
        ],
    )


def _attributes(metric: names.Metric, labels: LabelValues) -> dict[str, str]:
    """Return the labels as attributes, leaving out those with an empty value."""
    attributes = {label: str(value) for label, value in zip(metric.labels, labels, strict=True) if value}
    if not metric.otel_name:
        return attributes
    return {names.OTEL_ATTRIBUTES[label]: value for label, value in attributes.items()}
