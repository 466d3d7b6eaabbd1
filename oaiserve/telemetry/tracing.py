"""OpenTelemetry: the spans of a request, made from its record after it has ended, and where they are sent.

The standard OTEL_* variables decide; without them nothing here runs. Knows nothing of propagation: ids and parent
come with the record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Thread

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.util.types import AttributeValue

from oaiserve.errors import StartupError
from oaiserve.telemetry import names
from oaiserve.times import Outcome, RequestRecord
from oaiserve.trace import TraceContext

logger = logging.getLogger(__name__)

CountSpans = Callable[[str, int], None]


def exporter_from_environment(environ: Mapping[str, str]) -> SpanExporter | None:
    """The exporter that the standard variables ask for; None: they ask for none, and tracing is off.

    Raises StartupError for one that this server does not have.
    """

    def value(*variables: str) -> tuple[str, str]:
        """The first of the variables that is set, and what it says. Set to nothing counts as not set."""
        found = ((name, environ[name].strip()) for name in variables if environ.get(name, "").strip())
        return next(found, (variables[0], ""))

    if value("OTEL_SDK_DISABLED")[1].lower() == "true":
        return None
    _, asked = value("OTEL_TRACES_EXPORTER")
    endpoint_variable, endpoint = value("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    exporter = asked.lower() or ("otlp" if endpoint else "none")
    if exporter == "none":
        return None
    if exporter == "console":
        return ConsoleSpanExporter()
    if exporter != "otlp":
        raise StartupError(f"OTEL_TRACES_EXPORTER is '{asked}'; this server has otlp, console and none.")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise StartupError(f"{endpoint_variable} is '{endpoint}'; it must start with http:// or https://.")
    protocol_variable, protocol = value("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in ("", "http/protobuf"):
        raise StartupError(
            f"{protocol_variable} is '{protocol}', but this server exports traces over http/protobuf only; "
            "set it to that and the endpoint to the collector's HTTP port, usually 4318."
        )
    # Imported here: it brings an HTTP client that nobody else needs.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()  # reads endpoint, headers, timeout and the rest from the environment


class Tracing:
    """Makes and exports spans. `record` is for one thread only, the telemetry thread.

    `epoch_offset_ns` is wall clock minus monotonic clock, taken once, so that exported times differ from the stamps by
    one constant. `count_spans(result, number)` hears of spans "ended", "exported" and "failed". `sampler`: the one that
    OTEL_TRACES_SAMPLER names if not given.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        epoch_offset_ns: int,
        version: str,
        count_spans: CountSpans,
        sampler: Sampler | None = None,
    ) -> None:
        self._epoch_offset_ns = epoch_offset_ns
        self._count_spans = count_spans
        self._ids = _RequestIds()
        defaults = Resource({SERVICE_NAME: names.SERVICE_NAME, SERVICE_VERSION: version})
        self._provider = TracerProvider(
            sampler=sampler,
            resource=Resource.create(defaults.merge(OTELResourceDetector().detect()).attributes),
            id_generator=self._ids,
            shutdown_on_exit=False,  # the server's own shutdown does it, within its own limit
        )
        self._provider.add_span_processor(BatchSpanProcessor(_CountingExporter(exporter, count_spans)))
        self._tracer = self._provider.get_tracer(names.SERVICE_NAME, version)

    def record(self, record: RequestRecord) -> None:
        phases = record.times.phases()
        start_ns, end_ns = phases[0].start_ns, phases[-1].end_ns
        self._ids.preset(record.trace)
        server = self._span(
            f"{record.http_method} {record.http_route}",
            start_ns,
            end_ns,
            _http_attributes(record),
            _parent_context(record.trace),
            otel.SpanKind.SERVER,
        )
        if not server.is_recording():
            return  # the sampler said no, for the children too
        inner = self._span(
            f"{record.operation} {record.model}",
            start_ns,
            end_ns,
            _gen_ai_attributes(record),
            otel.set_span_in_context(server, Context()),
        )
        context = otel.set_span_in_context(inner, Context())
        spans = [self._span(phase.name, phase.start_ns, phase.end_ns, {}, context) for phase in phases]
        for span, phase in zip(spans, phases, strict=True):
            span.end(phase.end_ns + self._epoch_offset_ns)
        for span in (inner, server):
            # By the HTTP conventions a 4xx is the client's error and leaves the server's span unset.
            if record.outcome is Outcome.FAILED or (record.http_status or 0) >= 500:
                span.set_status(otel.StatusCode.ERROR)
            span.end(end_ns + self._epoch_offset_ns)
        self._count_spans("ended", len(spans) + 2)

    def close(self, timeout_seconds: float) -> bool:
        """Exports what is held, waiting no longer than that. False: it took longer, and spans may be lost."""
        # The SDK's own limit is half a minute and cannot be set, hence a thread that can be left behind.
        thread = Thread(target=self._provider.shutdown, name="tracing-shutdown", daemon=True)
        thread.start()
        thread.join(timeout_seconds)
        if thread.is_alive():
            logger.warning("Trace export did not finish within %g s; the last spans may be lost.", timeout_seconds)
        return not thread.is_alive()

    def _span(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: dict[str, AttributeValue],
        context: Context,
        kind: otel.SpanKind = otel.SpanKind.INTERNAL,
    ) -> otel.Span:
        return self._tracer.start_span(
            name,
            context,
            kind,
            attributes={**attributes, names.DURATION_NS: end_ns - start_ns},
            start_time=start_ns + self._epoch_offset_ns,
        )


class _RequestIds(RandomIdGenerator):
    """Gives the server span the ids that the request's headers and log line already name, and other spans random
    ones."""

    def __init__(self) -> None:
        self._next: TraceContext | None = None

    def preset(self, trace: TraceContext) -> None:
        self._next = trace

    def generate_trace_id(self) -> int:
        # Asked for only where the client sent no parent; the span id follows.
        return self._next.trace_id if self._next is not None else super().generate_trace_id()

    def generate_span_id(self) -> int:
        preset, self._next = self._next, None
        return preset.span_id if preset is not None else super().generate_span_id()


class _CountingExporter(SpanExporter):
    def __init__(self, exporter: SpanExporter, count_spans: CountSpans) -> None:
        self._exporter = exporter
        self._count_spans = count_spans

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        self._count_spans("exported" if result is SpanExportResult.SUCCESS else "failed", len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _parent_context(trace: TraceContext) -> Context:
    if trace.parent_span_id is None:
        return Context()
    parent = otel.SpanContext(
        trace.trace_id,
        trace.parent_span_id,
        is_remote=True,
        trace_flags=otel.TraceFlags(otel.TraceFlags.SAMPLED if trace.parent_sampled else otel.TraceFlags.DEFAULT),
        trace_state=otel.TraceState.from_header([trace.tracestate]) if trace.tracestate else None,
    )
    return otel.set_span_in_context(otel.NonRecordingSpan(parent), Context())


def _http_attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.HTTP_REQUEST_METHOD: record.http_method,
        names.HTTP_ROUTE: record.http_route,
        names.URL_PATH: record.http_route,  # a route that generates has no parameters: pattern and path are the same
        names.REQUEST_ID: record.request_id,
        names.OUTCOME: str(record.outcome),
    }
    if record.http_status is not None:
        attributes[names.HTTP_RESPONSE_STATUS_CODE] = record.http_status
    if record.error_type is not None:
        attributes[names.ERROR_TYPE] = record.error_type
    return attributes


def _gen_ai_attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.GEN_AI_OPERATION_NAME: record.operation,
        names.GEN_AI_PROVIDER_NAME: names.SERVICE_NAME,
        names.GEN_AI_REQUEST_MODEL: record.model,
        names.GEN_AI_RESPONSE_MODEL: record.model,
        names.GEN_AI_REQUEST_STREAM: record.stream,
        names.GEN_AI_USAGE_INPUT_TOKENS: record.prompt_tokens,
        names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: record.cached_tokens,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: record.completion_tokens,
        names.REQUEST_ID: record.request_id,
        names.OUTCOME: str(record.outcome),
    }
    if record.num_preemptions:
        attributes[names.NUM_PREEMPTIONS] = record.num_preemptions
        attributes[names.STALLED_NS] = record.stalled_ns
    for param, value in record.params.items():
        attributes[names.GEN_AI_REQUEST_PARAMS.get(param, names.REQUEST_PARAM_PREFIX + param)] = value
    if record.finish_reasons:
        attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] = record.finish_reasons
    if record.stream and record.times.time_to_first_token_ns is not None:
        attributes[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = record.times.time_to_first_token_ns / 1e9
    if record.error_type is not None:
        attributes[names.ERROR_TYPE] = record.error_type
    return attributes
