"""`Tracing` makes OpenTelemetry spans from the records of ended requests, and exports them.

The standard OTEL_* variables turn it on. Without them, nothing in this module runs. It doesn't propagate trace context,
because the record contains the ids and the parent span.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from random import getrandbits
from typing import Literal

from opentelemetry import trace as otel
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.util.types import Attributes, AttributeValue

from oaiserve.facts.record import FURTHER_CLIENTS, POOLING_OPERATIONS, Cause, EventKind, Outcome, RequestRecord, Whose
from oaiserve.facts.times import EpochOffset, Phase
from oaiserve.facts.trace import Attempt, TraceContext
from oaiserve.runtime import Runtime
from oaiserve.telemetry import names
from oaiserve.telemetry.record_facts import attributes, server_attributes, steps_of
from oaiserve.telemetry.span_export import CountSpans, SpanExport

_SAMPLED = otel.TraceFlags(otel.TraceFlags.SAMPLED)
_UNSET = otel.Status(otel.StatusCode.UNSET)
_ERROR = otel.Status(otel.StatusCode.ERROR)
MAX_RUNS = 1024  # most agents' runs for which the last span is remembered, so that the next one can link to it
_CHUNK = EventKind.PREFILL_CHUNK
_JSON_KINDS = ("json_object", "json_schema")  # kinds of grammars
_SAMPLERS = tuple(
    prefix + name for prefix in ("", "parentbased_") for name in ("always_on", "always_off", "traceidratio")
)


def exporter(kind: Literal["otlp", "console"]) -> SpanExporter:
    if kind == "console":
        return ConsoleSpanExporter()
    # Imported late, because it loads an HTTP client that is not needed otherwise.
    from oaiserve.telemetry.collector import CollectorExporter

    return CollectorExporter()


class TraceSampling:
    """Decides which traces are exported. The default `sampler` is the one that OTEL_TRACES_SAMPLER names.

    Any thread may call this. Raises ValueError if an OTEL_* variable has an invalid value.
    """

    def __init__(self, resource: Resource, sampler: Sampler | None = None) -> None:
        _check_sampler_variables()
        # The provider is only used to get the sampler that the environment names. Its tracer would be five times
        # slower.
        self.sampler = TracerProvider(sampler, resource, shutdown_on_exit=False).sampler

    def is_sampled(self, trace: TraceContext) -> bool:
        """Return whether the spans of this request will be exported. `record` will make the same decision, because the
        samplers of OTEL_TRACES_SAMPLER consider only the trace and the client's flag."""
        decision = self.decide(trace, _client_span(trace), "", {}).decision
        return decision is Decision.RECORD_AND_SAMPLE

    def decide(
        self, trace: TraceContext, parent: otel.SpanContext | None, name: str, attributes: Attributes
    ) -> SamplingResult:
        if parent is None:
            context = Context()
        else:
            context = otel.set_span_in_context(otel.NonRecordingSpan(parent), Context())
        return self.sampler.should_sample(context, trace.trace_id, name, otel.SpanKind.SERVER, attributes, links=())


class Tracing:
    """Makes spans and exports them. Only one thread may call `record`.

    `epoch_offset_ns` is read once per request, so that all its spans are shifted by the same amount. Raises ValueError
    if an OTEL_* variable has an invalid value.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        resource: Resource,
        epoch_offset_ns: EpochOffset,
        version: str,
        count_spans: CountSpans,
        sampler: Sampler | None = None,
        runtime: Runtime,
    ) -> None:
        self._epoch_offset_ns = epoch_offset_ns
        self._offset_ns = 0  # the wall clock offset for the current request
        self._resource = resource
        self._scope = InstrumentationScope(names.SERVICE_NAME, version, names.GEN_AI_SCHEMA)
        self._limits = SpanLimits()
        self._sampling = TraceSampling(self._resource, sampler)
        self._turns: OrderedDict[tuple[str, str], otel.SpanContext] = OrderedDict()  # the last span by run and agent
        self.is_sampled = self._sampling.is_sampled
        self._export = SpanExport(exporter, count_spans, runtime=runtime)

    def record(self, record: RequestRecord) -> None:
        """Export the spans of an ended request, if it is sampled: server, operation and one for each phase."""
        self._offset_ns = self._epoch_offset_ns()
        phases = record.times.phases()
        trace = record.trace
        parent = _client_span(trace)
        name = f"{record.http_method} {record.http_route}"
        # The paths of these routes have no parameters.
        http = server_attributes(record) | {names.URL_PATH: record.http_route}
        sampling = self._sampling.decide(trace, parent, name, http)
        if sampling.decision is not Decision.RECORD_AND_SAMPLE:
            return

        def new_context(span_id: int) -> otel.SpanContext:
            return otel.SpanContext(trace.trace_id, span_id, False, _SAMPLED, sampling.trace_state)

        # By OpenTelemetry's HTTP conventions a 4xx is the client's error and leaves the status of a server span unset.
        is_error = record.outcome is Outcome.FAILED or (record.http_status or 0) >= 500
        status = _ERROR if is_error else _UNSET
        whole = Phase(name, phases[0].start_ns, phases[-1].end_ns)
        server = new_context(trace.span_id)
        server_span = self._span(
            whole, server, parent, dict(sampling.attributes or {}), status=status, kind=otel.SpanKind.SERVER
        )
        operation = names.GEN_AI_OPERATIONS.get(record.operation, record.operation)
        whole = whole._replace(name=f"{operation} {record.requested_model or record.model}")
        inner = new_context(_new_span_id())
        links = self._links_to_turn_before(record, inner)
        inner_span = self._span(whole, inner, server, _gen_ai_attributes(record), status=status, links=links)
        events = self._events(record, phases)
        causes_ns = record.causes_ns
        spans = [
            self._span(
                phase,
                new_context(_new_span_id()),
                inner,
                _phase_attributes(phase.name, record, causes_ns),
                events=phase_events,
            )
            for phase, phase_events in zip(phases, events, strict=True)
        ]
        self._export.put([*spans, inner_span, server_span])

    def _links_to_turn_before(self, record: RequestRecord, span: otel.SpanContext) -> tuple[otel.Link, ...]:
        """Return a link to the span of the agent's previous turn, if it is known, and remember this one."""
        if (turn := record.turn) is None:
            return ()
        before = self._turns.pop((turn.run, turn.agent), None)
        self._turns[turn.run, turn.agent] = span
        if len(self._turns) > MAX_RUNS:
            self._turns.popitem(last=False)
        return () if before is None else (otel.Link(before),)

    def record_passed(
        self, trace: TraceContext, whole: Phase, attributes: dict[str, AttributeValue], attempts: Sequence[Attempt]
    ) -> None:
        """Export the spans of a request that a gateway has passed on: its own span, and one for each attempt."""
        self._offset_ns = self._epoch_offset_ns()
        parent = _client_span(trace)
        sampling = self._sampling.decide(trace, parent, whole.name, attributes)
        if sampling.decision is not Decision.RECORD_AND_SAMPLE:
            return
        contexts = [
            otel.SpanContext(trace.trace_id, span_id, False, _SAMPLED, sampling.trace_state)
            for span_id in (trace.span_id, *(attempt.span_id for attempt in attempts))
        ]
        status = _ERROR if names.ERROR_TYPE in attributes else _UNSET
        spans = [self._span(whole, contexts[0], parent, attributes, kind=otel.SpanKind.SERVER, status=status)]
        for attempt, context in zip(attempts, contexts[1:], strict=True):
            name = str(attempt.attributes[names.HTTP_REQUEST_METHOD])
            tried = Phase(name, attempt.started_ns, attempt.ended_ns or whole.end_ns)
            own: dict[str, AttributeValue] = {**attempt.attributes}
            if attempt.error:
                own[names.ERROR_TYPE] = attempt.error
            status = _ERROR if attempt.error else _UNSET
            spans.append(self._span(tried, context, contexts[0], own, kind=otel.SpanKind.CLIENT, status=status))
        self._export.put(spans)

    def close(self, timeout_seconds: float) -> bool:
        """Export the queued spans. If the timeout comes first, drop the rest and return False."""
        return self._export.close(timeout_seconds)

    def _span(
        self,
        interval: Phase,
        context: otel.SpanContext,
        parent: otel.SpanContext | None,
        attributes: dict[str, AttributeValue],
        *,
        kind: otel.SpanKind = otel.SpanKind.INTERNAL,
        status: otel.Status = _UNSET,
        events: Sequence[Event] = (),
        links: Sequence[otel.Link] = (),
    ) -> ReadableSpan:
        attributes[names.DURATION_NS] = interval.duration_ns
        limits = self._limits
        return ReadableSpan(
            interval.name,
            context,
            parent,
            self._resource,
            _limited(attributes, limits.max_span_attributes, limits.max_span_attribute_length),
            events if _is_within(len(events), limits.max_events) else BoundedList.from_seq(limits.max_events, events),
            links=links,
            kind=kind,
            status=status,
            start_time=interval.start_ns + self._offset_ns,
            end_time=interval.end_ns + self._offset_ns,
            instrumentation_scope=self._scope,
        )

    def _events(self, record: RequestRecord, phases: Sequence[Phase]) -> list[list[Event]]:
        events: list[list[Event]] = [[] for _ in phases]
        chunks_total = Counter(event.choice for event in record.account.events if event.kind is _CHUNK)
        chunks_so_far: Counter[int | None] = Counter()
        for event in record.account.events:
            details: dict[str, AttributeValue] = dict(event.details)
            if event.choice is not None:
                details["choice"] = event.choice
            if event.kind is _CHUNK:
                chunks_so_far[event.choice] += 1
                details["number"] = chunks_so_far[event.choice]
                if not record.account.num_events_dropped:  # a dropped event may have been a chunk, too
                    details["total"] = chunks_total[event.choice]
            attributes = {names.EVENT_PREFIX + name: value for name, value in details.items()}
            limited = _limited(attributes, self._limits.max_event_attributes, self._limits.max_attribute_length)
            happened = Event(event.kind, limited, event.at_ns + self._offset_ns)
            events[_index_of_phase(event.at_ns, phases)].append(happened)
        return events


def _check_sampler_variables() -> None:
    """Raise ValueError for an invalid sampler variable. The SDK would only log a warning and export every request."""
    sampler = os.environ.get(OTEL_TRACES_SAMPLER, "").strip().lower()
    if sampler and sampler not in _SAMPLERS:
        raise ValueError(f"{OTEL_TRACES_SAMPLER} must be one of {', '.join(_SAMPLERS)} but is {sampler}")
    ratio = os.environ.get(OTEL_TRACES_SAMPLER_ARG, "").strip()
    try:
        is_ratio = 0 <= float(ratio or 1) <= 1
    except ValueError:
        is_ratio = False
    if sampler.endswith("traceidratio") and not is_ratio:
        raise ValueError(f"{OTEL_TRACES_SAMPLER_ARG} must be between 0 and 1 but is {ratio}")


def _index_of_phase(at_ns: int, phases: Sequence[Phase]) -> int:
    """Return the index of the phase at `at_ns`.

    The boundary of two phases belongs to the earlier one, except that the beginning of prefill belongs to prefill.
    """
    for index, phase in enumerate(phases):
        if at_ns <= phase.end_ns:
            is_prefill = at_ns == phase.end_ns and [later.name for later in phases[index + 1 : index + 2]] == [
                "prefill"
            ]
            return index + is_prefill
    return len(phases) - 1


def _phase_attributes(
    phase: str, record: RequestRecord, causes_ns: Mapping[str, Mapping[Cause, int]]
) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {}
    found |= {names.CAUSES_NS[cause]: ns for cause, ns in causes_ns.get(phase, {}).items()}
    if phase == "queue":
        found |= {names.QUEUE_WAITS_NS[reason]: ns for reason, ns in record.account.waits_ns.items()}
    found |= {names.OTHERS_NS[whose]: ns for whose, ns in record.account.whose_ns.get(phase, {}).items()}
    for others in record.account.others_ns.get(phase, []):
        if others.whose is Whose.OTHER_CLIENT and others.client not in (None, FURTHER_CLIENTS):
            found.setdefault(names.OTHERS_MOST_CLIENT, others.client)
    if phase == "encode_media":
        found[names.MEDIA_ENCODE_NS] = record.account.media.encode_ns
    return found


def _limited(attributes: dict[str, AttributeValue], most: int | None, longest: int | None) -> Attributes:
    """Apply the SDK's limits to attributes. The SDK's bounded dict is slow, so it is only used if a limit applies."""
    if longest is None and _is_within(len(attributes), most):
        return attributes
    return BoundedAttributes(most, attributes, max_value_len=longest)


def _is_within(number: int, limit: int | None) -> bool:
    return limit is None or number <= limit


def _new_span_id() -> int:
    return getrandbits(64) or 1


def _client_span(trace: TraceContext) -> otel.SpanContext | None:
    if trace.parent_span_id is None:
        return None
    return otel.SpanContext(
        trace.trace_id,
        trace.parent_span_id,
        is_remote=True,
        trace_flags=_SAMPLED if trace.parent_sampled else otel.TraceFlags(otel.TraceFlags.DEFAULT),
        trace_state=otel.TraceState.from_header([trace.tracestate]) if trace.tracestate else None,
    )


def _gen_ai_attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    fields: dict[str, AttributeValue] = attributes(record)
    fields[names.GEN_AI_OPERATION_NAME] = names.GEN_AI_OPERATIONS.get(record.operation, record.operation)
    if record.turn is not None:
        fields.setdefault(names.GEN_AI_CONVERSATION_ID, record.turn.run)
    fields[names.GEN_AI_PROVIDER_NAME] = names.SERVICE_NAME
    fields[names.GEN_AI_REQUEST_MODEL] = record.requested_model or record.model
    if record.http_status == HTTPStatus.OK:
        fields[names.GEN_AI_RESPONSE_MODEL] = record.model
    if record.operation not in POOLING_OPERATIONS:
        if record.account.grammar_kind in _JSON_KINDS:
            fields[names.GEN_AI_OUTPUT_TYPE] = "json"
        else:
            fields[names.GEN_AI_OUTPUT_TYPE] = "text"
    for param, value in record.params.items():
        value = float(value) if param in names.FLOATS else value
        fields[names.GEN_AI_REQUEST_PARAMS.get(param, names.REQUEST_PARAM_PREFIX + param)] = value
    if record.stream and record.times.time_to_first_token_ns is not None:
        fields[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = record.times.time_to_first_token_ns / 1e9
    fields |= {names.NUM_TOOL_CALLS[outcome]: number for outcome, number in record.tool_calls.items()}
    if record.account.span_texts is not None:
        fields |= record.account.span_texts()
    if (steps := steps_of(record)) is not None:
        fields |= {name: value for name, value in zip(names.STEPS, steps, strict=True) if value is not None}
    return fields
