"""`Recorder` takes the records of ended requests off the event loop and passes them to consumers on a thread.

It does not know what the consumers do. A consumer that raises is logged and counted, and does not stop the others.

The thread has a low priority, but not by a nice value: while it holds the GIL, all other threads wait for it, and a
niced thread that the system takes off its core keeps the GIL. On two cores, next to two busy processes, a thread that
worked for 10 ms at a time delayed the wake-up of another sleeping thread by 9 ms (99th percentile); with nice values of
10 and 19 the delay was 27 and 199 ms. So the telemetry thread wakes up seldom, and sleeps briefly after each record.
The delay is then 2 to 10 ms, at any load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread

from oaiserve.facts.record import RequestRecord
from oaiserve.facts.times import monotonic_ns

Consumer = Callable[[RequestRecord], None]

logger = logging.getLogger(__name__)

BATCH_SECONDS = 0.03  # the first record of a batch waits for others: requests often end in the same step
TICK_SECONDS = 1.0  # the longest time between two calls of `tick`
YIELD_SECONDS = 0.0002  # the sleep after a record
YIELD_MAX_QUEUED = 1000  # with this many records in the queue, the thread does not sleep

_LOG_INTERVAL_NS = 60_000_000_000  # a consumer that always fails logs one line a minute, not one per request


class Recorder:
    """A queue of records, and the thread for the consumers.

    The thread also calls `tick`: after each batch of records, and at least once a second.
    `count_error(name)` is called when consumer `name` or the "tick" raises, and with "queue" when a record is dropped
    because `max_queued` records are waiting.
    """

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
        self._queue: SimpleQueue[RequestRecord | Event | None] = SimpleQueue()  # an event is set in its turn
        self._urgent = Event()  # set by close, so that the thread does not wait for batches
        self._logged_ns: dict[str, int] = {}
        self._thread = Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def record(self, record: RequestRecord) -> None:
        """Queue the record of an ended request. The event loop calls this, so it never blocks and never raises."""
        if self._queue.qsize() < self._max_queued:
            self._queue.put(record)
        else:
            self._count_error("queue")

    def wait_for_queued(self, timeout_seconds: float) -> None:
        """Wait until the records that are queued now have been passed on, or the timeout comes."""
        passed = Event()
        self._queue.put(passed)
        passed.wait(timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """Pass the queued records to the consumers, and accept no later ones. Return False if the timeout comes
        first."""
        self._urgent.set()
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Pass one batch of records after the other to the consumers, until the recorder is closed."""
        item: RequestRecord | Event | None
        is_closed = False
        while not is_closed:
            with suppress(Empty):
                item = self._queue.get(timeout=self._tick_seconds)
                if item is not None:
                    self._urgent.wait(self._batch_seconds)
                while item is not None:
                    if isinstance(item, Event):
                        item.set()
                    else:
                        self._pass_on(item)
                    item = self._queue.get_nowait()
                is_closed = True
            self._call("tick", self._tick, "at the end of a batch")

    def _pass_on(self, record: RequestRecord) -> None:
        for name, consumer in self._consumers.items():
            self._call(name, partial(consumer, record), f"on request {record.request_id}")
        if self._queue.qsize() < YIELD_MAX_QUEUED:
            self._urgent.wait(YIELD_SECONDS)

    def _call(self, name: str, function: Callable[[], None], when: str) -> None:
        """Call the function, and count and log an exception instead of raising it.

        A refusal of the system, such as a full disk, is not a bug, so its traceback would only hide the reason.
        """
        try:
            function()
        except BaseException as error:  # A plug-in's SystemExit would end the thread, and with it all telemetry.
            self._count_error(name)
            now_ns = self._clock_ns()
            if name in self._logged_ns and now_ns - self._logged_ns[name] < _LOG_INTERVAL_NS:
                return
            self._logged_ns[name] = now_ns
            reason = ""
            bug: BaseException | None = error
            if isinstance(error, OSError):
                bug = None
                where = "" if error.filename is None else f" ({error.filename})"
                reason = f": {error.strerror or error}{where}"
            logger.log(
                logging.ERROR if bug else logging.WARNING,
                "Telemetry consumer '%s' failed %s%s. Further failures are logged once a minute; "
                "oaiserve_telemetry_errors_total counts them all.",
                name,
                when,
                reason,
                exc_info=bug,
            )
