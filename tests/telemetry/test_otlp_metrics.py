"""A collector gets the numbers of the page in OpenTelemetry's form, and may be down without any harm."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter, MetricExportResult, MetricsData

from oaiserve.telemetry import names
from oaiserve.telemetry.metrics import Metrics
from oaiserve.telemetry.otlp_metrics import Collect, MetricsExport, exporter
from tests.telemetry.collector import Collector
from tests.telemetry.pages import key, samples

NEVER_SECONDS = 3600.0  # so that only the last export happens


def started(sdk_exporter: MetricExporter, collect: Collect, interval_seconds: float = NEVER_SECONDS) -> MetricsExport:
    return MetricsExport(sdk_exporter, collect, version="1.2.3", interval_seconds=interval_seconds)


@pytest.fixture
def exported(collector: Collector, full: Metrics) -> Collector:
    """Export the metrics by the SDK's own exporter over a real socket."""
    assert started(exporter("otlp"), full.collect).close(10)
    assert collector.paths == ["/v1/metrics"]
    return collector


def points(metric: Any) -> list[Any]:
    return list(getattr(metric, metric.WhichOneof("data")).data_points)


def attributes(point: Any) -> dict[str, str]:
    return {attribute.key: attribute.value.string_value for attribute in point.attributes}


def test_every_family_except_vllms_is_exported(exported: Collector) -> None:
    expected = {m.name.removesuffix("_total") for m in names.METRICS} | {m.otel_name for m in names.GEN_AI_METRICS}
    assert exported.last_metrics().keys() == expected


def test_the_export_names_resource_and_scope(exported: Collector) -> None:
    (resource_metrics,) = exported.metrics
    assert attributes(resource_metrics.resource)["service.name"] == "oaiserve"
    (scope_metrics,) = resource_metrics.scope_metrics
    assert (scope_metrics.scope.name, scope_metrics.scope.version) == ("oaiserve", "1.2.3")


def test_a_collector_gets_the_numbers_of_the_page(exported: Collector, full: Metrics) -> None:
    """Compare every exported number with the sample of the same name on the page."""
    page, sent, num_compared = samples(full), exported.last_metrics(), 0
    for metric in (*names.METRICS, *names.GEN_AI_METRICS):
        if (metric.otel_name or metric.name.removesuffix("_total")) not in sent:
            continue
        in_prometheus = {otel: label for label, otel in names.OTEL_ATTRIBUTES.items()} if metric.otel_name else {}
        for point in points(sent[metric.otel_name or metric.name.removesuffix("_total")]):
            labels = dict.fromkeys(metric.labels, "")
            labels |= {in_prometheus.get(name, name): value for name, value in attributes(point).items()}
            num_compared += 1
            if metric.type not in ("histogram", "summary"):
                value = point.as_double if point.WhichOneof("value") == "as_double" else point.as_int
                assert value == page[key(metric.name, **labels)]
                continue
            assert point.sum == page[key(f"{metric.name}_sum", **labels)]
            assert point.count == sum(point.bucket_counts) == page[key(f"{metric.name}_count", **labels)]
            assert tuple(point.explicit_bounds) == metric.buckets
            for number, bound in enumerate([*metric.buckets, math.inf] if metric.buckets else []):
                below = sum(point.bucket_counts[: number + 1])
                assert below == page[key(f"{metric.name}_bucket", **labels, le=str(bound))]
    assert num_compared > len(names.METRICS)


def test_units_types_and_temporality_follow_opentelemetry(exported: Collector) -> None:
    sent = exported.last_metrics()
    assert (sent["gen_ai.server.request.duration"].unit, sent["oaiserve_generation_tokens"].unit) == ("s", "{token}")
    assert (sent["oaiserve_kv_cache_usage_ratio"].unit, sent["oaiserve_requests"].unit) == ("1", "")
    assert sent["oaiserve_requests"].sum.is_monotonic
    assert sent["oaiserve_requests_running"].WhichOneof("data") == "gauge"
    cumulative = 2
    assert sent["oaiserve_requests"].sum.aggregation_temporality == cumulative
    assert sent["oaiserve_request_duration_seconds"].histogram.aggregation_temporality == cumulative


def test_gen_ai_attributes_have_dots_and_empty_ones_are_left_out(exported: Collector) -> None:
    finished, rejected = map(attributes, points(exported.last_metrics()["gen_ai.server.request.duration"]))
    assert finished == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "oaiserve",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
    }
    assert rejected == finished | {"error.type": "Overloaded"}


def test_exemplars_carry_trace_and_span(exported: Collector, make_record: Callable[..., Any]) -> None:
    times = make_record().times
    point = points(exported.last_metrics()["oaiserve_time_to_first_token_seconds"])[0]
    (exemplar,) = point.exemplars
    assert (int.from_bytes(exemplar.trace_id), int.from_bytes(exemplar.span_id)) == (0xABC, 0xDEF)
    assert exemplar.as_double == times.time_to_first_token_ns / 1e9
    assert exemplar.time_unix_nano == 1_700_000_000 * 10**9 + times.responded
    assert 0 < point.start_time_unix_nano <= point.time_unix_nano


# -- collectors that fail ---------------------------------------------------------------------------------------------


class Scripted(MetricExporter):
    """An exporter whose exports have the given results in turn, and then the last result again and again.

    A result that is an exception is raised. Like the real exporter, it logs a failure.
    """

    def __init__(self, *results: MetricExportResult | Exception) -> None:
        super().__init__()
        self.results = list(results)
        self.reached_last = Event()
        self.was_shut_down = False

    def export(self, metrics_data: MetricsData, timeout_millis: float = 0, **kwargs: Any) -> MetricExportResult:
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if len(self.results) == 1:
            self.reached_last.set()
        if isinstance(result, Exception):
            raise result
        if result is MetricExportResult.FAILURE:
            logging.getLogger(__name__).warning("connection refused.")
            logging.getLogger(__name__).error("giving up.")
        return result

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0, **kwargs: Any) -> None:
        self.was_shut_down = True


class Hanging(Scripted):
    def __init__(self) -> None:
        super().__init__()
        self.release = Event()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 0, **kwargs: Any) -> MetricExportResult:
        self.release.wait(60)
        return MetricExportResult.FAILURE


GOOD, BAD = MetricExportResult.SUCCESS, MetricExportResult.FAILURE


def run_through(*results: MetricExportResult | Exception) -> bool:
    """Make an export for each result and one at the end, and return the result of `close`."""
    scripted = Scripted(*results)
    export = started(scripted, list, interval_seconds=0.001)
    assert scripted.reached_last.wait(60)
    closed = export.close(10)
    assert scripted.was_shut_down
    return closed


def test_a_collector_that_is_down_causes_one_line_until_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert run_through(GOOD, BAD, BAD, RuntimeError("no"), BAD, GOOD)
    failing, recovered = caplog.messages
    assert failing.startswith("Metrics do not reach the collector: connection refused. Retrying every 0.001 s;")
    assert recovered == "Metrics reach the collector again."


def test_an_exporter_that_raises_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert run_through(RuntimeError("broken"), GOOD)
    assert "RuntimeError('broken')" in caplog.messages[0]
    assert caplog.records[0].exc_info is not None


def test_close_returns_false_if_the_collector_lacks_the_last_numbers(caplog: pytest.LogCaptureFixture) -> None:
    assert not started(Scripted(BAD), list).close(10)
    assert caplog.messages == ["The last metrics did not reach the collector within 10.0 s: connection refused."]


def test_close_keeps_its_timeout_when_the_collector_hangs(caplog: pytest.LogCaptureFixture) -> None:
    hanging = Hanging()
    assert not started(hanging, list).close(0.01)
    assert hanging.was_shut_down
    assert caplog.messages == ["The last metrics did not reach the collector within 0.0 s: no answer"]
    hanging.release.set()


def test_the_console_exporter_prints_the_metrics(full: Metrics, capsys: pytest.CaptureFixture[str]) -> None:
    assert started(ConsoleMetricExporter(out=sys.stdout), full.collect).close(10)
    assert '"name": "gen_ai.server.time_to_first_token"' in capsys.readouterr().out
