"""Spans are queued for a collector that may be slow, full or down; losses are counted and logged once."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from socket import SO_SNDBUF, SOL_SOCKET, socket
from threading import Lock
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext

from oaiserve.errors import StartupError
from oaiserve.telemetry.collector import CollectorExporter
from oaiserve.telemetry.span_export import RECOVERY_NS, BatchLimits, SpanExport
from tests.engine.doubles import Clock
from tests.plain_http import Handler, running_http
from tests.telemetry.collector import running_collector

LOST = "WARNING Spans are being lost:"
AT_ONCE = BatchLimits(queue_size=8, batch_size=1, delay_seconds=60)


def spans(name: str, number: int) -> list[ReadableSpan]:
    return [ReadableSpan(name, SpanContext(1, 1, is_remote=False)) for _ in range(number)]


def partial(**fields: int | str) -> ExportTraceServiceResponse:
    return ExportTraceServiceResponse(partial_success=ExportTracePartialSuccess(**fields))


class Counts:
    """Counts spans by result. Like the real counter, any thread may call it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.by_result: Counter[str] = Counter()

    def __call__(self, result: str, number: int) -> None:
        with self._lock:
            self.by_result[result] += number

    @property
    def settled(self) -> int:
        return sum(self.by_result[result] for result in ("exported", "failed", "dropped"))


class Gate(SpanExporter):
    """An exporter that waits for the test to provide the result of each export."""

    def __init__(self) -> None:
        self.came: SimpleQueue[list[str]] = SimpleQueue()
        self.results: SimpleQueue[SpanExportResult | Exception] = SimpleQueue()
        self.is_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.came.put([span.name for span in spans])
        result = self.results.get(timeout=60)
        if isinstance(result, Exception):
            raise result
        return result

    def shutdown(self) -> None:
        self.is_shut_down = True


def exporting(limits: BatchLimits = AT_ONCE, clock: Clock | None = None) -> tuple[Gate, Counts, SpanExport]:
    gate = Gate()
    counts = Counts()
    return gate, counts, SpanExport(gate, counts, limits, clock or Clock())


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO)
    return lambda: [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


def test_a_full_batch_is_exported_at_once_and_another_after_the_delay() -> None:
    for batch_size, delay_seconds in ((4, 60), (50, 0.001)):
        gate, counts, export = exporting(BatchLimits(100, batch_size, delay_seconds))
        export.put(spans("a", 4))
        assert gate.came.get(timeout=60) == ["a"] * 4
        gate.results.put(SpanExportResult.SUCCESS)
        assert export.close(60)
        assert counts.by_result == {"ended": 4, "exported": 4}
        assert gate.is_shut_down


def test_the_spans_of_a_request_stay_together() -> None:
    gate, _, export = exporting(BatchLimits(queue_size=100, batch_size=5, delay_seconds=60))
    for name, number in (("a", 3), ("b", 3), ("c", 9)):
        export.put(spans(name, number))
    for _ in range(3):
        gate.results.put(SpanExportResult.SUCCESS)
    assert export.close(60)
    assert [gate.came.get(timeout=60) for _ in range(3)] == [["a"] * 3, ["b"] * 3, ["c"] * 9]


def test_a_full_queue_drops_the_oldest_requests_and_counts_them(lines) -> None:
    gate, counts, export = exporting()
    export.put(spans("under way", 1))
    assert gate.came.get(timeout=60) == ["under way"]
    for name in ("a", "b", "c", "d"):
        export.put(spans(name, 3))
    assert counts.by_result == {"ended": 13, "dropped": 6}
    for _ in range(3):
        gate.results.put(SpanExportResult.SUCCESS)
    assert export.close(60)
    assert [gate.came.get(timeout=60) for _ in range(2)] == [["c"] * 3, ["d"] * 3]
    assert counts.by_result == {"ended": 13, "dropped": 6, "exported": 7}
    (line,) = lines()
    assert line.startswith(f"{LOST} they end faster than the collector accepts them.")


@given(
    st.lists(st.integers(1, 12), max_size=60),
    st.lists(st.sampled_from([*SpanExportResult, RuntimeError()]), min_size=60, max_size=60),
    st.integers(1, 30),
    st.data(),
)
def test_every_span_that_ended_has_one_result_and_no_trace_is_cut(
    numbers: list[int], results: list[SpanExportResult | Exception], queue_size: int, data: st.DataObject
) -> None:
    gate, counts, export = exporting(BatchLimits(queue_size, data.draw(st.integers(1, queue_size)), 60))
    for trace, (number, result) in enumerate(zip(numbers, results, strict=False)):
        export.put(spans(f"{trace}", number))
        gate.results.put(result)
    assert export.close(60)
    assert counts.by_result["ended"] == sum(numbers) == counts.settled
    batches = [gate.came.get() for _ in range(gate.came.qsize())]
    came = Counter(name for batch in batches for name in batch)
    assert all(number == numbers[int(trace)] for trace, number in came.items())
    assert sum(len({*batch}) for batch in batches) == len(came), "a trace is in two batches"


def test_repeated_failures_cause_one_warning(lines) -> None:
    gate, counts, export = exporting()
    failures = [RuntimeError("no route"), SpanExportResult.FAILURE, SpanExportResult.FAILURE]
    for result in (SpanExportResult.SUCCESS, *failures, SpanExportResult.SUCCESS, SpanExportResult.FAILURE):
        export.put(spans("a", 2))
        gate.came.get(timeout=60)
        gate.results.put(result)
    assert export.close(60)
    assert lines() == [f"{LOST} RuntimeError('no route'). They are counted in /metrics."]
    assert counts.by_result == {"ended": 12, "exported": 4, "failed": 8}


def test_a_recovery_is_logged_when_no_span_was_lost_for_some_time(lines) -> None:
    gate, _, export = exporting(clock=(clock := Clock()))
    for now_ns, result in (
        (0, SpanExportResult.FAILURE),
        (RECOVERY_NS - 1, SpanExportResult.SUCCESS),
        (RECOVERY_NS, SpanExportResult.SUCCESS),
        (RECOVERY_NS, SpanExportResult.FAILURE),
    ):
        export.put(spans("a", 3))
        gate.came.get(timeout=60)
        clock.now_ns = now_ns
        gate.results.put(result)
    assert export.close(60)
    lost, recovered, lost_again = lines()
    assert recovered == "INFO Spans reach the collector again; 3 were lost."
    assert lost == f"{LOST} the exporter gave no reason. They are counted in /metrics."
    assert lost_again == lost


def test_close_drops_and_counts_spans_after_its_timeout(lines) -> None:
    gate, counts, export = exporting()
    export.put(spans("hangs", 2))
    gate.came.get(timeout=60)
    export.put(spans("left", 5))
    assert not export.close(0.01)
    assert gate.is_shut_down
    assert counts.by_result == {"ended": 7, "dropped": 5}
    assert lines() == [
        "WARNING Trace export did not finish within 0.01 s; 5 spans are dropped, besides those being sent."
    ]
    gate.results.put(SpanExportResult.SUCCESS)


@pytest.fixture
def unreachable_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give a URL on which no server listens."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket() as sock:
        sock.bind(("127.0.0.1", 0))  # No other program gets the port meanwhile.
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1/traces"


def test_a_collector_that_is_down_causes_one_line_with_the_reason(unreachable_url: str, lines) -> None:
    """The real exporter logs each attempt itself."""
    counts = Counts()
    export = SpanExport(CollectorExporter(unreachable_url, timeout=0.2), counts, AT_ONCE)
    for _ in range(3):
        export.put(spans("a", 1))
    assert export.close(60)
    (line,) = lines()
    assert line.startswith(f"{LOST} Failed to export spans batch")
    assert counts.by_result == {"ended": 3, "failed": 3}


@pytest.mark.parametrize(
    ("answer", "num_rejected", "reason"),
    [
        (ExportTraceServiceResponse(), 0, ""),
        (partial(rejected_spans=0, error_message="slow down"), 0, ""),
        (partial(rejected_spans=2, error_message="too old"), 2, "too old"),
        (partial(rejected_spans=9), 3, "the collector rejects some of them"),
        (b"{}", 0, ""),
    ],
)
def test_spans_that_a_collector_rejects_of_a_batch_are_lost(
    answer: ExportTraceServiceResponse | bytes, num_rejected: int, reason: str, lines
) -> None:
    counts = Counts()
    with running_collector() as collector:
        collector.answer = answer if isinstance(answer, bytes) else answer.SerializeToString()
        export = SpanExport(CollectorExporter(f"{collector.url}/v1/traces"), counts, BatchLimits(8, 3, 60))
        export.put(spans("a", 3))
        assert export.close(60)
    assert +counts.by_result == +Counter(ended=3, exported=3 - num_rejected, failed=num_rejected)
    warning = f"{LOST} {reason}. They are counted in /metrics."
    assert lines() == ([warning] if num_rejected else [])


class Endless(Handler):
    """A collector whose answer has no end, which counts what a client takes of it."""

    taken: ClassVar[SimpleQueue[int]]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.connection.setsockopt(SOL_SOCKET, SO_SNDBUF, 2**16)
        self.send_response(int(self.path.rpartition("/")[2]))
        self.send_header("location", "/v1/traces/200")
        self.send_header("content-length", str(2**40))
        self.end_headers()
        num_bytes = 0
        with suppress(OSError):
            while num_bytes < 2**28:
                num_bytes += self.wfile.write(bytes(2**16))
        self.close_connection = True
        self.taken.put(num_bytes)


@pytest.mark.parametrize(("status", "result"), [(200, "exported"), (307, "exported"), (400, "failed")])
def test_an_answer_without_end_is_read_only_in_part(status: int, result: str) -> None:
    """The SDK's exporter takes a redirect as a success, and doesn't follow it."""
    Endless.taken = SimpleQueue()
    counts = Counts()
    with running_http(Endless) as url:
        export = SpanExport(CollectorExporter(f"{url}/{status}"), counts, AT_ONCE)
        export.put(spans("a", 1))
        assert export.close(60)
        assert Endless.taken.get() < 2**24  # what buffers of sockets hold, with some margin
    assert counts.by_result == {"ended": 1, result: 1}


def test_the_exporters_warnings_are_logged_again_after_close(unreachable_url: str, lines) -> None:
    exporter = CollectorExporter(unreachable_url)
    SpanExport(exporter, Counts(), AT_ONCE).close(60)
    exporter.shutdown()
    assert lines() == ["WARNING Exporter already shutdown, ignoring call"]


@pytest.mark.parametrize(
    ("environ", "limits"),
    [
        ({}, BatchLimits()),
        ({}, (2048, 512, 5.0)),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "100"}, (100, 100, 5.0)),
        ({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "7", "OTEL_BSP_SCHEDULE_DELAY": " 250 "}, (2048, 7, 0.25)),
    ],
)
def test_limits_and_their_variables_are_those_of_the_sdk(environ: dict[str, str], limits: tuple[float, ...]) -> None:
    assert BatchLimits.from_environment(environ) == limits


def test_a_batch_that_does_not_fit_into_the_queue_is_refused() -> None:
    with pytest.raises(StartupError, match="OTEL_BSP_MAX_EXPORT_BATCH_SIZE is '4096', but must be at most"):
        BatchLimits.from_environment({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4096"})
