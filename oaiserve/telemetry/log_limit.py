"""`LogLimit` limits repeated log messages that clients can cause, and counts those left out. Stdlib only."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock
from types import TracebackType

REQUESTS = "oaiserve.request"  # the logger of requests' lines, which are not limited


@dataclass(slots=True)
class _Window:
    """The messages of one kind since `start_ns`."""

    start_ns: int
    first: logging.LogRecord
    num_left_out: int = 0
    num_written: int = 1


class LogLimit:
    """Lets a handler write only the first messages of each kind per minute, and counts the rest. Applies from level
    WARNING on.

    Two messages are of the same kind if they have the same logger, level, text before formatting, and place of the
    exception. `tell` writes how many were left out. The lines of requests are not limited, because each is about
    another request. Any thread may call any method.
    """

    MOST = 5
    WINDOW_NS = 60_000_000_000
    MOST_KINDS = 500  # above this number of kinds, all messages of a logger and level count as one kind

    def __init__(self, handler: logging.Handler, clock_ns: Callable[[], int]) -> None:
        self._handler = handler
        self._clock_ns = clock_ns
        self._lock = Lock()
        self._windows: dict[Hashable, _Window] = {}
        self._counts: Counter[tuple[str, ...]] = Counter()
        handler.addFilter(self._filter)

    def counts(self) -> dict[tuple[str, ...], int]:
        """Return the number of messages so far, by level and result, which is "written" or "left_out"."""
        with self._lock:
            return dict(self._counts)

    def tell(self, *, at_once: bool = False) -> None:
        """Write how many messages were left out in each minute that has passed, or, with `at_once`, so far. Call this
        about once a second."""
        with self._lock:
            since_ns = self._clock_ns() - self.WINDOW_NS
            over = [kind for kind, window in self._windows.items() if at_once or window.start_ns <= since_ns]
            ended = [self._windows.pop(kind) for kind in over]
            incomplete = [window for window in ended if window.num_left_out]
            for window in incomplete:
                self._counts[window.first.levelname.lower(), "written"] += 1
        for window in incomplete:
            self._handler.acquire()
            try:
                self._handler.emit(_left_out(window))
            finally:
                self._handler.release()

    def _filter(self, record: logging.LogRecord) -> bool:
        self.tell()
        with self._lock:
            is_written = record.levelno < logging.WARNING or record.name == REQUESTS or self._is_early(record)
            self._counts[record.levelname.lower(), "written" if is_written else "left_out"] += 1
        return is_written

    def _is_early(self, record: logging.LogRecord) -> bool:
        """Count the message, and return whether it is among the first of its kind."""
        kind: Hashable = (record.name, record.levelno, str(record.msg), _place(record))
        if kind not in self._windows and len(self._windows) >= self.MOST_KINDS:
            kind = (record.name, record.levelno)
        window = self._windows.get(kind)
        if window is None:
            self._windows[kind] = _Window(self._clock_ns(), record)
            return True
        if window.num_written < self.MOST:
            window.num_written += 1
            return True
        window.num_left_out += 1
        return False


def _place(record: logging.LogRecord) -> Hashable:
    """Return the type of the record's exception, and where it was raised."""
    if not record.exc_info or record.exc_info[0] is None:
        return None
    raised: TracebackType | None = record.exc_info[2]
    while raised is not None and raised.tb_next is not None:
        raised = raised.tb_next
    return record.exc_info[0], raised and (raised.tb_frame.f_code.co_filename, raised.tb_lineno)


def _left_out(window: _Window) -> logging.LogRecord:
    first = window.first
    more = "%d more message like this one was" if window.num_left_out == 1 else "%d more messages like this one were"
    return logging.makeLogRecord(
        {
            "name": first.name,
            "levelno": first.levelno,
            "levelname": first.levelname,
            "msg": f"{more} left out: %s",
            "args": (window.num_left_out, first.getMessage()),
            "left_out": window.num_left_out,
        }
    )
