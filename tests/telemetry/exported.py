"""The spans of ended requests, as they are exported, and the log lines of requests."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

from oaiserve.facts.record import RequestRecord
from oaiserve.telemetry import logs
from oaiserve.telemetry.otel import resource
from oaiserve.telemetry.tracing import Tracing
from tests.world.loop import World

OFFSET_NS = 1_700_000_000_000_000_011


_resource = cache(lambda: resource("1.2.3"))  # The SDK starts threads for it.


def tracing_to(exporter: SpanExporter, **options: Any) -> Tracing:
    """Return the tracing of a server in a world of its own."""
    given = {"epoch_offset_ns": lambda: 0, "version": "1.2.3", "count_spans": lambda *_: None}
    return Tracing(exporter, resource=_resource(), runtime=World(0), **given | options)


def traced(*ended: RequestRecord, sampler: Sampler | None = ALWAYS_ON) -> list[ReadableSpan]:
    """Return the exported spans of requests. Without a sampler, it is that of the variables."""
    exporter = InMemorySpanExporter()
    tracing = tracing_to(exporter, epoch_offset_ns=lambda: OFFSET_NS, sampler=sampler)
    for one in ended:
        tracing.record(one)
    assert tracing.close(60)
    return list(exporter.get_finished_spans())


def spans_of(record: RequestRecord, sampler: Sampler = ALWAYS_ON) -> list[ReadableSpan]:
    """Return the spans of a record in the order server, operation, phases."""
    *phases, inner, server = traced(record, sampler=sampler)
    return [server, inner, *phases]


@contextmanager
def json_log() -> Iterator[io.StringIO]:
    """Capture the log lines of requests as JSON, one line each."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JSONFormatter())
    level = logs.logger.level
    logs.logger.addHandler(handler)
    logs.logger.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        logs.logger.removeHandler(handler)
        logs.logger.setLevel(level)
