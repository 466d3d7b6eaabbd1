"""Tests that the record of a request, its spans and what it adds to the histograms are the same nanoseconds.

Server, engine and telemetry are real. The runner is scripted, and the spans are sent to a collector.
"""

from __future__ import annotations

import math
import queue
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.engine.sequence import Sequence
from oaiserve.facts.record import EventKind, Outcome, RequestRecord
from oaiserve.facts.times import PHASES
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
    """The records, spans and increases of histograms of one client's requests."""

    records: list[RequestRecord]
    spans: dict[int, dict[str, Span]]  # by trace id, then by name
    gained: Counter[tuple[str, ...]]  # sums and counts of the histograms, after minus before
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
    gained: dict[Client, Counter[tuple[str, ...]]] = {}
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
                before = scrape(http)
                client(http)
                records[client] = [telemetry.records.get(timeout=60) for _ in range(NUM_REQUESTS[client])]
                assert telemetry.flush(10)
                gained[client] = scrape(http)
                gained[client].subtract(before)
        # The server has stopped, so all spans have been exported.
    assert telemetry.records.empty()
    newest = telemetry.recent.list()[0]
    (its_record,) = [r for rs in records.values() for r in rs if r.request_id == newest["request_id"]]
    offset_ns = newest["received_unix_ns"] - its_record.times.received
    spans: dict[int, dict[str, Span]] = {}
    for span in collector.spans:
        spans.setdefault(int.from_bytes(span.trace_id), {})[span.name] = span
    return {client: Accounted(records[client], spans, gained[client], offset_ns) for client in CLIENTS}


def scrape(http: httpx.Client) -> Counter[tuple[str, ...]]:
    """Return the sums and counts of the histograms of requests, by (name, outcome, operation, phase)."""
    histograms = {
        names.PHASE_SECONDS.name,
        names.DURATION_SECONDS.name,
        names.TIME_TO_FIRST_TOKEN_SECONDS.name,
        names.TIME_PER_OUTPUT_TOKEN_SECONDS.name,
    }
    values: Counter[tuple[str, ...]] = Counter()
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if family.name in histograms and sample.name.endswith(("_sum", "_count")):
                labels = (sample.labels[name] for name in ("outcome", "operation"))
                values[sample.name, *labels, sample.labels.get("phase", "")] = sample.value  # type: ignore[assignment]
    return values


@pytest.fixture(params=CLIENTS, ids=lambda client: client.__name__)
def accounted(request: pytest.FixtureRequest, accounts: dict[Client, Accounted]) -> Accounted:
    return accounts[request.param]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_every_request_has_one_record_with_its_outcome(accounts: dict[Client, Accounted], client: Client) -> None:
    assert [record.outcome for record in accounts[client].records] == [OUTCOMES[client]] * NUM_REQUESTS[client]


def test_the_requests_of_each_client_ended_in_the_intended_phase(accounts: dict[Client, Accounted]) -> None:
    def last_phases(client: Client) -> list[str]:
        return [record.times.phases()[-1].name for record in accounts[client].records]

    assert last_phases(finish) == ["respond", "respond", "respond"]
    assert last_phases(leave) == ["decode"]
    assert last_phases(be_rejected) == ["receive", "tokenize", "tokenize", "tokenize"]
    assert last_phases(fail) == ["decode", "decode"]
    assert [record.http_status for record in accounts[fail].records] == [500, 200]


def test_the_phases_of_every_record_are_contiguous_and_add_up_to_the_nanosecond(accounted: Accounted) -> None:
    for record in accounted.records:
        phases = record.times.phases()
        assert tuple(phase.name for phase in phases) == PHASES[: len(phases)]
        assert all(left.end_ns == right.start_ns for left, right in pairwise(phases))
        assert all(phase.duration_ns >= 0 for phase in phases)
        assert (phases[0].start_ns, phases[-1].end_ns) == (record.times.received, record.times.responded)
        assert sum(phase.duration_ns for phase in phases) == record.times.duration_ns


def test_spans_have_the_times_of_the_records_plus_one_offset(accounted: Accounted) -> None:
    for record in accounted.records:
        spans = accounted.spans[record.trace.trace_id].copy()
        for name, start_ns, end_ns in record.times.phases():
            span = spans.pop(name)
            assert (span.start_time_unix_nano, span.end_time_unix_nano) == (
                start_ns + accounted.offset_ns,
                end_ns + accounted.offset_ns,
            )
        whole = (record.times.received + accounted.offset_ns, record.times.responded + accounted.offset_ns)
        assert [(span.start_time_unix_nano, span.end_time_unix_nano) for span in spans.values()] == [whole, whole]
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


def test_the_histograms_gained_exactly_what_the_records_contain(accounted: Accounted) -> None:
    expected: Counter[tuple[str, ...]] = Counter()

    def observe(metric: names.Metric, record: RequestRecord, value_ns: float | None, phase: str = "") -> None:
        if value_ns is not None:
            labels = (record.outcome, record.operation, phase)
            expected[f"{metric.name}_sum", *labels] += value_ns / 1e9  # type: ignore[assignment]
            expected[f"{metric.name}_count", *labels] += 1

    for record in accounted.records:
        for phase in record.times.phases():
            observe(names.PHASE_SECONDS, record, phase.duration_ns, phase.name)
        observe(names.DURATION_SECONDS, record, record.times.duration_ns)
        observe(names.TIME_TO_FIRST_TOKEN_SECONDS, record, record.times.time_to_first_token_ns)
        per_choice = record.completion_tokens // max(1, record.account.num_choices)
        if per_choice > 1:
            tpot_ns = record.times.time_per_output_token_ns(per_choice)
            observe(names.TIME_PER_OUTPUT_TOKEN_SECONDS, record, tpot_ns)
    gained = {key: value for key, value in accounted.gained.items() if value}
    assert gained.keys() == {key for key, value in expected.items() if value}
    for key, value in gained.items():
        assert math.isclose(value, expected[key], rel_tol=1e-9, abs_tol=1e-12)


def test_there_are_no_other_spans(accounts: dict[Client, Accounted], collector: Collector) -> None:
    records = [record for account in accounts.values() for record in account.records]
    assert {span.trace_id for span in collector.spans} == {r.trace.trace_id.to_bytes(16) for r in records}
    assert len(collector.spans) == sum(len(record.times.phases()) + 2 for record in records)


def test_every_attribute_of_a_real_request_is_documented(collector: Collector, accounts: object) -> None:
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
