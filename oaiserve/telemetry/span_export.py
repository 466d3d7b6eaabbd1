"""`SpanExport` queues spans and exports them to the collector in batches, on a separate thread.

A collector that is down, slow or full costs only spans, which are counted, and the spans of a request are exported
together or not at all. The warnings of the SDK's exporters, one for each attempt to send, stay out of the log.

The SDK's BatchSpanProcessor has the same purpose, but queues and drops single spans, so a full queue leaves parts of
traces. Its metrics count the spans that the exporter got, whether or not they were sent, and its shutdown may take 30
s.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import NamedTuple

from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter

from oaiserve.errors import StartupError
from oaiserve.runtime import AT_ONCE, ENDED, Runtime, When, Worker
from oaiserve.telemetry.otel import positive_integer

logger = logging.getLogger(__name__)

# A recovery is logged only after this long without a lost span, so a collector that accepts every other batch causes
# one line.
RECOVERY_NS = 10_000_000_000

CountSpans = Callable[[str, int], None]


class BatchLimits(NamedTuple):
    """The limits of the queue and of a batch, in spans. The spans of one request stay together even if they exceed
    these."""

    queue_size: int = 2048
    batch_size: int = 512
    delay_seconds: float = 5.0  # how long a batch waits to become full

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> BatchLimits:
        """Read the limits from the SDK's variables, with its defaults. Raises StartupError for an invalid limit."""
        queue_size = positive_integer(environ, OTEL_BSP_MAX_QUEUE_SIZE, 2048)
        batch_size = positive_integer(environ, OTEL_BSP_MAX_EXPORT_BATCH_SIZE, min(512, queue_size))
        if batch_size > queue_size:
            raise StartupError(
                f"{OTEL_BSP_MAX_EXPORT_BATCH_SIZE} is '{batch_size}', but must be at most {OTEL_BSP_MAX_QUEUE_SIZE} "
                f"({queue_size})."
            )
        return cls(queue_size, batch_size, positive_integer(environ, OTEL_BSP_SCHEDULE_DELAY, 5000) / 1000)


class SpanExport:
    """A bounded queue of spans and the worker that exports them.

    `count_spans(result, number)` is called twice for each span: with "ended", and then with "exported", "failed" (the
    collector did not accept it) or "dropped" (the queue was full, `close` ran out of time, or the span ended after it).
    Both threads call it. One line is logged when spans begin to be lost, and one when no span was lost for RECOVERY_NS.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        count_spans: CountSpans,
        limits: BatchLimits | None = None,
        *,
        runtime: Runtime,
    ) -> None:
        self._exporter = exporter
        self._first_warning = ""  # the exporter's first warning in the last export
        # A CollectorExporter logs under the name of the SDK's exporter.
        self._exporters_logger = logging.getLogger(getattr(exporter, "logger_name", type(exporter).__module__))
        self._exporters_logger.addFilter(self._filter)
        self._count_spans = count_spans
        self._limits = limits or BatchLimits.from_environment()
        self._delay_ns = int(self._limits.delay_seconds * 1e9)
        self._clock_ns = runtime.clock_ns
        self._lock = Lock()  # guards all attributes below
        self._queue: deque[Sequence[ReadableSpan]] = deque()  # the spans of one request each, the oldest first
        self._num_queued = 0  # spans in the queue
        self._num_lost = 0  # spans lost since the warning; 0 after a recovery
        self._lost_ns = 0  # when a span was last lost
        self._due_ns = 0  # when the next batch is sent even if it isn't full
        self._waits = False  # the worker found nothing to do
        self._is_closing = False
        self._is_closed = False  # the worker takes no more spans from the queue
        self._worker: Worker[None] = runtime.worker("span-export", self._turn, self._plan)
        self._worker.start()

    def put(self, spans: Sequence[ReadableSpan]) -> None:
        """Queue the spans of one request without blocking. If the queue is full, the oldest requests' spans are
        dropped."""
        self._count_spans("ended", len(spans))
        num_dropped = 0
        why = "they end faster than the collector accepts them"
        with self._lock:
            if self._is_closed:
                num_dropped = len(spans)
                why = "they ended after the last export"
            else:
                while self._queue and self._num_queued + len(spans) > self._limits.queue_size:
                    num_dropped += len(self._take())
                self._queue.append(spans)
                self._num_queued += len(spans)
                if self._num_queued >= self._limits.batch_size:
                    self._wake()
        if num_dropped:
            self._lose("dropped", num_dropped, why)

    def close(self, timeout_seconds: float) -> bool:
        """Export the spans that are still queued. If the timeout comes first, drop the rest and return False."""
        with self._lock:
            self._is_closing = True
            self._wake()
        has_ended = self._worker.join(timeout_seconds)
        if not has_ended:
            with self._lock:
                self._is_closed = True
                num_left = self._num_queued
                self._num_queued = 0
                self._queue.clear()
            self._count_spans("dropped", num_left)
            logger.warning(
                "Trace export did not finish within %g s; %d spans are dropped, besides those being sent.",
                timeout_seconds,
                num_left,
            )
        self._exporter.shutdown()  # this also interrupts a wait before a retry
        if has_ended:
            self._exporters_logger.removeFilter(self._filter)
        return has_ended

    def _wake(self) -> None:
        if self._waits:
            self._waits = False
            self._worker.post(None)

    def _plan(self) -> None:
        self._due_ns = self._clock_ns() + self._delay_ns

    def _turn(self) -> When:
        """Export the next batch, if it is full or its delay is over."""
        self._worker.clear()
        with self._lock:
            self._waits = False
            is_due = self._num_queued >= self._limits.batch_size or self._clock_ns() >= self._due_ns
            if not is_due and not self._is_closing:
                self._waits = True
                return self._due_ns
            batch: list[ReadableSpan] = []
            while self._queue and (not batch or len(batch) + len(self._queue[0]) <= self._limits.batch_size):
                batch += self._take()
            if not batch and self._is_closing:
                self._is_closed = True
                return ENDED
        if batch:
            num_failed, reason = self._export(batch)
            if num_failed < len(batch):
                self._count_spans("exported", len(batch) - num_failed)
            if num_failed:
                self._lose("failed", num_failed, reason)
            else:
                self._recover()
        self._plan()
        return AT_ONCE

    def _export(self, batch: list[ReadableSpan]) -> tuple[int, str]:
        """Export spans. Return how many of them failed, and the reason."""
        self._first_warning = ""
        try:
            is_exported = self._exporter.export(batch).name == "SUCCESS"
        except Exception as error:  # an exporter may raise anything, and the thread must survive it
            return len(batch), repr(error)
        if is_exported:
            # Only a CollectorExporter knows how many spans the collector rejected.
            num_rejected, reason = getattr(self._exporter, "rejected", (0, ""))
            return min(num_rejected, len(batch)), reason or "the collector rejects some of them"
        return len(batch), self._first_warning.rstrip(".") or "the exporter gave no reason"

    def _filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self._first_warning = self._first_warning or record.getMessage()
        return record.levelno < logging.WARNING

    def _take(self) -> Sequence[ReadableSpan]:
        spans = self._queue.popleft()
        self._num_queued -= len(spans)
        return spans

    def _lose(self, result: str, number: int, why: str) -> None:
        self._count_spans(result, number)
        with self._lock:
            is_first = self._num_lost == 0
            self._num_lost += number
            self._lost_ns = self._clock_ns()
        if is_first:
            logger.warning("Spans are being lost: %s. They are counted in /metrics.", why)

    def _recover(self) -> None:
        with self._lock:
            if self._num_lost == 0 or self._clock_ns() - self._lost_ns < RECOVERY_NS:
                return
            num_lost = self._num_lost
            self._num_lost = 0
        logger.info("Spans reach the collector again; %d were lost.", num_lost)
