"""`Recorder` takes the records of ended requests off the event loop and passes them to consumers on a thread.

It does not know what the consumers do. A consumer that raises is logged and counted, and does not stop the others.

The thread has a low priority, but not through a nice value: while it holds the GIL, all other threads wait for it, and
a niced thread that loses its core still holds the GIL. On two cores, next to two busy processes, a thread that worked
for 10 ms at a time delayed the wake-up of another sleeping thread by 9 ms (99th percentile); with nice values of 10 and
19 the delay was 27 and 199 ms. So the telemetry thread wakes up seldom, and pauses briefly after each record. The delay
is then 2 to 10 ms, at any load.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from oaiserve.facts.record import RequestRecord
from oaiserve.runtime import AT_ONCE, ENDED, Runtime, When, Worker

Consumer = Callable[[RequestRecord], None]

logger = logging.getLogger(__name__)

BATCH_SECONDS = 0.03  # how long a batch waits after its first record, because requests often end in the same step
TICK_SECONDS = 1.0  # the longest time between two calls of `tick`
YIELD_NS = 200_000  # pause after each record
YIELD_MAX_QUEUED = 1000  # With this many queued records, the thread takes no pauses.

_LOG_INTERVAL_NS = 60_000_000_000  # a consumer that always fails logs one line a minute, not one per request


class Recorder:
    """A queue of records, and the worker for the consumers.

    The worker also calls `tick`: after each batch of records, and at least once a second. `count_error(name)` is called
    when consumer `name` or the "tick" raises, and with "queue" when a record is dropped, because `max_queued` records
    are waiting or the recorder is closed.
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
        runtime: Runtime,
    ) -> None:
        self._consumers = dict(consumers)
        self._count_error = count_error
        self._tick = tick
        self._max_queued = max_queued
        self._batch_ns = int(batch_seconds * 1e9)
        self._tick_ns = int(tick_seconds * 1e9)
        self._runtime = runtime
        self._clock_ns = runtime.clock_ns
        # An item in the worker's inbox only wakes it up. Only the first record of a batch posts one, and none is posted
        # during a pause. A future in the queue is resolved when its turn comes.
        self._queue: deque[RequestRecord | Future[None]] = deque()
        self._waits_for_first = False
        self._batch_at_ns: int | None = None  # when the current batch is passed on; None if it has no record yet
        self._tick_at_ns = 0
        self._is_closed = False
        self._logged_ns: dict[str, int] = {}
        self._worker: Worker[None] = runtime.worker("telemetry", self._turn, self._plan_tick)
        self._worker.start()

    def record(self, record: RequestRecord) -> None:
        """Queue the record of an ended request. The event loop calls this, so it never blocks and never raises."""
        if len(self._queue) < self._max_queued:
            self._queue.append(record)
            if self._waits_for_first:
                self._wake()
        else:
            self._count_error("queue")

    def wait_for_queued(self, timeout_seconds: float) -> None:
        """Wait until all records that are in the queue now have been passed on, or until the timeout."""
        passed: Future[None] = self._runtime.future()
        self._queue.append(passed)
        self._wake()
        with suppress(TimeoutError):
            passed.result(timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """Pass the queued records to the consumers, and accept no later ones. Return False if the timeout comes
        first."""
        self._max_queued = 0
        self._is_closed = True
        self._worker.post(None)
        return self._worker.join(timeout_seconds)

    def _wake(self) -> None:
        self._waits_for_first = False
        self._worker.post(None)

    def _plan_tick(self) -> None:
        self._tick_at_ns = self._clock_ns() + self._tick_ns

    def _turn(self) -> When:
        """Pass on the next record of the batch. After the last one, or when a tick is due, call `tick`."""
        self._worker.clear()
        self._waits_for_first = False
        now_ns = self._clock_ns()
        if self._queue:
            if self._batch_at_ns is None:
                self._batch_at_ns = now_ns + self._batch_ns
            if now_ns < self._batch_at_ns and not self._is_closed:
                return self._batch_at_ns
            return self._pass_on(self._queue.popleft())
        is_closed = self._is_closed  # read before the tick, so that closing during a tick leads to another
        if self._batch_at_ns is not None or is_closed or now_ns >= self._tick_at_ns:
            self._batch_at_ns = None
            self._call("tick", self._tick, "at the end of a batch")
            self._plan_tick()
        if is_closed and not self._queue:
            return ENDED
        # This is set before the queue is checked once more, so a record is either seen now, or wakes the worker up.
        self._waits_for_first = True
        if self._queue:
            return AT_ONCE
        return self._tick_at_ns

    def _pass_on(self, item: RequestRecord | Future[None]) -> When:
        """Pass an item on, and return the time at which the next one may follow."""
        if isinstance(item, Future):
            item.set_result(None)
            return AT_ONCE
        for name, consumer in self._consumers.items():
            self._call(name, partial(consumer, item), f"on request {item.request_id}")
        if self._is_closed or len(self._queue) >= YIELD_MAX_QUEUED:
            return AT_ONCE
        return self._clock_ns() + YIELD_NS

    def _call(self, name: str, function: Callable[[], None], when: str) -> None:
        """Call the function, and count and log an exception instead of raising it.

        An error of the operating system, such as a full disk, is not a bug, so it is logged without a traceback.
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
