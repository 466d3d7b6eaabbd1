"""From the telemetry thread to the collector: a bounded queue of spans, and the thread that sends them in batches.

A collector that is down, slow or full costs spans, which are counted, and nothing else. The SDK's BatchSpanProcessor
does the same, but tells nobody how many it dropped, and leaves halves of traces.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import NamedTuple

from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from oaiserve.telemetry.complaints import Complaints
from oaiserve.times import monotonic_ns

logger = logging.getLogger(__name__)

CALM_NS = 10_000_000_000  # a collector that takes every other batch is one line, not one for each

CountSpans = Callable[[str, int], None]


class BatchLimits(NamedTuple):
    """Both sizes in spans. The spans of one request stay together, also where they are more than that."""

    queue_size: int = 2048
    batch_size: int = 512
    delay_seconds: float = 5.0  # so long a batch that is not full waits for more

    @classmethod
    def from_environment(cls) -> BatchLimits:
        """The SDK's variables and defaults. Raises ValueError where one of them is no such limit."""
        queue_size = _positive(OTEL_BSP_MAX_QUEUE_SIZE, 2048)
        batch_size = _positive(OTEL_BSP_MAX_EXPORT_BATCH_SIZE, min(512, queue_size))
        if batch_size > queue_size:
            raise ValueError(
                f"{OTEL_BSP_MAX_EXPORT_BATCH_SIZE} must be at most {OTEL_BSP_MAX_QUEUE_SIZE} ({queue_size}) "
                f"but is {batch_size}"
            )
        return cls(queue_size, batch_size, _positive(OTEL_BSP_SCHEDULE_DELAY, 5000) / 1000)


def _positive(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError(f"{variable} must be an integer of at least 1 but is {text}")
    return int(text)


class SpanExport:
    """`count_spans(result, number)` hears of each span twice: "ended", and then "exported", "failed" (the collector did
    not take it) or "dropped" (the queue was full, or the time at the end too short). It is called by both threads.

    Losing spans is one line in the log when it begins, and one when none was lost for CALM_NS.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        count_spans: CountSpans,
        limits: BatchLimits | None = None,
        clock_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._exporter = exporter
        self._count_spans = count_spans
        self._limits = limits or BatchLimits.from_environment()
        self._clock_ns = clock_ns
        self._changed = Condition()
        self._queue: deque[Sequence[ReadableSpan]] = deque()  # an item for each request, oldest first
        self._num_queued = 0  # spans
        self._num_lost = 0  # since spans began to be lost
        self._lost_ns = 0  # when the last of these was
        self._is_closing = False
        self._complaints = Complaints(exporter)
        self._thread = Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[ReadableSpan]) -> None:
        """Takes the spans of one request. Waits for nobody: where the queue is full, the oldest requests make room."""
        self._count_spans("ended", len(spans))
        num_dropped = 0
        with self._changed:
            while self._queue and self._num_queued + len(spans) > self._limits.queue_size:
                num_dropped += len(self._take())
            self._queue.append(spans)
            self._num_queued += len(spans)
            if self._num_queued >= self._limits.batch_size:
                self._changed.notify()
        if num_dropped:
            self._lose("dropped", num_dropped, "they come faster than the collector takes them")

    def close(self, timeout_seconds: float) -> bool:
        """Sends what is queued, waiting no longer than that. False: it took longer, and the rest is dropped. Nothing
        may be put in afterwards."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_seconds)
        has_ended = not self._thread.is_alive()
        if not has_ended:
            with self._changed:
                num_left, self._num_queued = self._num_queued, 0
                self._queue.clear()
            self._count_spans("dropped", num_left)
            logger.warning(
                "Trace export did not finish within %g s; %d spans are dropped, besides those on their way.",
                timeout_seconds,
                num_left,
            )
        self._exporter.shutdown()  # also ends its wait for another try
        if has_ended:
            self._complaints.stop()
        return has_ended

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._is_time, self._limits.delay_seconds)
                batch = self._next_batch()
                if not batch and self._is_closing:
                    return
            if batch:
                self._export(batch)

    def _is_time(self) -> bool:
        return self._is_closing or self._num_queued >= self._limits.batch_size

    def _next_batch(self) -> list[ReadableSpan]:
        batch: list[ReadableSpan] = []
        while self._queue and (not batch or len(batch) + len(self._queue[0]) <= self._limits.batch_size):
            batch += self._take()
        return batch

    def _take(self) -> Sequence[ReadableSpan]:
        spans = self._queue.popleft()
        self._num_queued -= len(spans)
        return spans

    def _export(self, batch: list[ReadableSpan]) -> None:
        self._complaints.first = None
        try:
            is_exported = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # exporters are not ours; the thread must outlive whatever they do
            is_exported, self._complaints.first = False, repr(error)
        if is_exported:
            self._count_spans("exported", len(batch))
            self._recover()
        else:
            self._lose("failed", len(batch), self._complaints.first or "the exporter gave no reason")

    def _lose(self, result: str, number: int, why: str) -> None:
        self._count_spans(result, number)
        with self._changed:
            is_news = self._num_lost == 0
            self._num_lost += number
            self._lost_ns = self._clock_ns()
        if is_news:
            logger.warning("Spans are being lost: %s. The metric oaiserve_spans_total counts them.", why.rstrip("."))

    def _recover(self) -> None:
        with self._changed:
            if self._num_lost == 0 or self._clock_ns() - self._lost_ns < CALM_NS:
                return
            num_lost, self._num_lost = self._num_lost, 0
        logger.info("Spans reach the collector again; %d were lost.", num_lost)
