"""Takes the record of each ended request off the event loop: a queue, one thread, and the consumers it calls.

It knows nothing of what the consumers do; one that raises is logged and counted, and does not stop the others.

The thread is one of low priority, but not by a nice value: while it has the interpreter's lock everybody else waits for
it, and a niced thread that the system takes off its core keeps that lock. Beside two busy processes on two cores, a
thread that works for 10 ms at a time made the 99th percentile of a sleeper's lateness 9 ms, and with nice values of 10
and 19 it was 27 and 199 ms. So it wakes up seldom, and steps aside after each record: with that, 2 to 10 ms, whatever
the load.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread

from oaiserve.record import RequestRecord
from oaiserve.times import monotonic_ns

Consumer = Callable[[RequestRecord], None]

logger = logging.getLogger(__name__)

BATCH_SECONDS = 0.03  # requests of one batch often end in one step; so long the first record waits for the others
TICK_SECONDS = 1.0  # at least so often `tick` is called
ASIDE_SECONDS = 0.0002
MANY_QUEUED = 1000  # no stepping aside behind so many

_LOG_INTERVAL_NS = 60_000_000_000  # a consumer that always fails gets one line a minute, not one per request


class Recorder:
    """`tick` is called after each batch of records, before a flush returns, and in any case once a second, on the
    thread of the consumers. `count_error(name)` is told of each record that consumer `name` failed on, of each "tick"
    that did, and with "queue" of each record dropped because `max_queued` others waited."""

    def __init__(
        self,
        consumers: Mapping[str, Consumer],
        count_error: Callable[[str], None],
        tick: Callable[[], None] = lambda: None,
        *,
        max_queued: int = 100_000,
        batch_seconds: float = BATCH_SECONDS,
        tick_seconds: float = TICK_SECONDS,
        clock_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._consumers = dict(consumers)
        self._count_error = count_error
        self._tick = tick
        self._max_queued = max_queued
        self._batch_seconds = batch_seconds
        self._tick_seconds = tick_seconds
        self._clock_ns = clock_ns
        self._queue: SimpleQueue[RequestRecord | Event | None] = SimpleQueue()
        self._hurry = Event()  # somebody waits for us
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
        self._hurry.set()
        self._queue.put(reached)
        return reached.wait(timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """Lets the consumers see what is queued, then ends the thread. False: it had not ended in that time.
        Records that come later are ignored."""
        self._hurry.set()
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = self._take_batch()
            self._guarded("tick", self._tick, "at the end of a batch")

    def _take_batch(self) -> bool:
        """False: that was the last one."""
        try:
            item = self._queue.get(timeout=self._tick_seconds)
            if isinstance(item, RequestRecord):
                self._hurry.wait(self._batch_seconds)
            while item is not None:
                self._take(item)
                item = self._queue.get_nowait()
        except Empty:
            return True
        return False

    def _take(self, item: RequestRecord | Event) -> None:
        if isinstance(item, Event):
            self._guarded("tick", self._tick, "before a flush")
            self._hurry.clear()
            item.set()
            return
        for name, consumer in self._consumers.items():
            self._guarded(name, partial(consumer, item), f"on request {item.request_id}")
        if not self._hurry.is_set() and self._queue.qsize() < MANY_QUEUED:
            time.sleep(ASIDE_SECONDS)

    def _guarded(self, name: str, call: Callable[[], None], when: str) -> None:
        try:
            call()
        except Exception:
            self._count_error(name)
            if self._is_time_to_log(name):
                logger.exception(
                    "Telemetry consumer '%s' failed %s. Further failures are logged once a minute; "
                    "oaiserve_telemetry_errors_total counts them all.",
                    name,
                    when,
                )

    def _is_time_to_log(self, name: str) -> bool:
        now_ns = self._clock_ns()
        if name in self._logged_ns and now_ns - self._logged_ns[name] < _LOG_INTERVAL_NS:
            return False
        self._logged_ns[name] = now_ns
        return True
