"""A minimal OpenTelemetry collector, so that tests export over a real socket."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.plain_http import Handler, running_http


class Collector:
    """What a server has received as OTLP over HTTP: the spans."""

    def __init__(self) -> None:
        self.url = ""
        self.paths: list[str] = []
        self.spans: list[Span] = []
        self.answer = b""  # an ExportTraceServiceResponse


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()

    class Receiver(Handler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.paths.append(self.path)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.send_response(200)
            self.send_header("content-length", str(len(collector.answer)))
            self.end_headers()
            self.wfile.write(collector.answer)

    with running_http(Receiver) as collector.url:
        yield collector
