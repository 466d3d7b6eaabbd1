"""Tests that the record of a request and its spans are the same nanoseconds, however the request ends.

Server, engine and telemetry are real. The runner is scripted, and the spans are sent to a collector.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.engine.sequence import Sequence
from oaiserve.facts.record import EventKind, Outcome, RequestRecord
from oaiserve.telemetry import Measured, Telemetry, names
from tests.engine.doubles import ScriptedRunner, make_engine, next_letter
from tests.routes.conftest import run_server
from tests.telemetry.collector import Collector, running_collector

FAILING_SEED = 13


def token_of(sequence: Sequence) -> int | str:
    """The alphabet, and an error for the third token of a request with the failing seed."""
    fails = sequence.params.seed == FAILING_SEED and sequence.num_generated == 2
    return "The model produced no usable numbers." if fails else next_letter(sequence)


class TappedTelemetry(Telemetry):
    """The real telemetry, which also puts the records into a queue for the test."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(Measured("demo", "1", engine.snapshot), recent_requests=9)
        self.records: queue.Queue[RequestRecord] = queue.Queue()

    def record(self, record: RequestRecord) -> None:
        super().record(record)
        self.records.put(record)


@dataclass
class Accounted:
    """The records and spans of one client's requests."""

    records: list[RequestRecord]
    spans: dict[int, dict[str, Span]]  # by trace id, then by name
    offset_ns: int  # wall clock minus monotonic clock


LETTERS = {"regex": "[a-z]*"}  # what the runner draws


def finish(http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "n": 2, "max_tokens": 7})
    http.post("/v1/completions", json={"prompt": "Hi", "stream": True, "max_tokens": 1})
    http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3, "structured_outputs": LETTERS})


def be_rejected(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "Hi", "temperature": 3})  # by the routes
    http.post("/v1/completions", json={"prompt": "Hi" * 1000, "max_tokens": 10**9})  # once it is tokenized
    http.post("/v1/completions", json={"prompt": "Hi", "structured_outputs": {"regex": "("}})  # by the compiler
    http.post("/v1/completions", json={"prompt": "Hi" * 1000, "max_tokens": 10**9, "structured_outputs": LETTERS})


def fail(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "Hi", "seed": FAILING_SEED})  # with a 500
    http.post("/v1/completions", json={"prompt": "Hi", "seed": FAILING_SEED, "stream": True})  # within the stream


def leave(http: httpx.Client) -> None:
    """Disconnect in the middle of a stream that would otherwise last for a minute."""
    with http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True, "max_tokens": 500_000}) as answer:
        next(answer.iter_raw())


CLIENTS = (finish, leave, be_rejected, fail)
NUM_REQUESTS = {finish: 3, leave: 1, be_rejected: 4, fail: 2}
OUTCOMES = {finish: Outcome.FINISHED, leave: Outcome.CANCELLED, be_rejected: Outcome.REJECTED, fail: Outcome.FAILED}
Client = Callable[[httpx.Client], None]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def accounts(collector: Collector) -> dict[Client, Accounted]:
    """Run the clients one after the other, and return what became of their requests."""
    records: dict[Client, list[RequestRecord]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("NO_PROXY", "127.0.0.1")
        engine = make_engine(ScriptedRunner(token_of), kv_blocks=150_000)
        telemetry = TappedTelemetry(engine)
        with (
            run_server(create_app(Config("demo"), engine, telemetry)) as url,
            httpx.Client(base_url=url, timeout=30) as http,
        ):
            for client in CLIENTS:
                client(http)
                records[client] = [telemetry.records.get(timeout=60) for _ in range(NUM_REQUESTS[client])]
        # The server has stopped, so all spans have been exported.
    assert telemetry.records.empty()
    newest = telemetry.recent.list()[0]
    (its_record,) = [r for rs in records.values() for r in rs if r.request_id == newest["request_id"]]
    offset_ns = newest["received_unix_ns"] - its_record.times.received
    spans: dict[int, dict[str, Span]] = {}
    for span in collector.spans:
        spans.setdefault(int.from_bytes(span.trace_id), {})[span.name] = span
    return {client: Accounted(records[client], spans, offset_ns) for client in CLIENTS}


@pytest.mark.parametrize(
    ("client", "last_phases", "statuses"),
    [
        (finish, ["respond", "respond", "respond"], [200, 200, 200]),
        (leave, ["decode"], [200]),
        (be_rejected, ["receive", "tokenize", "tokenize", "tokenize"], [400, 400, 400, 400]),
        (fail, ["decode", "decode"], [500, 200]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_request_has_one_record_with_its_outcome_and_last_phase(
    accounts: dict[Client, Accounted], client: Client, last_phases: list[str], statuses: list[int]
) -> None:
    records = accounts[client].records
    assert [record.outcome for record in records] == [OUTCOMES[client]] * NUM_REQUESTS[client]
    assert [record.times.phases()[-1].name for record in records] == last_phases
    assert [record.http_status for record in records] == statuses


@pytest.fixture(params=CLIENTS, ids=lambda client: client.__name__)
def accounted(request: pytest.FixtureRequest, accounts: dict[Client, Accounted]) -> Accounted:
    return accounts[request.param]


def test_spans_have_the_times_of_the_records_plus_one_offset(accounted: Accounted) -> None:
    for record in accounted.records:
        assert all(phase.duration_ns >= 0 for phase in record.times.phases())
        spans = accounted.spans[record.trace.trace_id].copy()
        for name, start_ns, end_ns in record.times.phases():
            span = spans.pop(name)
            assert (span.start_time_unix_nano, span.end_time_unix_nano) == (
                start_ns + accounted.offset_ns,
                end_ns + accounted.offset_ns,
            )
        assert spans.keys() == {f"POST {record.http_route}", f"{record.operation} {record.model}"}


@pytest.mark.parametrize(("client", "cache"), [(finish, "miss"), (be_rejected, "hit")], ids=["finish", "be_rejected"])
def test_the_grammar_is_compiled_within_the_span_of_tokenize(
    accounts: dict[Client, Accounted], client: Client, cache: str
) -> None:
    record = accounts[client].records[-1]
    spans = accounts[client].spans[record.trace.trace_id]
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


def test_there_are_no_other_spans_and_all_attributes_are_documented(
    collector: Collector, accounts: dict[Client, Accounted]
) -> None:
    records = [record for account in accounts.values() for record in account.records]
    assert {span.trace_id for span in collector.spans} == {r.trace.trace_id.to_bytes(16) for r in records}
    assert len(collector.spans) == sum(len(record.times.phases()) + 2 for record in records)
    events = [event for span in collector.spans for event in span.events]
    assert {"first_token", "finished"} <= {event.name for event in events} <= set(EventKind)
    for item in (*collector.spans, *events):
        assert {attribute.key for attribute in item.attributes} <= names.ATTRIBUTES


def test_the_causes_of_prefill_and_decode_add_up_to_them(accounted: Accounted) -> None:
    for record in accounted.records:
        durations_ns = {phase.name: phase.duration_ns for phase in record.times.phases()}
        assert {name: sum(parts.values()) for name, parts in record.causes_ns.items()} == {
            name: durations_ns[name] for name in record.causes_ns
        }
        times, account = record.times, record.account
        if times.scheduled is not None and times.last_token is not None:  # the engine accounts for all of it
            parts = (*account.prefill_causes_ns.values(), *account.decode_causes_ns.values())
            assert sum(parts) == times.last_token - times.scheduled


def test_the_reasons_for_waiting_add_up_to_the_queue_phase(accounted: Accounted) -> None:
    for record in accounted.records:
        queue_ns = sum(phase.duration_ns for phase in record.times.phases() if phase.name == "queue")
        assert sum(record.account.waits_ns.values()) == queue_ns
