"""Tests that the record of a request and its spans are the same nanoseconds, however the request ends.

Server, engine and telemetry are real. The runner is scripted, and the spans are sent to a collector.
"""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.sequence import Sequence
from oaiserve.facts.record import EventKind, Outcome, RequestRecord
from oaiserve.telemetry import Measured, Telemetry, names
from tests.engine.doubles import ScriptedRunner, make_engine, next_letter
from tests.routes.conftest import run_server
from tests.telemetry.collector import running_collector
from tests.telemetry.reported import ATTRIBUTES

FAILING_SEED = 13
LETTERS = {"structured_outputs": {"regex": "[a-z]*"}}  # what the runner draws
STREAM = {"stream": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
LONG = {"prompt": "Hi" * 1000, "max_tokens": 10**9}


class Sent(NamedTuple):
    """A request, and how it ends."""

    body: dict[str, Any]
    outcome: Outcome
    status: int
    last_phase: str
    leaves: bool = False  # in the middle of a stream that would otherwise last for a minute


REQUESTS = {
    "two choices": Sent({**CHAT, "n": 2, "max_tokens": 7}, Outcome.FINISHED, 200, "respond"),
    "stream": Sent({**STREAM, "max_tokens": 1}, Outcome.FINISHED, 200, "respond"),
    "grammar": Sent({**LETTERS, "max_tokens": 3}, Outcome.FINISHED, 200, "respond"),
    "leaves": Sent({**STREAM, "max_tokens": 500_000}, Outcome.CANCELLED, 200, "decode", leaves=True),
    "wrong": Sent({"temperature": 3}, Outcome.REJECTED, 400, "receive"),
    "too long": Sent(LONG, Outcome.REJECTED, 400, "tokenize"),
    "not compiled": Sent({"structured_outputs": {"regex": "("}}, Outcome.REJECTED, 400, "tokenize"),
    "grammar and too long": Sent({**LONG, **LETTERS}, Outcome.REJECTED, 400, "tokenize"),
    "fails": Sent({"seed": FAILING_SEED}, Outcome.FAILED, 500, "decode"),
    "fails in its stream": Sent({**STREAM, "seed": FAILING_SEED}, Outcome.FAILED, 200, "decode"),
}


class Accounts(NamedTuple):
    records: dict[str, RequestRecord]  # by the name of the request
    spans: dict[bytes, dict[str, Span]]  # by trace id, then by name
    offset_ns: int  # wall clock minus monotonic clock


def token_of(sequence: Sequence) -> int | str:
    """The alphabet, and an error for the third token of a request with the failing seed."""
    fails = sequence.params.seed == FAILING_SEED and sequence.num_generated == 2
    return "The model produced no usable numbers." if fails else next_letter(sequence)


@pytest.fixture(scope="module")
def accounts() -> Iterator[Accounts]:
    """Send the requests one after the other, and return what became of them."""
    recorded: SimpleQueue[RequestRecord] = SimpleQueue()

    class TappedTelemetry(Telemetry):
        def record(self, record: RequestRecord) -> None:
            super().record(record)
            recorded.put(record)

    with running_collector() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("NO_PROXY", "127.0.0.1")
        engine = make_engine(ScriptedRunner(token_of), kv_blocks=150_000)
        telemetry = TappedTelemetry(Measured("demo", "1", engine.snapshot), recent_requests=1)
        records = {}
        with (
            run_server(create_app(Config("demo"), engine, telemetry)) as url,
            httpx.Client(base_url=url, timeout=30) as http,
        ):
            for name, sent in REQUESTS.items():
                path = "/v1/chat/completions" if "messages" in sent.body else "/v1/completions"
                body = sent.body if "messages" in sent.body else {"prompt": "Hi"} | sent.body
                with http.stream("POST", path, json=body) as answer:
                    next(answer.iter_raw()) if sent.leaves else answer.read()
                records[name] = recorded.get(timeout=60)
        # The server has stopped, so all spans have been exported.
        assert recorded.empty()
        (newest,) = telemetry.recent.list()
        spans: dict[bytes, dict[str, Span]] = {}
        for span in collector.spans:
            spans.setdefault(span.trace_id, {})[span.name] = span
        yield Accounts(records, spans, newest["received_unix_ns"] - records[name].times.received)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_has_one_record_and_its_spans_are_the_times_of_the_record(accounts: Accounts, name: str) -> None:
    sent, record, offset_ns = REQUESTS[name], accounts.records[name], accounts.offset_ns
    phases = record.times.phases()
    assert (record.outcome, record.http_status, phases[-1].name) == (sent.outcome, sent.status, sent.last_phase)
    spans = accounts.spans[record.trace.trace_id.to_bytes(16)].copy()
    for phase, start_ns, end_ns in phases:
        span = spans.pop(phase)
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (start_ns + offset_ns, end_ns + offset_ns)
    assert spans.keys() == {f"POST {record.http_route}", f"{record.operation} {record.model}"}
    assert all(sum(causes.values()) == phases[4 + n].duration_ns for n, causes in enumerate(record.causes_ns.values()))
    assert sum(record.account.waits_ns.values()) == sum(p.duration_ns for p in phases if p.name == "queue")


@pytest.mark.parametrize(("name", "cache"), [("grammar", "miss"), ("grammar and too long", "hit")])
def test_the_grammar_is_compiled_within_the_span_of_tokenize(accounts: Accounts, name: str, cache: str) -> None:
    record = accounts.records[name]
    spans = accounts.spans[record.trace.trace_id.to_bytes(16)]
    ((phase, event),) = [
        (name, event) for name, span in spans.items() for event in span.events if event.name == "grammar_compiled"
    ]
    details = {attribute.key.removeprefix(names.EVENT_PREFIX): attribute.value for attribute in event.attributes}
    compile_ns = record.account.grammar_compile_ns
    assert (phase, record.account.grammar_kind) == ("tokenize", "regex")
    assert (details["kind"].string_value, details["cache"].string_value) == ("regex", cache)
    assert details["compile_ns"].int_value == compile_ns
    assert spans["tokenize"].start_time_unix_nano + compile_ns <= event.time_unix_nano
    assert event.time_unix_nano <= spans["tokenize"].end_time_unix_nano


def test_there_are_no_other_spans_and_all_attributes_are_documented(accounts: Accounts) -> None:
    assert accounts.spans.keys() == {record.trace.trace_id.to_bytes(16) for record in accounts.records.values()}
    spans = [span for of_request in accounts.spans.values() for span in of_request.values()]
    events = [event for span in spans for event in span.events]
    assert {"first_token", "finished"} <= {event.name for event in events} <= set(EventKind)
    for item in (*spans, *events):
        assert {attribute.key for attribute in item.attributes} <= ATTRIBUTES
