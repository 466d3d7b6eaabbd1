"""Let threads pause where they meet, so that a test which depends on their pace fails:

    make chaos

Each thread of a test draws its pauses from CHAOS_SEED, the test's name and its own place among the threads, so a run
with the same seed has the same pauses. Nobody pauses while there is only one thread, as in simulated schedules.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.thread import ThreadPoolExecutor, _WorkItem
from functools import partial, wraps
from time import sleep
from typing import Any

import pytest
import uvloop

# Each thread draws one of these shares of places at which it pauses, and one of these longest pauses.
SHARES = (0.0, 0.02, 0.1, 0.5)
MOST_SECONDS = (0.0001, 0.001, 0.005, 0.03)
ALL_SECONDS = 1.0  # A thread pauses no longer than this in a test, so that long tests still end in time.
_allocate_lock = threading.Lock


class Pauses:
    """The pauses of one thread in one test."""

    def __init__(self, seed: str) -> None:
        self.num_threads = 0  # The thread has started this many others.
        self._random = random.Random(seed)
        self._share = self._random.choice(SHARES)
        self._most_seconds = self._random.choice(MOST_SECONDS)
        self._left_seconds = ALL_SECONDS

    def next(self) -> float | None:
        """Return the seconds of the next pause, or None if there is none at this place."""
        if self._left_seconds < 0 or self._random.random() >= self._share:
            return None
        seconds = self._random.uniform(0.0, self._most_seconds)
        self._left_seconds -= seconds
        return seconds


class Chaos:
    """A plug-in of pytest. Threads that Python has not started never pause, such as those of pytest-xdist."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._num_threads = 0
        self._counting = _allocate_lock()
        self._test = ""
        self._here = threading.local()

    def pause(self) -> None:
        """Let the calling thread pause, or not."""
        if not self._num_threads or not self._test:
            return
        pauses = self._pauses()
        seconds = None if pauses is None else pauses.next()
        if seconds is not None:
            sleep(seconds)

    def _count(self, threads: int) -> None:
        with self._counting:
            self._num_threads += threads

    def _pauses(self) -> Pauses | None:
        """Return the pauses of the calling thread, with the place of the thread where it has been started."""
        here = self._here
        place = getattr(here, "place", None)
        if place is None:
            return None
        if here.test != self._test:
            here.test = self._test
            here.pauses = Pauses(f"{self.seed} {self._test} {place}")
        pauses: Pauses = here.pauses
        return pauses

    # -- what pytest calls --------------------------------------------------------------------------------------------

    def pytest_report_header(self) -> str:
        return f"chaos: CHAOS_SEED={self.seed}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._test = item.nodeid
        self._here.test = ""
        self._here.place = "0"
        try:
            return (yield)
        finally:
            self._test = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[pytest.TestReport]:
        report: pytest.TestReport = yield
        if report.failed:
            report.sections.append(("chaos", f"CHAOS_SEED={self.seed} repeats these pauses."))
        return report

    # -- the places at which threads meet -----------------------------------------------------------------------------

    def install(self) -> None:
        """Let threads pause before and after each call by which one can notice another."""
        for kind, names in (
            (queue.Queue, ("put", "get")),
            (threading.Condition, ("__enter__", "wait", "notify")),
            (threading.Event, ("set", "wait")),
            (ThreadPoolExecutor, ("submit",)),
            (_WorkItem, ("run",)),
            (concurrent.futures.Future, ("set_result", "set_exception")),
        ):
            for name in names:
                setattr(kind, name, self._with_pauses(getattr(kind, name)))
        # Types of C keep their methods. Modules that import their names from now on get these in their place.
        queue.SimpleQueue = self._simple_queue()
        threading.Lock = partial(_Lock, self.pause)
        threading.Thread.start = self._start(threading.Thread.start)
        for loop in (asyncio.BaseEventLoop, uvloop.Loop):
            for name in ("call_soon", "call_soon_threadsafe"):
                setattr(loop, name, self._with_late_callback(getattr(loop, name)))

    def _with_pauses(self, function: Callable[..., Any]) -> Callable[..., Any]:
        pause = self.pause

        @wraps(function)
        def paused(*given: Any, **named: Any) -> Any:
            pause()
            result = function(*given, **named)
            pause()
            return result

        return paused

    def _with_late_callback(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        pause = self.pause

        def late(callback: Callable[..., Any], *given: Any) -> None:
            pause()
            callback(*given)

        @wraps(schedule)
        def paused(loop: Any, callback: Callable[..., Any], *given: Any, context: Any = None) -> Any:
            pause()
            handle = schedule(loop, late, callback, *given, context=context)
            pause()
            return handle

        return paused

    def _simple_queue(self) -> type:
        pause = self.pause

        class SimpleQueue(queue.SimpleQueue):
            def put(self, *given: Any, **named: Any) -> None:
                pause()
                super().put(*given, **named)
                pause()

            def get(self, *given: Any, **named: Any) -> Any:
                pause()
                item = super().get(*given, **named)
                pause()
                return item

        return SimpleQueue

    def _start(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def paused(thread: threading.Thread) -> None:
            parent = self._pauses()
            place = None
            if parent is not None:
                parent.num_threads += 1
                place = f"{self._here.place}.{parent.num_threads}"
            run = thread.run

            def run_late() -> None:
                del thread.run
                self._here.place = place
                self._here.test = ""
                self._count(1)
                self.pause()
                try:
                    run()
                finally:
                    self._count(-1)

            thread.run = run_late
            start(thread)
            self.pause()

        return paused


class _Lock:
    """A lock that is waited for longer."""

    def __init__(self, pause: Callable[[], None]) -> None:
        self._pause = pause
        self._lock = _allocate_lock()
        self.locked = self._lock.locked
        self._at_fork_reinit = self._lock._at_fork_reinit

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._pause()
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()
        self._pause()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def pytest_configure(config: pytest.Config) -> None:
    chaos = Chaos(int(os.environ.setdefault("CHAOS_SEED", str(secrets.randbelow(10**6)))))
    chaos.install()
    config.pluginmanager.register(chaos)
