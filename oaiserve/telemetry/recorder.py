"""Takes the record of each ended request off the event loop: a queue, one thread, and the consumers it calls.

It knows nothing of what the consumers do; one that raises is logged and counted, and does not stop the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Event, Thread

from oaiserve.times import RequestRecord, monotonic_ns

Consumer = Callable[[RequestRecord], None]

logger = logging.getLogger(__name__)

_LOG_INTERVAL_NS = 60_000_000_000  # a consumer that always fails gets one line a minute, not one per request


class Recorder:
    """`count_error(name)` is told of each record that consumer `name` failed on, and with "queue" of each one dropped
    because `max_queued` others waited."""

    def __init__(
        self,
        consumers: Mapping[str, Consumer],
        count_error: Callable[[str], None],
        *,
        max_queued: int = 100_000,
        clock_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._consumers = dict(consumers)
        self._count_error = count_error
        self._max_queued = max_queued
        self._clock_ns = clock_ns
        self._queue: SimpleQueue[RequestRecord | Event | None] = SimpleQueue()
        self._logged_ns: dict[str, int] = {}
        self._thread = Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def record(self, record: RequestRecord) -> None:
        """Hands over one ended request. Never blocks and never raises; called on the event loop."""
        if self._queue.qsize() < self._max_queued:
            self._queue.put(record)
        else:
            self._count_error("queue")

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until the consumers have seen every record handed over so far. False: they had not in that time."""
        reached = Event()
        self._queue.put(reached)
        return reached.wait(timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """Lets the consumers see what is queued, then ends the thread. False: it had not ended in that time.
        Records that come later are ignored."""
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Event):
                item.set()
            else:
                self._tell_all(item)

    def _tell_all(self, record: RequestRecord) -> None:
        for name, consumer in self._consumers.items():
            try:
                consumer(record)
            except Exception:
                self._count_error(name)
                if self._is_time_to_log(name):
                    logger.exception(
                        "Telemetry consumer '%s' failed on request %s. Further failures are logged once a minute; "
                        "oaiserve_telemetry_errors_total counts them all.",
                        name,
                        record.request_id,
                    )

    def _is_time_to_log(self, name: str) -> bool:
        now_ns = self._clock_ns()
        if name in self._logged_ns and now_ns - self._logged_ns[name] < _LOG_INTERVAL_NS:
            return False
        self._logged_ns[name] = now_ns
        return True
