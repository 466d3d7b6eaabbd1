"""An exporter that reads how many spans of an accepted batch the collector rejected nevertheless.

OTLP calls this a partial success. The SDK's exporter ignores it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from requests import PreparedRequest, Response, Session
from requests.adapters import HTTPAdapter

MOST_ANSWER_BYTES = 64 * 2**10  # limit of a collector's answer; OTLP's is a number and a sentence
_READ_BYTES = 4096


class CollectorExporter(OTLPSpanExporter):
    """The SDK's exporter, which reads headers, timeout and the rest from the environment."""

    logger_name = OTLPSpanExporter.__module__

    def __init__(self, endpoint: str | None = None, timeout: float | None = None) -> None:
        self.rejected = (0, "")  # the rejected spans of the last batch, and the collector's reason
        session = Session()
        session.headers["accept-encoding"] = "identity"
        session.hooks["response"].append(self._read)
        for scheme in ("http://", "https://"):
            session.mount(scheme, _BoundedAdapter())
        # A credential provider brings its own session, whose answers are not read.
        has_provider = any(name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ)
        super().__init__(endpoint, timeout=timeout, session=None if has_provider else session)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.rejected = (0, "")
        return super().export(spans)

    def _read(self, response: Response, **_: object) -> None:
        try:
            partial = ExportTraceServiceResponse.FromString(response.content).partial_success
        except DecodeError:  # Some backends answer with JSON or a single word, without a number of spans.
            return
        self.rejected = (partial.rejected_spans, partial.error_message)


class _BoundedAdapter(HTTPAdapter):
    """Reads at most MOST_ANSWER_BYTES of an answer. A longer answer counts as empty, because its status is enough."""

    def send(self, request: PreparedRequest, stream: bool = False, *more: Any, **keywords: Any) -> Response:
        response = super().send(request, True, *more, **keywords)
        content = bytearray()
        for part in response.iter_content(_READ_BYTES):
            content += part
            if len(content) > MOST_ANSWER_BYTES:
                content.clear()
                response.close()  # This closes the connection, too.
                break
        response._content = bytes(content)  # with stream=False, requests does this itself
        response._content_consumed = True
        return response
