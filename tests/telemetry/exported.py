"""The spans of ended requests, as they are exported, and the log lines of requests."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

from oaiserve.facts.record import RequestRecord
from oaiserve.telemetry import logs
from oaiserve.telemetry.tracing import Tracing

OFFSET_NS = 1_700_000_000_000_000_011


def traced(*ended: RequestRecord, sampler: Sampler | None = ALWAYS_ON) -> list[ReadableSpan]:
    """Return the exported spans of requests. Without a sampler, it is that of the variables."""
    exporter = InMemorySpanExporter()
    options = {"epoch_offset_ns": lambda: OFFSET_NS, "version": "1.2.3", "count_spans": lambda *_: None}
    tracing = Tracing(exporter, sampler=sampler, **options)
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
