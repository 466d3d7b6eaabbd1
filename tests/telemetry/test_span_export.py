"""Spans are queued for a collector that may be slow, full or down; losses are counted and logged once."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from socket import SO_SNDBUF, SOL_SOCKET, socket
from typing import ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext

from oaiserve.errors import StartupError
from oaiserve.runtime import THREADS
from oaiserve.telemetry.collector import CollectorExporter
from oaiserve.telemetry.span_export import RECOVERY_NS, BatchLimits, SpanExport
from tests.plain_http import Handler, running_http
from tests.telemetry.collector import running_collector
from tests.world.loop import START_SECONDS, World
from tests.world.schedules import schedules

LOST = "WARNING Spans are being lost:"
NO_RESOURCE = Resource.get_empty()  # To find out one takes longer than all the rest.
AT_ONCE = BatchLimits(queue_size=8, batch_size=1, delay_seconds=60)
SUCCESS = SpanExportResult.SUCCESS
FAILURE = SpanExportResult.FAILURE


def spans(name: str, number: int) -> list[ReadableSpan]:
    context = SpanContext(1, 1, is_remote=False)
    return [ReadableSpan(name, context, resource=NO_RESOURCE) for _ in range(number)]


def partial(**fields: int | str) -> ExportTraceServiceResponse:
    return ExportTraceServiceResponse(partial_success=ExportTracePartialSuccess(**fields))


class Collector(SpanExporter):
    """An exporter whose exports take `seconds` each, and have these results in order, and then success."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.batches: list[list[str]] = []  # names of the spans
        self.at_seconds: list[float] = []  # when they came
        self.results: list[SpanExportResult | Exception] = []
        self.seconds = 0.0
        self.is_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batches.append([span.name for span in spans])
        self.at_seconds.append(round(self._world.now - START_SECONDS, 3))
        self._world.sleep(self.seconds)
        result = self.results.pop(0) if self.results else SUCCESS
        if isinstance(result, Exception):
            raise result
        return result

    def shutdown(self) -> None:
        self.is_shut_down = True


class Counts:
    """Counts spans by result, in a world when they are counted by its clock."""

    def __init__(self, world: World | None = None) -> None:
        self._world = world
        self.by_result: Counter[str] = Counter()

    def __call__(self, result: str, number: int) -> None:
        if self._world is None or not self._world.ahead:
            self._add(result, number)
        else:  # on a thread that is busy until then
            self._world.call_soon_threadsafe(self._add, result, number)

    def _add(self, result: str, number: int) -> None:
        self.by_result[result] += number

    @property
    def settled(self) -> int:
        return sum(self.by_result[result] for result in ("exported", "failed", "dropped"))


def exporting(world: World, limits: BatchLimits = AT_ONCE) -> tuple[Collector, Counts, SpanExport]:
    collector = Collector(world)
    counts = Counts(world)
    return collector, counts, SpanExport(collector, counts, limits, runtime=world)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the lines since its last call."""
    caplog.set_level(logging.INFO)

    def logged() -> list[str]:
        found = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
        caplog.clear()
        return found

    return logged


@schedules(20, is_late=False)
def test_a_full_batch_is_exported_at_once_and_another_after_the_delay(world: World) -> None:
    for batch_size, delay_seconds, waited_seconds in ((4, 60.0, 0.0), (50, 3.0, 3.0)):
        began = world.now - START_SECONDS
        collector, counts, export = exporting(world, BatchLimits(100, batch_size, delay_seconds))
        export.put(spans("a", 4))
        world.run_until(most_seconds=5.0)
        assert collector.batches == [["a"] * 4]
        assert collector.at_seconds == [pytest.approx(began + waited_seconds, abs=0.01)]
        assert export.close(60)
        assert counts.by_result == {"ended": 4, "exported": 4}
        assert collector.is_shut_down


@schedules(20)
def test_the_spans_of_a_request_stay_together(world: World) -> None:
    collector, _, export = exporting(world, BatchLimits(queue_size=100, batch_size=5, delay_seconds=60))
    for name, number in (("a", 3), ("b", 3), ("c", 9)):
        export.put(spans(name, number))
    assert export.close(60)
    assert collector.batches == [["a"] * 3, ["b"] * 3, ["c"] * 9]


@schedules(20)
def test_a_full_queue_drops_the_oldest_requests_and_counts_them(world: World, lines) -> None:
    collector, counts, export = exporting(world)
    collector.seconds = 3.0
    export.put(spans("under way", 1))
    world.run_until(most_seconds=1.0)
    assert collector.batches == [["under way"]]
    for name in ("a", "b", "c", "d"):
        export.put(spans(name, 3))
    assert counts.by_result == {"ended": 13, "dropped": 6}
    assert export.close(60)
    assert collector.batches[1:] == [["c"] * 3, ["d"] * 3]
    assert counts.by_result == {"ended": 13, "dropped": 6, "exported": 7}
    (line,) = lines()
    assert line.startswith(f"{LOST} they end faster than the collector accepts them.")


@schedules(400)
def test_every_span_that_ended_has_one_result_and_no_trace_is_cut(world: World) -> None:
    draw = world.random
    queue_size = draw.randint(1, 30)
    collector, counts, export = exporting(world, BatchLimits(queue_size, draw.randint(1, queue_size), draw.random()))
    collector.results = draw.choices([SUCCESS, FAILURE, RuntimeError()], k=60)
    collector.seconds = draw.choice([0.0, 0.01, 0.3])
    numbers = [draw.randint(1, 12) for _ in range(draw.randint(0, 60))]
    for trace, number in enumerate(numbers):
        world.call_later(2 * draw.random(), export.put, spans(f"{trace}", number))
    world.run_until(most_seconds=3 * draw.random())  # Some may end when it is closed.
    timeout_seconds = draw.choice([0.0, 0.1, 60.0])
    assert export.close(timeout_seconds) or timeout_seconds < 60.0
    world.run_until()
    assert counts.by_result["ended"] == sum(numbers) == counts.settled
    came = Counter(name for batch in collector.batches for name in batch)
    assert all(number == numbers[int(trace)] for trace, number in came.items())
    assert sum(len({*batch}) for batch in collector.batches) == len(came), "a trace is in two batches"


@schedules(5)
def test_repeated_failures_cause_one_warning(world: World, lines) -> None:
    collector, counts, export = exporting(world)
    collector.results = [SUCCESS, RuntimeError("no route"), FAILURE, FAILURE, SUCCESS, FAILURE]
    for _ in range(6):
        export.put(spans("a", 2))
        world.run_until(most_seconds=1.0)
    assert len(collector.batches) == 6
    assert export.close(60)
    assert lines() == [f"{LOST} RuntimeError('no route'). They are counted in /metrics."]
    assert counts.by_result == {"ended": 12, "exported": 4, "failed": 8}


@schedules(5, is_late=False)
def test_a_recovery_is_logged_when_no_span_was_lost_for_some_time(world: World, lines) -> None:
    collector, _, export = exporting(world)
    collector.results = [FAILURE, SUCCESS, SUCCESS, FAILURE]
    for gap_seconds in (RECOVERY_NS / 1e9 - 0.001, 0.002, 0.001, 0.001):
        export.put(spans("a", 3))
        world.run_until(most_seconds=gap_seconds)
    assert export.close(60)
    lost, recovered, lost_again = lines()
    assert recovered == "INFO Spans reach the collector again; 3 were lost."
    assert lost == f"{LOST} the exporter gave no reason. They are counted in /metrics."
    assert lost_again == lost


@schedules(20, is_late=False)
def test_close_drops_and_counts_spans_after_its_timeout(world: World, lines) -> None:
    collector, counts, export = exporting(world)
    collector.seconds = 60.0
    export.put(spans("hangs", 2))
    world.run_until(lambda: bool(collector.batches))
    export.put(spans("left", 5))
    assert not export.close(0.01)
    assert collector.is_shut_down
    assert counts.by_result == {"ended": 7, "dropped": 5}
    assert lines() == [
        "WARNING Trace export did not finish within 0.01 s; 5 spans are dropped, besides those being sent."
    ]
    world.run_until()
    assert counts.by_result == {"ended": 7, "dropped": 5, "exported": 2}


@schedules(5)
def test_spans_that_end_after_the_last_export_are_dropped_and_counted(world: World, lines) -> None:
    _, counts, export = exporting(world)
    assert export.close(60)
    export.put(spans("late", 3))
    assert counts.by_result == {"ended": 3, "dropped": 3}
    assert lines() == [f"{LOST} they ended after the last export. They are counted in /metrics."]


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
    export = SpanExport(CollectorExporter(unreachable_url, timeout=0.2), counts, AT_ONCE, runtime=World(0))
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
        export = SpanExport(
            CollectorExporter(f"{collector.url}/v1/traces"), counts, BatchLimits(8, 3, 60), runtime=THREADS
        )
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
        export = SpanExport(CollectorExporter(f"{url}/{status}"), counts, AT_ONCE, runtime=THREADS)
        export.put(spans("a", 1))
        assert export.close(60)
        assert Endless.taken.get() < 2**24  # what buffers of sockets hold, with some margin
    assert counts.by_result == {"ended": 1, result: 1}


def test_the_exporters_warnings_are_logged_again_after_close(unreachable_url: str, lines) -> None:
    exporter = CollectorExporter(unreachable_url)
    SpanExport(exporter, Counts(), AT_ONCE, runtime=World(0)).close(60)
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
