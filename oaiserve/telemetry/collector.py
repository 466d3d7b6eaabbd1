"""An exporter to a collector that counts the spans of an accepted batch that the collector rejected nevertheless.

OTLP calls that a partial success. The SDK's exporter doesn't read it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from requests import Response, Session


class CollectorExporter(OTLPSpanExporter):
    """The SDK's exporter, which reads headers, timeout and the rest from the environment."""

    logger_name = OTLPSpanExporter.__module__

    def __init__(self, endpoint: str | None = None, timeout: float | None = None) -> None:
        self.rejected = (0, "")  # spans of the last batch, and the collector's reason
        session = Session()
        session.hooks["response"].append(self._read)
        # A provider of credentials makes a session of its own, whose answers are not read.
        has_provider = any(name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ)
        super().__init__(endpoint, timeout=timeout, session=None if has_provider else session)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.rejected = (0, "")
        return super().export(spans)

    def _read(self, response: Response, **_: object) -> None:
        try:
            partial = ExportTraceServiceResponse.FromString(response.content).partial_success
        except DecodeError:  # Some backends answer with JSON or a word, which says nothing of spans.
            return
        self.rejected = (partial.rejected_spans, partial.error_message)
