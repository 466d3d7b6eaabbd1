"""Spans have the ids and integers of the record, and are contiguous."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from threading import Event

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import SpanKind, StatusCode

from oaiserve.errors import StartupError
from oaiserve.facts.record import EngineAccount, HostPart, Outcome, RequestRecord, StepKind, StepRecord, ToolCallOutcome
from oaiserve.facts.times import PHASES
from oaiserve.facts.trace import TraceContext
from oaiserve.telemetry import names
from oaiserve.telemetry.tracing import Tracing, exporter_from_environment

OFFSET_NS = 1_700_000_000_000_000_011
Export = Callable[..., list[ReadableSpan]]


@pytest.fixture
def export() -> Export:
    """Return a function that exports a record and returns its spans in the order server, operation, phases."""

    def spans_of(record: RequestRecord, sampler: Sampler = ALWAYS_ON) -> list[ReadableSpan]:
        exporter = InMemorySpanExporter()
        tracing = Tracing(
            exporter, epoch_offset_ns=OFFSET_NS, version="1.2.3", count_spans=lambda *_: None, sampler=sampler
        )
        tracing.record(record)
        assert tracing.close(5)
        *phases, inner, server = exporter.get_finished_spans() or (None, None)
        return [server, inner, *phases] if server else []

    return spans_of


def test_spans_carry_the_records_integers(export: Export, make_record) -> None:
    record = make_record()
    _, _, *phases = export(record)
    assert [(span.name, span.start_time - OFFSET_NS, span.end_time - OFFSET_NS) for span in phases] == list(
        record.times.phases()
    )
    assert [span.attributes[names.DURATION_NS] for span in phases] == [p.duration_ns for p in record.times.phases()]


@pytest.mark.parametrize("num_stamps", range(1, 8))
def test_phase_spans_are_contiguous_wherever_the_request_ended(num_stamps: int, export: Export, make_record) -> None:
    server, inner, *phases = export(make_record(num_stamps, outcome=Outcome.CANCELLED, http_status=None))
    assert [span.name for span in phases] == list(PHASES[:num_stamps])
    assert all(left.end_time == right.start_time for left, right in pairwise(phases))
    whole = (phases[0].start_time, phases[-1].end_time)
    assert whole == (server.start_time, server.end_time) == (inner.start_time, inner.end_time)
    assert sum(span.attributes[names.DURATION_NS] for span in phases) == server.attributes[names.DURATION_NS]


def test_the_tree_is_server_then_operation_then_phases(export: Export, make_record) -> None:
    server, inner, *phases = export(make_record())
    assert (server.name, server.kind, server.parent) == ("POST /v1/chat/completions", SpanKind.SERVER, None)
    assert (inner.name, inner.kind, inner.parent) == ("chat demo", SpanKind.INTERNAL, server.context)
    assert all(span.parent == inner.context for span in phases)


def test_the_server_span_has_the_records_ids_and_the_others_their_own(export: Export, make_record) -> None:
    server, *others = export(make_record(trace=TraceContext(trace_id=0xABC, span_id=0xDEF)))
    assert (server.context.trace_id, server.context.span_id) == (0xABC, 0xDEF)
    assert {span.context.trace_id for span in others} == {0xABC}
    assert len({span.context.span_id for span in (server, *others)}) == 9


def test_the_clients_trace_is_continued(export: Export, make_record) -> None:
    trace = TraceContext.from_headers("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=1")
    server, *_ = export(make_record(trace=trace), ParentBased(ALWAYS_OFF))
    assert server.parent.span_id == 0x00F067AA0BA902B7
    assert server.parent.is_remote
    assert (server.context.trace_id, server.context.span_id) == (trace.trace_id, trace.span_id)
    assert server.context.trace_state.get("vendor") == "1"


def test_a_request_whose_client_does_not_sample_is_not_exported(export: Export, make_record) -> None:
    trace = TraceContext(trace_id=1, span_id=2, parent_span_id=3, parent_sampled=False)
    assert export(make_record(trace=trace), ParentBased(ALWAYS_ON)) == []


@pytest.mark.parametrize("sampler", ["always_on", "always_off", "traceidratio", "parentbased_traceidratio"])
def test_what_is_said_to_be_sampled_is_what_is_exported(sampler: str, make_record, monkeypatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, epoch_offset_ns=0, version="1", count_spans=lambda *_: None)
    clients = ({}, {"parent_span_id": 5, "parent_sampled": True}, {"parent_span_id": 5, "parent_sampled": False})
    traces = [
        TraceContext(trace_id=1 + number * 2**58, span_id=100 + 3 * number + kind, **client)
        for number in range(64)
        for kind, client in enumerate(clients)
    ]
    for trace in traces:
        tracing.record(make_record(trace=trace))
    assert tracing.close(5)
    exported = {span.context.span_id for span in exporter.get_finished_spans()}
    assert [tracing.is_sampled(trace) for trace in traces] == [trace.span_id in exported for trace in traces]


def test_the_standard_variable_chooses_the_sampler(make_record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, epoch_offset_ns=0, version="1", count_spans=lambda *_: None)
    tracing.record(make_record())
    assert tracing.close(5)
    assert exporter.get_finished_spans() == ()


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
    with pytest.raises(ValueError, match=message):
        Tracing(InMemorySpanExporter(), epoch_offset_ns=0, version="1", count_spans=lambda *_: None)


def test_an_unsampled_request_does_not_affect_the_ids_of_the_next(make_record) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(
        exporter, epoch_offset_ns=0, version="1", count_spans=lambda *_: None, sampler=ParentBased(ALWAYS_ON)
    )
    tracing.record(make_record(trace=TraceContext(trace_id=1, span_id=2, parent_span_id=3)))
    tracing.record(make_record(trace=TraceContext(trace_id=4, span_id=5)))
    assert tracing.close(5)
    assert {span.context.trace_id for span in exporter.get_finished_spans()} == {4}
    assert exporter.get_finished_spans()[-1].context.span_id == 5


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
def test_each_outcome_has_its_status(outcome, http_status, error_type, status, export: Export, make_record) -> None:
    server, inner, *_ = export(make_record(outcome=outcome, http_status=http_status, error_type=error_type))
    assert server.status.status_code is inner.status.status_code is status
    assert server.attributes[names.OUTCOME] == outcome
    assert server.attributes.get(names.HTTP_RESPONSE_STATUS_CODE) == http_status
    assert server.attributes.get(names.ERROR_TYPE) == inner.attributes.get(names.ERROR_TYPE) == error_type


def test_the_operation_span_follows_the_genai_conventions(export: Export, make_record) -> None:
    record = make_record(stream=True, params={"temperature": 0.5, "max_completion_tokens": 9, "min_p": 0.1})
    attributes = export(record)[1].attributes
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.usage.input_tokens"] == 4
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["gen_ai.response.time_to_first_chunk"] == record.times.time_to_first_token_ns / 1e9
    assert attributes["gen_ai.request.max_tokens"] == 9
    assert attributes["oaiserve.request.min_p"] == 0.1


def test_the_operation_span_has_the_prompt_only_if_the_record_has_it(export: Export, make_record) -> None:
    text = '[{"role":"user","parts":[{"type":"text","content":"Hi"}]}]'
    server, inner, *phases = export(make_record(prompt_text=text))
    assert inner.attributes["gen_ai.input.messages"] == text
    assert not any("Hi" in str(span.attributes.values()) for span in (server, *phases))
    assert "gen_ai.input.messages" not in export(make_record())[1].attributes


def test_the_operation_span_names_the_conversation_if_there_is_one(export: Export, make_record) -> None:
    _, inner, *_ = export(make_record(operation="responses", response_id="resp_2", conversation_id="resp_1"))
    assert inner.name == "responses demo"
    assert inner.attributes["gen_ai.response.id"] == "resp_2"
    assert inner.attributes["gen_ai.conversation.id"] == "resp_1"
    assert "gen_ai.conversation.id" not in export(make_record())[1].attributes


def test_spans_have_the_server_address_if_it_is_known(export: Export, make_record) -> None:
    known = export(make_record(server_address="10.0.0.7", server_port=8000, http_scheme="https"))[:2]
    assert [(span.attributes["server.address"], span.attributes["server.port"]) for span in known] == [
        ("10.0.0.7", 8000)
    ] * 2
    assert known[0].attributes["url.scheme"] == "https"
    assert not any("server.address" in span.attributes for span in export(make_record()))


def test_the_queue_span_has_wait_reasons_and_the_operation_span_steps(export: Export, make_record, account) -> None:
    record = make_record(account=account)
    _, inner, *phases = export(record)
    (queue,) = (span for span in phases if span.name == "queue")
    waits = {"oaiserve.queue.step_under_way_ns": 14, "oaiserve.queue.batch_full_ns": 10_000_000}
    assert queue.attributes == waits | {names.DURATION_NS: 10_000_014}
    assert inner.attributes["oaiserve.steps.first"] == 100
    assert inner.attributes["oaiserve.steps.count"] == 8
    assert (inner.attributes["oaiserve.steps.mean_sequences"], inner.attributes["oaiserve.steps.mean_tokens"]) == (
        2.5,
        7.5,
    )
    computed_ns = sum(phase.duration_ns for phase in record.times.phases() if phase.name in ("prefill", "decode"))
    assert inner.attributes["oaiserve.steps.model_ns"] + inner.attributes["oaiserve.steps.between_ns"] == computed_ns
    assert (inner.attributes["oaiserve.preemptions"], inner.attributes["oaiserve.preemption_stall_ns"]) == (
        1,
        50_000_000,
    )


def test_events_are_on_the_span_of_the_phase_they_happened_in(export: Export, make_record, account) -> None:
    _, _, *phases = export(make_record(account=account))
    happened = {span.name: [(event.name, dict(event.attributes)) for event in span.events] for span in phases}
    p = "oaiserve.event."
    assert {name: events for name, events in happened.items() if events} == {
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


def test_a_grammar_is_an_event_of_tokenize_and_its_tokens_are_on_the_operation(
    export: Export, make_record, constrained
) -> None:
    _, inner, *phases = export(make_record(account=constrained))
    events = {span.name: [(event.name, dict(event.attributes)) for event in span.events] for span in phases}
    told = {"compile_ns": 2_000_003, "cache": "miss", "kind": "json_schema"}
    compiled = {f"oaiserve.event.{name}": value for name, value in told.items()}
    assert {name: found for name, found in events.items() if found} == {"tokenize": [("grammar_compiled", compiled)]}
    assert {name: value for name, value in inner.attributes.items() if name.startswith("oaiserve.grammar")} == {
        "oaiserve.grammar.kind": "json_schema",
        "oaiserve.grammar.masked_draws": 3,
        "oaiserve.grammar.forced_tokens": 2,
    }
    other = export(make_record())[1].attributes
    assert not any(name.startswith("oaiserve.grammar") for name in other)


@pytest.mark.parametrize(
    ("kind", "output_type"), [("json_schema", "json"), ("json_object", "json"), ("regex", "text"), (None, "text")]
)
def test_the_type_of_the_output_is_what_was_asked_for(kind, output_type, export: Export, make_record) -> None:
    _, inner, *_ = export(make_record(account=EngineAccount(grammar_kind=kind)))
    assert inner.attributes["gen_ai.output.type"] == output_type


def test_the_operation_span_has_the_tool_calls_by_outcome(export: Export, make_record) -> None:
    calls = {ToolCallOutcome.CALLED: 2, ToolCallOutcome.UNPARSED: 1}
    _, inner, *_ = export(make_record(tool_calls=calls))
    assert (inner.attributes["oaiserve.tool_calls.called"], inner.attributes["oaiserve.tool_calls.unparsed"]) == (2, 1)
    assert not set(names.NUM_TOOL_CALLS.values()) & export(make_record())[1].attributes.keys()


def step_of(number: int, **of_device: int) -> StepRecord:
    host_ns = {part: 10 * index + 1 for index, part in enumerate(HostPart)}
    return StepRecord(
        StepKind.MIXED, 1_000, 500, 20, 3, 40, number=number, host_ns=host_ns, num_masked_draws=2, **of_device
    )


def traced_steps(*steps: StepRecord, share: float = 1.0, sampler: Sampler = ALWAYS_ON) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(
        exporter,
        epoch_offset_ns=OFFSET_NS,
        version="1",
        count_spans=lambda *_: None,
        sampler=sampler,
        step_share=share,
    )
    for step in steps:
        tracing.record_step(step)
    assert tracing.close(5)
    return list(exporter.get_finished_spans())


def test_a_step_is_a_trace_of_one_span_with_both_sides_of_its_time() -> None:
    (span,) = traced_steps(step_of(7, device_ns=450, device_gap_ns=30))
    assert (span.name, span.kind, span.parent) == ("engine step", SpanKind.INTERNAL, None)
    assert (span.start_time - OFFSET_NS, span.end_time - OFFSET_NS) == (1_000, 1_500)
    assert span.attributes == {
        "oaiserve.step.number": 7,
        "oaiserve.step.kind": "mixed",
        "oaiserve.step.sequences": 3,
        "oaiserve.step.tokens": 40,
        "oaiserve.step.masked_draws": 2,
        "oaiserve.step.idle_ns": 20,
        "oaiserve.step.device_busy_ns": 450,
        "oaiserve.step.device_gap_ns": 30,
        **{f"oaiserve.step.host.{part}_ns": 10 * index + 1 for index, part in enumerate(HostPart)},
        names.DURATION_NS: 500,
    }


def test_a_step_on_a_device_without_a_clock_has_no_device_times() -> None:
    (span,) = traced_steps(step_of(0))
    assert not {"oaiserve.step.device_busy_ns", "oaiserve.step.device_gap_ns"} & span.attributes.keys()


def test_steps_are_traced_by_their_share_and_by_the_sampler() -> None:
    steps = [step_of(number) for number in range(2000)]
    assert traced_steps(*steps, share=0) == []
    assert traced_steps(*steps[:50], sampler=ALWAYS_OFF) == []
    assert 50 < len(traced_steps(*steps, share=0.1)) < 400
    traces = {span.context.trace_id for span in traced_steps(*steps[:50])}
    assert len(traces) == 50


def test_a_request_links_to_the_steps_that_it_took_part_in(make_record) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(
        exporter, epoch_offset_ns=0, version="1", count_spans=lambda *_: None, sampler=ALWAYS_ON, step_share=1
    )
    for number in range(8):
        tracing.record_step(step_of(number))
    tracing.record(make_record(account=EngineAccount(first_step=3, num_steps=4)))
    tracing.record(make_record(1))  # this request was in no step
    assert tracing.close(5)
    spans = exporter.get_finished_spans()
    numbers = {
        span.context.span_id: span.attributes["oaiserve.step.number"] for span in spans if span.name == "engine step"
    }
    linked = [[numbers[link.context.span_id] for link in span.links] for span in spans if span.name == "chat demo"]
    assert linked == [[3, 4, 5, 6], []]
    assert not any(span.links for span in spans if span.name != "chat demo")


def test_dropped_events_are_counted_and_chunks_then_have_no_total(export: Export, make_record, account) -> None:
    account.num_events_dropped = 3
    _, inner, *phases = export(make_record(account=account))
    assert inner.attributes["oaiserve.events_dropped"] == 3
    chunks = [event for span in phases for event in span.events if event.name == "prefill_chunk"]
    assert [event.attributes["oaiserve.event.number"] for event in chunks] == [1, 2]
    assert not any(
        "oaiserve.event.total" in event.attributes for event in chunks
    )  # a dropped event may have been a chunk


def test_an_aborted_request_keeps_its_events_in_the_phase_it_was_in(export: Export, make_record, account) -> None:
    _, _, *phases = export(make_record(4, account=account, outcome=Outcome.CANCELLED))
    assert [len(span.events) for span in phases] == [0, 0, 0, 7]


def test_both_outer_spans_name_the_key_if_there_was_one(export: Export, make_record) -> None:
    server, inner, *_ = export(make_record(client="alice"))
    assert server.attributes[names.CLIENT] == inner.attributes[names.CLIENT] == "alice"
    assert names.CLIENT not in export(make_record())[0].attributes


def test_both_outer_spans_say_why_a_router_chose_this_replica(export: Export, make_record) -> None:
    server, inner, *_ = export(make_record(routing={"replica": "r", "expected_hit_tokens": 64}))
    for span in (server, inner):
        assert span.attributes["oaiserve.routing.replica"] == "r"
        assert span.attributes["oaiserve.routing.expected_hit_tokens"] == 64


def test_the_limits_of_the_sdk_are_applied(
    export: Export, make_record, account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "3")
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "2")
    monkeypatch.setenv("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "1")
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "4")
    server, inner, *phases = export(make_record(account=account, request_id="a-long-one"))
    spans = (server, inner, *phases)
    assert [len(span.attributes) for span in spans[:2]] == [3, 3]
    assert all(span.dropped_attributes for span in spans[:2])
    assert [(len(span.events), span.dropped_events) for span in phases if span.events] == [(2, 2), (2, 1)]
    events = [event for span in phases for event in span.events]
    assert [len(event.attributes) for event in events] == [1] * 4
    assert all(len(value) <= 4 for span in spans for value in span.attributes.values() if isinstance(value, str))


def test_spans_are_equal_after_encoding_and_decoding(export: Export, make_record, account) -> None:
    """The spans are encoded by the real encoder of OTLP."""
    trace = TraceContext(trace_id=0xABC, span_id=0xDEF, parent_span_id=0x123, parent_sampled=True, tracestate="v=1")
    record = make_record(account=account, trace=trace, outcome=Outcome.FAILED, http_status=500, error_type="Odd")
    spans = export(record)
    (resource,) = ExportTraceServiceRequest.FromString(encode_spans(spans).SerializeToString()).resource_spans
    assert plain(resource.resource.attributes)["service.name"] == "oaiserve"
    (scope,) = resource.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("oaiserve", "1.2.3")
    for span, sent in zip(spans, scope.spans, strict=True):
        assert (sent.name, sent.trace_id, sent.trace_state) == (span.name, (0xABC).to_bytes(16), "v=1")
        assert sent.span_id == span.context.span_id.to_bytes(8)
        assert sent.parent_span_id == span.parent.span_id.to_bytes(8)
        assert (sent.start_time_unix_nano, sent.end_time_unix_nano) == (span.start_time, span.end_time)
        assert plain(sent.attributes) == dict(span.attributes)
        assert [(e.name, e.time_unix_nano, plain(e.attributes)) for e in sent.events] == [
            (e.name, e.timestamp, dict(e.attributes)) for e in span.events
        ]
        assert bool(sent.flags & SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK) == (span is spans[0])
    assert [sent.kind for sent in scope.spans] == [Span.SPAN_KIND_SERVER] + [Span.SPAN_KIND_INTERNAL] * 8
    assert [sent.status.code for sent in scope.spans] == [Status.STATUS_CODE_ERROR] * 2 + [0] * 7


def plain(attributes: Iterable[KeyValue]) -> dict[str, object]:
    def value(of: AnyValue) -> object:
        kind = of.WhichOneof("value")
        return tuple(map(value, of.array_value.values)) if kind == "array_value" else getattr(of, kind)

    return {attribute.key: value(attribute.value) for attribute in attributes}


@pytest.mark.parametrize(("variable", "name"), [(None, "oaiserve"), ("edge-llm", "edge-llm")])
def test_the_service_is_oaiserve_unless_named(variable, name, export: Export, make_record, monkeypatch) -> None:
    if variable:
        monkeypatch.setenv("OTEL_SERVICE_NAME", variable)
    resource = export(make_record())[0].resource.attributes
    assert (resource["service.name"], resource["service.version"]) == (name, "1.2.3")


@pytest.mark.parametrize("result", list(SpanExportResult))
def test_spans_are_counted_by_result(result: SpanExportResult, make_record) -> None:
    class Exporter(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return result

    counts: Counter[str] = Counter()
    count_spans = lambda kind, number: counts.update({kind: number})  # noqa: E731
    tracing = Tracing(Exporter(), epoch_offset_ns=0, version="1", count_spans=count_spans, sampler=ALWAYS_ON)
    tracing.record(make_record())
    assert tracing.close(5)
    assert counts == {"ended": 9, "exported" if result is SpanExportResult.SUCCESS else "failed": 9}


def test_close_keeps_its_timeout_when_the_collector_hangs(make_record) -> None:
    class Hanging(SpanExporter):
        def __init__(self) -> None:
            self.release = Event()

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            self.release.wait(60)
            return SpanExportResult.FAILURE

    exporter = Hanging()
    tracing = Tracing(exporter, epoch_offset_ns=0, version="1", count_spans=lambda *_: None, sampler=ALWAYS_ON)
    tracing.record(make_record())
    assert not tracing.close(0.01)
    exporter.release.set()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"},
    ],
)
def test_tracing_is_off_unless_asked_for(environ: dict[str, str]) -> None:
    assert exporter_from_environment(environ) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"},
        {"OTEL_TRACES_EXPORTER": "otlp"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
    ],
)
def test_either_endpoint_or_the_exporter_variable_turns_otlp_on(environ: dict[str, str]) -> None:
    exporter = exporter_from_environment(environ)
    assert type(exporter).__name__ == "OTLPSpanExporter"


def test_the_console_exporter_can_be_chosen() -> None:
    assert isinstance(exporter_from_environment({"OTEL_TRACES_EXPORTER": "console"}), ConsoleSpanExporter)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'grpc'",
        ),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin'"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "must start with http://"),
    ],
)
def test_an_unsupported_exporter_stops_the_start(environ: dict[str, str], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        exporter_from_environment(environ)
