"""Let threads pause where they meet, so that a test which depends on their pace fails:

    make chaos

Each thread of a test draws short pauses from CHAOS_SEED, the test's name and its own place among the threads, so a run
with the same seed has the same pauses. Besides, a few lines of the code are slow in a test: each thread that comes by
there pauses for up to a second. The seed says which lines, so that many seeds try each of them: most flakes need one
long pause at one line. Nobody pauses while there is only one thread, as in simulated schedules.

CHAOS_TIMES runs each test with several seeds, which are CHAOS_SEED and the next numbers:

    CHAOS_TIMES=40 make chaos ARGS="-k is_disconnected"
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import linecache
import os
import queue
import random
import secrets
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.thread import ThreadPoolExecutor, _WorkItem
from dataclasses import dataclass
from functools import partial, wraps
from time import sleep
from types import FrameType
from typing import Any

import pytest
import uvloop

# Each thread draws one of these shares of places at which it pauses, and one of these longest short pauses.
SHARES = (0.0, 0.02, 0.1, 0.5)
MOST_SECONDS = (0.0001, 0.001, 0.005, 0.03)
ALL_SECONDS = 1.0  # A thread pauses no longer than this in a test, so that long tests still end in time.
# One of this many lines where threads meet is slow in a test. SLOW has the seconds of a pause there, and the most
# pauses. They happen at one of these shares of the times that a thread comes by, and all those of a thread take no
# longer than ALL_SLOW_SECONDS.
LINES_PER_SLOW_ONE = 8
SLOW = ((0.1, 10), (1.0, 1))
SLOW_SHARES = (1.0, 0.3)
ALL_SLOW_SECONDS = 3.0
SEED_ID = "seed{}"
_allocate_lock = threading.Lock
_LIBRARY = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib"))


@dataclass
class SlowLine:
    """A line at which a thread pauses for longer."""

    random: random.Random
    share: float
    seconds: float
    left: int  # pauses


class Pauses:
    """The pauses of one thread in one test."""

    def __init__(self, test: str, thread: str) -> None:
        """`test` has the seed and the name of the test, of which all of its threads get the same slow lines."""
        self.num_threads = 0  # The thread has started this many others.
        self._test = test
        self._thread = thread
        self._random = random.Random(f"{test} {thread}")
        self._share = self._random.choice(SHARES)
        self._most_seconds = self._random.choice(MOST_SECONDS)
        self._left_seconds = ALL_SECONDS
        self._lines: dict[str, SlowLine | None] = {}  # None: not slow
        self._left_slow_seconds = ALL_SLOW_SECONDS

    def next(self) -> float | None:
        """Return the seconds of the next short pause, or None if there is none at this place."""
        if self._left_seconds < 0 or self._random.random() >= self._share:
            return None
        seconds = self._random.uniform(0.0, self._most_seconds)
        self._left_seconds -= seconds
        return seconds

    def next_at(self, line: str) -> float | None:
        """Return the seconds of the next pause at a slow line, or None if there is none."""
        if line not in self._lines:
            self._lines[line] = self._drawn(line)
        slow = self._lines[line]
        if slow is None or not slow.left or self._left_slow_seconds < slow.seconds:
            return None
        if slow.random.random() >= slow.share:
            return None
        slow.left -= 1
        self._left_slow_seconds -= slow.seconds
        return slow.seconds

    def _drawn(self, line: str) -> SlowLine | None:
        drawn = random.Random(f"{self._test} {line}")
        if drawn.random() >= 1 / LINES_PER_SLOW_ONE:
            return None
        return SlowLine(
            random.Random(f"{self._test} {self._thread} {line}"), drawn.choice(SLOW_SHARES), *drawn.choice(SLOW)
        )


class Chaos:
    """A plug-in of pytest. Threads that Python has not started never pause, such as those of pytest-xdist."""

    def __init__(self, seed: int, times: int = 1) -> None:
        self._seeds = range(seed, seed + times)
        self._num_threads = 0
        self._counting = _allocate_lock()
        self._seed = seed
        self._test = ""
        self._slow_seconds: dict[str, float] = {}  # in this test, by line
        self._here = threading.local()

    def pause(self, before: str, callback: Callable[..., Any] | None = None) -> None:
        """Let the calling thread pause, or not: at the line that has called, or before the callback of an event loop.
        `before` tells apart several places of a line."""
        if not self._num_threads or not self._test:
            return
        pauses = self._pauses()
        if pauses is None:
            return
        line = f"{line_of_code() if callback is None else name_of(callback)}, {before}"
        if (seconds := pauses.next_at(line)) is not None:
            self._slow_seconds[line] = self._slow_seconds.get(line, 0.0) + seconds
            sleep(seconds)
        elif (seconds := pauses.next()) is not None:
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
            here.pauses = Pauses(f"{self._seed} {self._test}", place)
        pauses: Pauses = here.pauses
        return pauses

    # -- what pytest calls --------------------------------------------------------------------------------------------

    def pytest_report_header(self) -> str:
        return f"chaos: CHAOS_SEED={self._seeds[0]} CHAOS_TIMES={len(self._seeds)}"

    @pytest.fixture
    def chaos_seed(self, request: pytest.FixtureRequest) -> int:
        seed: int = request.param
        return seed

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if len(self._seeds) > 1:
            metafunc.fixturenames.append("chaos_seed")
            metafunc.parametrize("chaos_seed", self._seeds, indirect=True, ids=SEED_ID.format)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._seed, self._test = self._seed_and_name(item)
        self._slow_seconds = {}
        self._here.test = ""
        self._here.place = "0"
        try:
            return (yield)
        finally:
            self._test = ""

    def _seed_and_name(self, item: pytest.Item) -> tuple[int, str]:
        """Return the seed of a test, and its name, which is the same whether it runs with one seed or several."""
        for seed in self._seeds:
            for ending in (f"-{SEED_ID.format(seed)}]", f"[{SEED_ID.format(seed)}]"):
                if item.nodeid.endswith(ending):
                    name = item.nodeid.removesuffix(ending)
                    return seed, f"{name}]" if ending.startswith("-") else name
        return self._seeds[0], item.nodeid

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[pytest.TestReport]:
        report: pytest.TestReport = yield
        if report.failed:
            slow = "".join(f"\n{seconds:6.2f} s at {line}" for line, seconds in self._slow_seconds.items())
            report.sections.append(("chaos", f"CHAOS_SEED={self._seed} repeats these pauses.{slow}"))
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
        # Timers are set by one function in each loop, which the other ones call.
        for loop, timer in ((asyncio.BaseEventLoop, "call_at"), (uvloop.Loop, "call_later")):
            for name in ("call_soon", "call_soon_threadsafe"):
                setattr(loop, name, self._with_late_callback(getattr(loop, name)))
            setattr(loop, timer, self._with_late_timer(getattr(loop, timer)))

    def _with_pauses(self, function: Callable[..., Any]) -> Callable[..., Any]:
        pause = self.pause
        before = f"before {function.__name__}"
        after = f"after {function.__name__}"

        @wraps(function)
        def paused(*given: Any, **named: Any) -> Any:
            pause(before)
            result = function(*given, **named)
            pause(after)
            return result

        return paused

    def _with_late_callback(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        pause = self.pause

        def late(callback: Callable[..., Any], *given: Any) -> None:
            pause("in the loop", callback)
            callback(*given)

        @wraps(schedule)
        def paused(loop: Any, callback: Callable[..., Any], *given: Any, context: Any = None) -> Any:
            pause("before a callback")
            handle = schedule(loop, late, callback, *given, context=context)
            pause("after a callback")
            return handle

        return paused

    def _with_late_timer(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        pause = self.pause

        def late(callback: Callable[..., Any], *given: Any) -> None:
            pause("in a timer", callback)
            callback(*given)

        @wraps(schedule)
        def paused(loop: Any, time: float, callback: Callable[..., Any], *given: Any, context: Any = None) -> Any:
            return schedule(loop, time, late, callback, *given, context=context)

        return paused

    def _simple_queue(self) -> type:
        pause = self.pause

        class SimpleQueue(queue.SimpleQueue):
            def put(self, *given: Any, **named: Any) -> None:
                pause("before put")
                super().put(*given, **named)
                pause("after put")

            def get(self, *given: Any, **named: Any) -> Any:
                pause("before get")
                item = super().get(*given, **named)
                pause("after get")
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
                self.pause("in the thread", run)
                try:
                    run()
                finally:
                    self._count(-1)

            thread.run = run_late
            start(thread)
            self.pause("after start")

        return paused


class _Lock:
    """A lock that is waited for longer."""

    def __init__(self, pause: Callable[[str], None]) -> None:
        self._pause = pause
        self._lock = _allocate_lock()
        self.locked = self._lock.locked
        self._at_fork_reinit = self._lock._at_fork_reinit

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._pause("before acquire")
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()
        self._pause("after release")

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def line_of_code() -> str:
    """Return the function that has called and the text of its line: the nearest outside of installed packages, if there
    is one. The number of the line would change with each comment above it, and the pauses with the number."""
    nearest = None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and nearest is None:
            nearest = frame
        if name != __file__ and not name.startswith(_LIBRARY):
            nearest = frame
            break
        frame = frame.f_back
    assert nearest is not None
    text = linecache.getline(nearest.f_code.co_filename, nearest.f_lineno).strip()
    return f"{nearest.f_code.co_qualname}: {text}"


def name_of(callback: Any) -> str:
    """Return the name of what a callback goes on with, such as the innermost coroutine of a task."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return getattr(callback, "__qualname__", type(callback).__name__)
    name = ""
    awaited = task.get_coro()
    while hasattr(awaited, "cr_await"):
        name = awaited.__qualname__
        awaited = awaited.cr_await
    return name


def pytest_configure(config: pytest.Config) -> None:
    seed = int(os.environ.setdefault("CHAOS_SEED", str(secrets.randbelow(10**6))))
    chaos = Chaos(seed, int(os.environ.get("CHAOS_TIMES", "1")))
    chaos.install()
    config.pluginmanager.register(chaos)
