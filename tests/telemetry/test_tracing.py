"""Spans have the ids and integers of the record, and are contiguous."""

from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind, StatusCode

from oaiserve.errors import StartupError
from oaiserve.facts.record import EngineAccount, Outcome
from oaiserve.facts.times import TEXT_PHASES
from oaiserve.facts.trace import TraceContext
from oaiserve.facts.turn import Turn, TurnPrompt
from oaiserve.telemetry import names
from tests.telemetry.exported import OFFSET_NS, spans_of, traced, tracing_to


def test_the_tree_is_server_then_operation_then_phases(make_record) -> None:
    server, inner, *phases = spans_of(make_record())
    assert (server.name, server.kind, server.parent) == ("POST /v1/chat/completions", SpanKind.SERVER, None)
    assert (inner.name, inner.kind, inner.parent) == ("chat demo", SpanKind.INTERNAL, server.context)
    assert all(span.parent == inner.context for span in phases)
    assert {span.instrumentation_scope for span in (server, inner, *phases)} == {
        InstrumentationScope("oaiserve", "1.2.3", names.GEN_AI_SCHEMA)
    }
    assert server.resource.attributes.items() >= {"service.name": "oaiserve", "service.version": "1.2.3"}.items()


def test_the_server_span_has_the_records_ids_and_the_others_their_own(make_record) -> None:
    server, *others = spans_of(make_record(trace=TraceContext(trace_id=0xABC, span_id=0xDEF)))
    assert (server.context.trace_id, server.context.span_id) == (0xABC, 0xDEF)
    assert {span.context.trace_id for span in others} == {0xABC}
    assert len({span.context.span_id for span in (server, *others)}) == 9


def test_the_clients_trace_is_continued(make_record) -> None:
    trace = TraceContext.from_headers("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=1")
    server, *_ = spans_of(make_record(trace=trace), ParentBased(ALWAYS_OFF))
    assert server.parent.span_id == 0x00F067AA0BA902B7
    assert server.parent.is_remote
    assert (server.context.trace_id, server.context.span_id) == (trace.trace_id, trace.span_id)
    assert server.context.trace_state.get("vendor") == "1"


def test_a_request_whose_client_does_not_sample_is_not_exported_and_the_next_has_its_own_ids(make_record) -> None:
    trace = TraceContext(trace_id=1, span_id=2, parent_span_id=3, parent_sampled=False)
    following = make_record(trace=TraceContext(trace_id=4, span_id=5))
    spans = traced(make_record(trace=trace), following, sampler=ParentBased(ALWAYS_ON))
    assert {span.context.trace_id for span in spans} == {4}
    assert spans[-1].context.span_id == 5


def test_spans_of_each_request_have_the_time_of_day_at_its_end(make_record) -> None:
    """As on a laptop that was asleep between two requests, and for a clock that was set while a server ran."""
    exporter = InMemorySpanExporter()
    offsets_ns = [5 * 10**9, 9 * 10**9]
    tracing = tracing_to(exporter, sampler=ALWAYS_ON, epoch_offset_ns=lambda: offsets_ns.pop(0))
    record = make_record()
    for _ in range(2):
        tracing.record(record)
    assert tracing.close(60)
    spans = exporter.get_finished_spans()
    first = spans[: len(spans) // 2]
    second = spans[len(spans) // 2 :]
    assert first[-1].start_time == record.times.received + 5 * 10**9
    assert [b.start_time - a.start_time for a, b in zip(first, second, strict=True)] == [4 * 10**9] * len(first)
    assert [b.end_time - a.end_time for a, b in zip(first, second, strict=True)] == [4 * 10**9] * len(first)


@pytest.mark.parametrize("sampler", ["always_on", "always_off", "traceidratio", "parentbased_traceidratio"])
def test_what_is_said_to_be_sampled_is_what_is_exported(sampler: str, make_record, monkeypatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    exporter = InMemorySpanExporter()
    tracing = tracing_to(exporter)
    clients = ({}, {"parent_span_id": 5, "parent_sampled": True}, {"parent_span_id": 5, "parent_sampled": False})
    traces = [
        TraceContext(trace_id=1 + number * 2**58, span_id=100 + 3 * number + kind, **client)
        for number in range(64)
        for kind, client in enumerate(clients)
    ]
    for trace in traces:
        tracing.record(make_record(trace=trace))
    assert tracing.close(60)
    exported = {span.context.span_id for span in exporter.get_finished_spans()}
    assert [tracing.is_sampled(trace) for trace in traces] == [trace.span_id in exported for trace in traces]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, "OTEL_TRACES_SAMPLER must be one of always_on, .* but is sometimes"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "few"}, "between 0 and 1 but is few"),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "10"}, "but is 10"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "OTEL_BSP_MAX_QUEUE_SIZE"),
        ({"OTEL_SPAN_EVENT_COUNT_LIMIT": "many"}, "OTEL_SPAN_EVENT_COUNT_LIMIT"),
    ],
)
def test_an_invalid_variable_is_refused(variables: dict[str, str], message: str, monkeypatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, StartupError), match=message):
        tracing_to(InMemorySpanExporter())


@pytest.mark.parametrize(
    ("outcome", "http_status", "error_type", "status"),
    [
        (Outcome.FINISHED, 200, None, StatusCode.UNSET),
        (Outcome.CANCELLED, None, None, StatusCode.UNSET),
        (Outcome.REJECTED, 400, "InvalidRequest", StatusCode.UNSET),
        (Outcome.REJECTED, 503, "Unavailable", StatusCode.ERROR),
        (Outcome.FAILED, 500, "InternalError", StatusCode.ERROR),
        (Outcome.FAILED, 200, "InternalError", StatusCode.ERROR),  # a stream that had begun
    ],
)
def test_each_outcome_has_its_status(outcome, http_status, error_type, status, make_record) -> None:
    server, inner, *_ = spans_of(make_record(outcome=outcome, http_status=http_status, error_type=error_type))
    assert server.status.status_code is inner.status.status_code is status
    assert server.attributes["oaiserve.outcome"] == outcome
    assert server.attributes.get("http.response.status_code") == http_status
    assert server.attributes.get("error.type") == inner.attributes.get("error.type") == error_type


ROUTED = {"oaiserve.routing.replica": "r", "oaiserve.routing.expected_hit_tokens": 64}
ADDRESS = {"server.address": "10.0.0.7", "server.port": 8000}
PARAMS = {"top_p": 0.5, "max_completion_tokens": 9, "min_p": 0.1}


@pytest.mark.parametrize(
    ("changes", "on_server", "on_operation"),
    [
        ({"client": "alice"}, {"oaiserve.client": "alice"}, {"oaiserve.client": "alice"}),
        ({"routing": {"replica": "r", "expected_hit_tokens": 64}}, ROUTED, ROUTED),
        ({"server_address": "10.0.0.7", "server_port": 8000}, ADDRESS, ADDRESS),
        ({"server_port": 8000, "http_scheme": "https"}, {"url.scheme": "https"}, {}),  # no port without its address
        (
            {"response_id": "resp_2", "conversation_id": "resp_1"},
            {},
            {"gen_ai.response.id": "resp_2", "gen_ai.conversation.id": "resp_1"},
        ),
        ({"account": EngineAccount(num_events_dropped=3)}, {}, {"oaiserve.events_dropped": 3}),
        (
            {"account": EngineAccount(grammar_kind="json_schema", num_masked_draws=3, num_forced_tokens=2)},
            {},
            {
                "oaiserve.grammar.kind": "json_schema",
                "oaiserve.grammar.masked_draws": 3,
                "oaiserve.grammar.forced_tokens": 2,
                "gen_ai.output.type": "json",
            },
        ),
        (
            {"account": EngineAccount(grammar_kind="regex")},
            {},
            {"oaiserve.grammar.kind": "regex", "oaiserve.grammar.masked_draws": 0, "oaiserve.grammar.forced_tokens": 0},
        ),
        (
            {"stream": True, "params": PARAMS},
            {},
            {
                "gen_ai.request.stream": True,
                "gen_ai.response.time_to_first_chunk": 0.063450054,
                "gen_ai.request.top_p": 0.5,
                "gen_ai.request.max_tokens": 9,
                "oaiserve.request.min_p": 0.1,
            },
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_fact_is_on_the_spans_that_it_belongs_to(
    changes: dict[str, Any], on_server: dict[str, Any], on_operation: dict[str, Any], make_record
) -> None:
    common = {"oaiserve.request.id": "req-1", "oaiserve.outcome": "finished", names.DURATION_NS: 463_999_992}
    server, inner, *phases = (dict(span.attributes) for span in spans_of(make_record(**{"params": {}} | changes)))
    assert server == common | {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "http.response.status_code": 200,
        **on_server,
    }
    assert inner == common | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "oaiserve",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.output.type": "text",
        **on_operation,
    }
    assert [attributes.keys() for attributes in phases] == [{names.DURATION_NS}] * len(TEXT_PHASES)


def test_the_operation_span_has_the_steps(make_record, account) -> None:
    record = make_record(account=account)
    computed_ns = sum(phase.duration_ns for phase in record.times.phases() if phase.name in ("prefill", "decode"))
    attributes = spans_of(record)[1].attributes
    prefix = "oaiserve.steps."
    assert {name.removeprefix(prefix): value for name, value in attributes.items() if name.startswith(prefix)} == {
        "first": 100,
        "count": 8,
        "mean_sequences": 2.5,
        "mean_tokens": 7.5,
        "model_ns": account.model_ns,
        "between_ns": computed_ns - account.model_ns,
    }


def test_events_are_on_the_span_of_the_phase_they_happened_in(make_record, account, constrained) -> None:
    account.events[:0] = constrained.events
    _, _, *phases = spans_of(make_record(account=account))
    happened = {span.name: [(event.name, dict(event.attributes)) for event in span.events] for span in phases}
    p = "oaiserve.event."
    compiled = {f"{p}compile_ns": 2_000_003, f"{p}cache": "miss", f"{p}kind": "json_schema"}
    assert {name: events for name, events in happened.items() if events} == {
        "tokenize": [("grammar_compiled", compiled)],
        "prefill": [
            ("prefix_cache_hit", {f"{p}choice": 0, f"{p}tokens": 2}),
            ("prefill_chunk", {f"{p}choice": 0, f"{p}start": 2, f"{p}tokens": 5, f"{p}number": 1, f"{p}total": 2}),
            ("prefill_chunk", {f"{p}choice": 0, f"{p}start": 7, f"{p}tokens": 3, f"{p}number": 2, f"{p}total": 2}),
            ("first_token", {f"{p}choice": 0}),
        ],
        "decode": [
            ("preempted", {f"{p}choice": 1, f"{p}tokens": 9}),
            ("resumed", {f"{p}choice": 1, f"{p}cached_tokens": 4, f"{p}stalled_ns": 50_000_000}),
            ("finished", {f"{p}choice": 0, f"{p}reason": "stop"}),
        ],
    }
    stamps = [event.timestamp - OFFSET_NS for span in phases for event in span.events]
    assert stamps == [event.at_ns for event in account.events]


def test_chunks_have_no_total_if_events_were_dropped(make_record, account) -> None:
    account.num_events_dropped = 3
    _, _, *phases = spans_of(make_record(account=account))
    chunks = [event for span in phases for event in span.events if event.name == "prefill_chunk"]
    assert [event.attributes["oaiserve.event.number"] for event in chunks] == [1, 2]
    # A dropped event may have been a chunk.
    assert not any("oaiserve.event.total" in event.attributes for event in chunks)


def test_the_limits_of_the_sdk_are_applied(make_record, account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "3")
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "2")
    monkeypatch.setenv("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "1")
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "4")
    server, inner, *phases = spans_of(make_record(account=account, request_id="a-long-one"))
    spans = (server, inner, *phases)
    assert [len(span.attributes) for span in spans[:2]] == [3, 3]
    assert all(span.dropped_attributes for span in spans[:2])
    assert [(len(span.events), span.dropped_events) for span in phases if span.events] == [(2, 2), (2, 1)]
    events = [event for span in phases for event in span.events]
    assert [len(event.attributes) for event in events] == [1] * 4
    assert all(len(value) <= 4 for span in spans for value in span.attributes.values() if isinstance(value, str))


def test_turns_of_a_run_are_linked_by_agent(make_record) -> None:
    def turn(number: int, agent: str = "") -> object:
        place = Turn("run_1", True, agent, 0, lambda: TurnPrompt("thread", False, "digest", (), {}))
        return make_record(trace=TraceContext(number, number), turn=place)

    spans = traced(turn(1), turn(2, "agent_1"), turn(3), make_record(trace=TraceContext(4, 4)))
    inner = [span for span in spans if span.name == "chat demo"]
    assert [span.attributes.get("gen_ai.conversation.id") for span in inner] == [*["run_1"] * 3, None]
    assert [[link.context for link in span.links] for span in inner] == [[], [], [inner[0].context], []]
