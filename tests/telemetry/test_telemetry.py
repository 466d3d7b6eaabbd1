"""All of telemetry together, with OTLP over a real socket."""

import io
import json
import logging
from typing import Any

import pytest

from oaiserve.errors import StartupError
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import EngineAccount
from oaiserve.facts.step_record import StepKind, StepRecord
from oaiserve.runtime import THREADS
from oaiserve.telemetry import Measured, Telemetry, names
from oaiserve.telemetry.log_limit import LogLimit
from tests.telemetry.collector import Collector
from tests.telemetry.conftest import MakeRecord
from tests.telemetry.exported import json_log
from tests.telemetry.pages import key, samples_on
from tests.world.loop import World


def of_engine(snapshot: EngineNumbers, **options: Any) -> Telemetry:
    return Telemetry(Measured("demo", "1", lambda: snapshot), recent_requests=4, **{"runtime": World(0)} | options)


def test_a_record_reaches_spans_metrics_log_and_recent_requests(
    collector: Collector, snapshot: EngineNumbers, make_record: MakeRecord, account: EngineAccount
) -> None:
    """`test_agreement.py` tests that these agree on any record."""
    record = make_record(account=account)
    telemetry = of_engine(snapshot, runtime=THREADS)
    with json_log() as stream:
        telemetry.record(record)
        assert telemetry.close(60)
    assert sorted(collector.paths) == ["/v1/traces"]
    assert {span.trace_id.hex() for span in collector.spans} == {record.trace.trace_id_hex}
    assert sum(len(span.events) for span in collector.spans) == len(account.events)
    (entry,) = telemetry.recent.list()
    line = json.loads(stream.getvalue())
    offset_ns = entry["received_unix_ns"] - record.times.received
    assert min(span.start_time_unix_nano for span in collector.spans) == record.times.received + offset_ns
    assert entry["request_id"] == line["request_id"] == record.request_id
    page = samples_on(telemetry.render(None)[0])
    assert page[key(names.SPANS.name, result="exported")] == 9
    # An alert watches the increase of lost spans, which PromQL does not see if the series appears with the first ones.
    assert page[key(names.SPANS.name, result="failed")] == page[key(names.SPANS.name, result="dropped")] == 0
    assert page[key(names.PROMPT_TOKENS.name, operation="chat", model="demo")] == record.prompt_tokens


def test_an_invalid_variable_stops_the_start(snapshot: EngineNumbers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")
    with pytest.raises(StartupError, match="OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"):
        of_engine(snapshot)


def test_spans_are_off_without_the_variables(snapshot: EngineNumbers, make_record: MakeRecord) -> None:
    telemetry = of_engine(snapshot, environ={})
    telemetry.record(make_record())
    assert telemetry.close(60)
    page = telemetry.render(None)[0]
    assert b"oaiserve_requests_total{" in page
    assert b"oaiserve_spans_total{" not in page


def test_steps_and_event_loop_lag_are_shown_without_a_request(snapshot) -> None:
    steps = [StepRecord(StepKind.DECODE, 0, 5_000_000, 0, 3, 3)]
    telemetry = Telemetry(
        Measured("demo", "1", lambda: snapshot, lambda: [steps.pop()] if steps else [], {"device": "cpu"}),
        recent_requests=4,
        environ={},
        runtime=World(0),
    )
    telemetry.observe_event_loop_lag(0.25)
    assert telemetry.close(60)
    assert steps == []
    page = telemetry.render(None)[0]
    assert b'oaiserve_engine_step_seconds_sum{kind="decode"} 0.005\n' in page
    assert b"oaiserve_event_loop_lag_seconds_sum 0.25\n" in page
    assert b'device="cpu"' in page


def test_the_log_says_what_it_left_out_when_telemetry_ends(snapshot) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    limit = LogLimit(handler, THREADS.clock_ns)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    telemetry = of_engine(snapshot, log_limit=limit)
    for _ in range(9):
        logger.warning("odd")
    assert b'oaiserve_log_messages_total{level="warning",result="left_out"} 4.0' in telemetry.render(None)[0]
    assert telemetry.close(60)
    assert stream.getvalue().splitlines()[5:] == ["4 more messages like this one were left out: odd"]
