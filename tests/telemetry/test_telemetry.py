"""All of telemetry together: spans, histograms and recent requests agree, with OTLP over a real socket."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from oaiserve.errors import StartupError
from oaiserve.facts.record import EngineAccount, StepKind, StepRecord
from oaiserve.facts.times import PHASES
from oaiserve.telemetry import Measured, Telemetry, names
from oaiserve.telemetry.log_limit import LogLimit
from tests.telemetry.collector import Collector, running_collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture
def traced(collector: Collector, snapshot, monkeypatch: pytest.MonkeyPatch) -> Telemetry:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return Telemetry(Measured("demo", "1", lambda: snapshot), recent_requests=4)


def test_otlp_carries_the_records_trace_id_and_times(traced: Telemetry, collector: Collector, make_record) -> None:
    record = make_record()
    traced.record(record)
    assert traced.close(5)
    assert sorted(collector.paths) == ["/v1/metrics", "/v1/traces"]
    assert {span.trace_id.hex() for span in collector.spans} == {record.trace.trace_id_hex}
    offset_ns = traced.recent.list()[0]["received_unix_ns"] - record.times.received
    spans = {span.name: span for span in collector.spans}
    for name, start_ns, end_ns in record.times.phases():
        assert spans[name].start_time_unix_nano == start_ns + offset_ns
        assert spans[name].end_time_unix_nano == end_ns + offset_ns


def test_spans_histograms_and_ring_agree(traced: Telemetry, collector: Collector, make_record) -> None:
    for num_stamps in range(1, 8):
        traced.record(make_record(num_stamps, request_id=str(num_stamps)))
    assert traced.close(5)
    page = traced.render(None)[0].decode()
    sums = {
        sample.labels["phase"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == f"{names.PHASE_SECONDS.name}_sum"
    }
    for phase in PHASES:
        spans = [span for span in collector.spans if span.name == phase]
        assert math.isclose(
            sums[phase], sum(s.end_time_unix_nano - s.start_time_unix_nano for s in spans) / 1e9, rel_tol=1e-9
        )
    assert len(traced.recent.list()) == 4


def test_a_request_links_to_the_steps_before_its_record(collector, snapshot, make_record, monkeypatch) -> None:
    """The telemetry thread reads the engine's steps before each record, and not only once a second."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    steps = [StepRecord(StepKind.DECODE, 0, 5, 0, 1, 1, number=number) for number in range(4)]
    telemetry = Telemetry(
        Measured("demo", "1", lambda: snapshot, take_steps=lambda: [steps.pop(0) for _ in range(len(steps))]),
        recent_requests=4,
        trace_step_share=1.0,
    )
    telemetry.record(make_record(account=EngineAccount(first_step=1, num_steps=2)))
    assert telemetry.close(5)
    numbers = {
        span.span_id: attribute.value.int_value
        for span in collector.spans
        for attribute in span.attributes
        if attribute.key == "oaiserve.step.number"
    }
    (operation,) = (span for span in collector.spans if span.name == "chat demo")
    assert sorted(numbers.values()) == [0, 1, 2, 3]
    assert [numbers[link.span_id] for link in operation.links] == [1, 2]


def test_exported_spans_are_counted(traced: Telemetry, make_record) -> None:
    traced.record(make_record())
    assert traced.close(5)
    assert b'oaiserve_spans_total{result="exported"} 9.0' in traced.render(None)[0]


def test_an_invalid_span_limit_stops_the_start(snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")
    with pytest.raises(StartupError, match="OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"):
        Telemetry(Measured("demo", "1", lambda: snapshot), recent_requests=4)


def test_spans_are_off_without_the_variables(snapshot, make_record) -> None:
    telemetry = Telemetry(Measured("demo", "1", lambda: snapshot), recent_requests=4, environ={})
    telemetry.record(make_record())
    assert telemetry.flush(5)
    page = telemetry.render(None)[0]
    assert b"oaiserve_requests_total{" in page
    assert b"oaiserve_spans_total{" not in page
    assert telemetry.close(5)


def test_metrics_are_sent_to_the_endpoint_of_traces(traced: Telemetry, collector: Collector, make_record) -> None:
    traced.record(make_record())
    assert traced.close(5)
    sent = collector.last_metrics()
    assert sent["oaiserve_requests"].sum.data_points[0].as_int == 1
    assert sent["gen_ai.server.request.duration"].histogram.data_points[0].count == 1


def test_a_collector_for_traces_alone_gets_no_metrics(collector: Collector, snapshot, make_record, monkeypatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    telemetry = Telemetry(Measured("demo", "1", lambda: snapshot), recent_requests=4)
    telemetry.record(make_record())
    assert telemetry.close(5)
    assert collector.paths == ["/v1/traces"]


def test_an_invalid_export_interval_stops_the_start(snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "often")
    with pytest.raises(StartupError, match="OTEL_METRIC_EXPORT_INTERVAL is 'often'"):
        Telemetry(Measured("demo", "1", lambda: snapshot), recent_requests=4)


def test_steps_and_event_loop_lag_are_shown_without_a_request(snapshot) -> None:
    steps = [StepRecord(StepKind.DECODE, 0, 5_000_000, 0, 3, 3)]
    telemetry = Telemetry(
        Measured("demo", "1", lambda: snapshot, lambda: [steps.pop()] if steps else [], {"device": "cpu"}),
        recent_requests=4,
        vllm_metrics=False,
        environ={},
    )
    telemetry.observe_event_loop_lag(0.25)
    assert telemetry.flush(5)
    assert steps == []
    page = telemetry.render(None)[0]
    assert b'oaiserve_engine_step_seconds_sum{kind="decode"} 0.005\n' in page
    assert b"oaiserve_event_loop_lag_seconds_sum 0.25\n" in page
    assert b'device="cpu"' in page
    assert b"vllm" not in page
    assert telemetry.close(5)


def test_the_log_says_what_it_left_out_when_telemetry_ends(snapshot) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    limit = LogLimit(handler)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    telemetry = Telemetry(Measured("demo", "1", lambda: snapshot), recent_requests=4, log_limit=limit)
    for _ in range(9):
        logger.warning("odd")
    assert b'oaiserve_log_messages_total{level="warning",result="left_out"} 4.0' in telemetry.render(None)[0]
    assert telemetry.close(5)
    assert stream.getvalue().splitlines()[5:] == ["4 more messages like this one were left out: odd"]
