"""Time, threads and randomness: everything that makes two runs of a program differ.

Components get a `Runtime` passed in. `THREADS` is the real one, in which each worker is a thread. Tests have a
simulated one, in which a single thread takes the turns of all workers in an order that depends on a seed, and the clock
jumps to the next moment at which something happens.

A worker has an inbox and a turn. A turn takes items from the inbox, does one piece of work without blocking, and
returns the time at which it is to be called again.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from enum import Enum, auto
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

__all__ = [
    "AT_ONCE",
    "ENDED",
    "THREADS",
    "Empty",
    "Executor",
    "Priority",
    "Queue",
    "Runtime",
    "Threads",
    "Turn",
    "When",
    "Worker",
]

Item = TypeVar("Item")

# What a turn returns: the time on the clock, in ns, of the next turn, which an item brings forward; or None to wait for
# an item.
When: TypeAlias = int | None
AT_ONCE = 0
ENDED = -1  # This was the last turn.
Turn: TypeAlias = Callable[[], When]

NICENESS = 8  # added to the nice value for Priority.LOW
MOST_WAIT_SECONDS = 3600.0  # The system rejects waits of centuries, which a time limit may ask for.


class Priority(Enum):
    """Which workers get the cores if there are too few."""

    NORMAL = auto()
    LOW = auto()  # about a seventh of a core that the model needs, too
    IDLE = auto()  # only time that no other thread on the machine needs


class Worker(Protocol[Item]):
    """Has an inbox, and takes turns in which it reads items from it. Items posted before it starts wait for its first
    turn; those posted after its end are ignored."""

    @property
    def is_alive(self) -> bool:
        """Whether the worker has been started and has not ended."""
        ...

    def start(self) -> None:
        """Start the worker, and wait until it has called `begin`."""
        ...

    def post(self, item: Item, /) -> None:
        """Put an item into the inbox, which brings the next turn forward. Any thread may call this."""
        ...

    def take(self) -> Item:
        """Take the oldest item. Raises Empty if there is none. Only a turn may call this, or any thread after the last
        turn."""
        ...

    def clear(self) -> None:
        """Drop all items in the inbox, for a worker that items only wake up. The same threads may call this as
        `take`."""
        ...

    def num_waiting(self) -> int:
        """Return the approximate number of items in the inbox."""
        ...

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the worker has ended, if it was started. Return False if the timeout comes first."""
        ...


class Queue(Protocol[Item]):
    """An unbounded queue between threads."""

    def put(self, item: Item, /) -> None: ...

    def get(self, *, timeout: float | None = None) -> Item:
        """Wait for the oldest item, and take it. Raises Empty after `timeout` seconds."""
        ...


class Runtime(Protocol):
    """The clocks, the threads and the randomness of a process."""

    def clock_ns(self) -> int:
        """Return the time of the monotonic clock."""
        ...

    def unix_ns(self) -> int:
        """Return the time since 1970 on the wall clock, which people may set."""
        ...

    def thread_cpu_ns(self) -> int:
        """Return the CPU time of the calling thread."""
        ...

    def token_hex(self, num_bytes: int) -> str:
        """Return this many random bytes in hexadecimal, which nobody can guess."""
        ...

    def worker(
        self,
        name: str,
        turn: Turn,
        begin: Callable[[], None] = lambda: None,
        *,
        priority: Priority = Priority.NORMAL,
    ) -> Worker[Any]:
        """Return a worker that is not started yet. `begin` is called on its thread before the first turn; `start`
        raises its errors. An error of `begin` or of a turn ends the worker."""
        ...

    def future(self) -> Future[Any]:
        """Return a future on which threads may wait."""
        ...

    def queue(self) -> Queue[Any]:
        """Return a queue through which workers pass items to a waiting caller."""
        ...

    def executor(self, name: str) -> Executor:
        """Return an executor with one thread, for calls that block, such as on a disk. The thread is started at once,
        because later the system may have none left."""
        ...

    def later(self, name: str, seconds: float, call: Callable[[], object]) -> None:
        """Make a call on a thread after some seconds, or earlier if the main thread ends. The process waits for that
        call before it exits."""
        ...


class _ThreadWorker(Generic[Item]):
    """A worker on a separate thread, which sleeps between its turns."""

    def __init__(
        self, name: str, turn: Turn, begin: Callable[[], None], priority: Priority, clock_ns: Callable[[], int]
    ) -> None:
        self._clock_ns = clock_ns
        self._turn = turn
        self._begin = begin
        self._priority = priority
        self._inbox: SimpleQueue[Item] = SimpleQueue()
        self._first: list[Item] = []  # the item that ended the last sleep, until it is taken
        self._begun = Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self.post = self._inbox.put
        self.num_waiting = self._inbox.qsize

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()
        self._begun.wait()
        if self._error is not None:
            raise self._error

    def take(self) -> Item:
        if self._first:
            return self._first.pop()
        return self._inbox.get_nowait()

    def clear(self) -> None:
        self._first.clear()
        while not self._inbox.empty():
            self._inbox.get_nowait()

    def join(self, timeout_seconds: float | None = None) -> bool:
        if self._thread.ident is not None:  # it has been started
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            _give_priority(self._priority)
            self._begin()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._begun.set()
        while (when := self._turn()) != ENDED:
            if when == AT_ONCE or self._first:
                continue
            if when is None:
                seconds = None
            else:
                seconds = min(MOST_WAIT_SECONDS, max(0.0, (when - self._clock_ns()) / 1e9))
            with suppress(Empty):
                self._first.append(self._inbox.get(timeout=seconds))


def _give_priority(priority: Priority) -> None:
    """Give the calling thread a priority."""
    if sys.platform == "linux":  # Other systems would change the priority of the whole process.
        with suppress(OSError):  # A sandbox may forbid it; the worker then keeps its priority.
            if priority is Priority.LOW:
                os.nice(NICENESS)
            elif priority is Priority.IDLE:
                os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


class Threads:
    """The real runtime. Tests may replace its clock."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock_ns = clock_ns

    unix_ns = staticmethod(time.time_ns)
    thread_cpu_ns = staticmethod(time.thread_time_ns)
    token_hex = staticmethod(secrets.token_hex)

    def worker(
        self,
        name: str,
        turn: Turn,
        begin: Callable[[], None] = lambda: None,
        *,
        priority: Priority = Priority.NORMAL,
    ) -> Worker[Any]:
        return _ThreadWorker(name, turn, begin, priority, self.clock_ns)

    def future(self) -> Future[Any]:
        return Future()

    def queue(self) -> Queue[Any]:
        return SimpleQueue()

    def executor(self, name: str) -> Executor:
        executor = ThreadPoolExecutor(1, name)
        executor.submit(bool)
        return executor

    def later(self, name: str, seconds: float, call: Callable[[], object]) -> None:
        def run() -> None:
            threading.main_thread().join(seconds)
            call()

        Thread(target=run, name=name, daemon=False).start()


THREADS = Threads()
