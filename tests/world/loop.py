"""An event loop in simulated time, which is the runtime of the world's processes.

The clock leaps to the next timer. All that happens follows from the seed, so a second run has the same trace.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from enum import Enum
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count
from math import inf
from threading import get_ident
from typing import Any

import anyio.to_thread
import pytest

from oaiserve.runtime import ENDED, Priority, Turn, When
from tests.world.runtime import WorldExecutor, WorldFuture, WorldQueue, WorldWorker

START_SECONDS = 1000.0
UNIX_SECONDS = 1_700_000_000.0
MOST_WAIT_SECONDS = 3600.0
MOMENT_SECONDS = 0.01  # in which a worker can take thousands of turns
_process: ContextVar[Process | None] = ContextVar("process", default=None)


class State(Enum):
    RUNNING = 1
    STOPPED = 2  # nothing of it runs; its sockets stay open and silent
    DEAD = 3  # it is cleared away: what still runs reaches nobody


class Process:
    """One process of the world. A callback belongs to the process in whose context it was made."""

    def __init__(self, loop: World, name: str, ip: str) -> None:
        self.loop = loop
        self.name = name
        self.ip = ip
        self.state = State.RUNNING
        self.held: list[Callback] = []
        self.tasks: dict[WorldTask, None] = {}
        self.context = copy_context()
        self.context.run(_process.set, self)
        loop.processes[self] = None

    def run(self, work: Callable[..., Any], *given: Any) -> WorldTask:
        return self.context.run(self.loop.create_task, work(*given))

    def stop(self) -> None:
        if self.state is State.RUNNING:
            self.state = State.STOPPED

    def go_on(self) -> None:
        if self.state is State.STOPPED:
            self.state = State.RUNNING
            self.loop.ready.extend(self.held)
            self.held.clear()

    def die(self) -> None:
        self.go_on()
        self.state = State.DEAD
        for task in [*self.tasks]:
            task.cancel()


class Callback(asyncio.Handle):
    """A callback, which belongs to a process."""

    @property
    def process(self) -> Process | None:
        return self._context.get(_process)

    def run(self) -> None:
        self._run()


class Timer(asyncio.TimerHandle, Callback):
    """A callback at a time."""


class WorldTask(asyncio.Task):
    """A task that its process knows, and whose place in sets is the same in each run."""

    def __init__(self, *given: Any, loop: World, **named: Any) -> None:
        self._number = next(loop.numbers)
        process = _process.get()
        super().__init__(*given, loop=loop, **named)
        if process is not None and not self.done():
            process.tasks[self] = None
            self.add_done_callback(lambda task: process.tasks.pop(task, None))

    def __hash__(self) -> int:
        return self._number


class World(asyncio.BaseEventLoop):
    """The event loop of all processes, with their clock, their random numbers, and the trace of what has happened."""

    def __init__(self, seed: int, keeps_trace: bool = False, clock_ns: Callable[[], int] | None = None) -> None:
        """Make a world. With `clock_ns`, parts read this clock, which only the test moves, and workers that sleep until
        a time wake up when it has come there."""
        super().__init__()
        self.test_clock_ns = clock_ns
        self.sleepers: dict[WorldWorker[Any], int] = {}  # when they are to be woken on the clock of the test
        self.seed = seed
        self._thread = get_ident()
        self.random = random.Random(seed)
        self.now = START_SECONDS
        self.ahead = 0.0  # how far the clock of a thread that computes is ahead of `now`
        self.numbers = count()
        self.ready: deque[Callback] = deque()
        self.processes: dict[Process, None] = {}
        self.workers: list[WorldWorker[Any]] = []
        self.wrong: list[str] = []
        self.counts = Counter[str]()
        self.lines: list[str] | None = [] if keeps_trace else None
        self.waiting: list[WorldWorker[Any]] = []  # workers in the middle of a turn
        self.worker_now: WorldWorker[Any] | None = None
        self.most_late_seconds = 0.0  # A worker may wake up this much later than it could.
        self._trace = blake2b(digest_size=8)
        self._timers: list[tuple[float, int, Timer]] = []
        self.set_task_factory(lambda loop, work, **named: WorldTask(work, loop=loop, **named))
        self.set_exception_handler(self._failed)

    def __del__(self) -> None:
        pass  # It holds nothing of the system, so nobody needs to close it.

    @property
    def now_ns(self) -> int:
        if self.test_clock_ns is not None:
            return self.test_clock_ns()
        return round((self.now + self.ahead) * 1e9)

    @property
    def trace(self) -> str:
        return self._trace.hexdigest()

    def note(self, *facts: object) -> None:
        text = f"{self.now - START_SECONDS:.6f} {' '.join(map(str, facts))}"
        self._trace.update(text.encode())
        if self.lines is not None:
            self.lines.append(text)

    def blame(self, text: str) -> None:
        self.note("WRONG", text)
        self.wrong.append(f"at {self.now - START_SECONDS:.3f} s: {text}")

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        process = _process.get()
        if process is None or process.state is not State.DEAD:
            self.blame(f"an error in the event loop: {context.get('message')} {context.get('exception')!r}")

    def run_until(self, is_reached: Callable[[], bool] = bool, most_seconds: float = inf) -> bool:
        """Let happen what happens, from outside of callbacks. Return whether it is reached before everything is at rest
        and before that much time has passed. Raises AssertionError in a callback."""
        end = self.now + most_seconds
        with self._running():
            while not is_reached():
                while self._timers and self._timers[0][2].cancelled():
                    heappop(self._timers)
                if not self.ready and not (self._timers and self._timers[0][0] <= end):
                    if end < inf:
                        self.now = end
                    return bool(is_reached())
                self._run_once()
        return True

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Be the running loop, for what asks asyncio for it."""
        # A callback that lets others run would break into a task that has not reached its next `await`.
        assert not self.is_running(), f"the world would run a second time within {self._under_way()}"
        before = asyncio._get_running_loop()
        self._thread_id = self._thread
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            self._thread_id = None
            asyncio._set_running_loop(before)

    def _under_way(self) -> str:
        """Return what runs in the world at this moment."""
        if self.worker_now is not None:
            return f"a turn of {self.worker_now.name}"
        task = asyncio.current_task(self)
        return "a callback" if task is None else repr(task)

    def _look(self) -> None:
        """Let go on with their turns the workers that can."""
        if self.waiting:
            waiting = self.waiting
            self.waiting = []
            for worker in waiting:
                worker.look()
        if self.sleepers:
            now_ns = self.now_ns
            for worker, due_ns in [*self.sleepers.items()]:
                if due_ns <= now_ns:
                    worker.wake(self.now)

    def begin(self, call: Callable[..., object], *given: Any) -> WorldWorker[Any]:
        """Make a call as another thread would, beside the test. Return its worker, which ends with the call."""

        def turn() -> When:
            call(*given)
            return ENDED

        worker = self.worker("a call of a test", turn)
        worker.start()
        return worker

    def settle(self, seconds: float = MOMENT_SECONDS) -> None:
        """Let happen what can happen now, or within some seconds."""
        if self.worker_now is None:
            self.run_until(most_seconds=seconds)
        else:
            self.wait_for(lambda: False, seconds)

    def leave(self) -> None:
        """Give up the turns that still wait for something."""
        for worker in self.waiting:
            worker.give_up()
        self.waiting.clear()

    def wait_for(self, condition: Callable[[], object], timeout_seconds: float | None = None) -> bool:
        """Wait, in a turn of a worker or outside of the world. Return False if the timeout comes first. Without one,
        raises AssertionError after an hour."""
        self._check_thread()
        if self.worker_now is not None:
            if timeout_seconds is None:
                self.worker_now.wait_for(condition)
                return True
            end = self.now + self.ahead + timeout_seconds
            self.call_at(end, lambda: None)
            self.worker_now.wait_for(lambda: condition() or self.now >= end)
            return bool(condition())
        if self.is_running():  # A callback of an event loop: nothing else can happen meanwhile.
            return bool(condition())
        self._look()
        if self.run_until(condition, MOST_WAIT_SECONDS if timeout_seconds is None else timeout_seconds):
            return True
        assert timeout_seconds is not None, "what the test waits for has not come"
        return False

    def _check_thread(self) -> None:
        assert get_ident() == self._thread, "a world has one thread: `begin` makes a call beside the test"

    def pause(self, seconds: float) -> None:
        """Let time pass in which nothing runs, as in a machine that sleeps."""
        self.now += seconds

    # -- what parts ask of their runtime ------------------------------------------------------------------------------

    def clock_ns(self) -> int:
        return self.now_ns

    def unix_ns(self) -> int:
        return int(UNIX_SECONDS * 1e9) + self.now_ns

    thread_cpu_ns = clock_ns

    def token_hex(self, num_bytes: int) -> str:
        return f"{self.random.getrandbits(8 * num_bytes):0{2 * num_bytes}x}"

    def sleep(self, seconds: float) -> None:
        self.ahead += seconds

    def worker(
        self,
        name: str,
        turn: Turn,
        begin: Callable[[], None] = lambda: None,
        *,
        priority: Priority = Priority.NORMAL,
    ) -> WorldWorker[Any]:
        worker = WorldWorker[Any](self, name, turn, begin)
        self.workers.append(worker)
        return worker

    def future(self) -> WorldFuture:
        return WorldFuture(self)

    def queue(self) -> WorldQueue[Any]:
        return WorldQueue(self)

    def executor(self, name: str) -> WorldExecutor:
        return WorldExecutor(self, name)

    def later(self, name: str, seconds: float, call: Callable[[], object]) -> None:
        self.call_at(self.now + self.ahead + seconds, call)

    def lateness(self, worker: WorldWorker[Any]) -> float:
        """Return how much later than it could the worker wakes up."""
        return self.random.random() ** 3 * self.most_late_seconds if self.most_late_seconds else 0.0

    # -- what asyncio calls -------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Any, *given: Any, context: Any = None) -> asyncio.Handle:
        handle = Callback(callback, given, self, context)
        self.ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Any, *given: Any, context: Any = None) -> asyncio.Handle:
        return self.call_at(self.now + self.ahead, callback, *given, context=context)

    def call_later(self, delay: float, callback: Any, *given: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *given, context=context)

    def call_at(self, when: float, callback: Any, *given: Any, context: Any = None) -> asyncio.TimerHandle:
        self._check_thread()
        handle = Timer(when, callback, given, self, context)
        heappush(self._timers, (when, next(self.numbers), handle))
        return handle

    def _run_once(self) -> None:
        while not self.ready:
            when, _, timer = heappop(self._timers)
            if not timer.cancelled():
                self.now = max(self.now, when)
                self.ready.append(timer)
                while self._timers and self._timers[0][0] <= self.now:  # what comes at the same moment
                    self.ready.append(heappop(self._timers)[2])
        handle = self.ready.popleft()
        if handle.cancelled():
            return
        process = handle.process
        if process is not None and process.state is State.STOPPED:
            process.held.append(handle)
        else:
            handle.run()
        self._look()

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *given: Any) -> Any:
        """Run work of a thread: at once, unless it has an executor."""
        if executor is not None:
            return asyncio.wrap_future(executor.submit(work, *given), loop=self)
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(work(*given))
        except Exception as error:
            future.set_exception(error)
        return future

    async def create_connection(self, make: Callable[[], Any], ip: str, port: int, **tls: Any) -> Any:
        return await self.network.connect(_process.get(), make, ip, port)

    async def create_unix_connection(self, make: Callable[[], Any], path: str) -> Any:
        return await self.network.connect(_process.get(), make, path, 0)

    async def connect_accepted_socket(self, make: Callable[[], Any], sock: Any, **tls: Any) -> Any:
        sock.attach(protocol := make())
        return sock, protocol

    def end(self) -> None:
        """End all processes, and let their tasks go."""
        self.set_exception_handler(lambda *_: None)
        self.run_until_complete(self._end())
        self.ready.clear()
        self._timers.clear()
        self.close()

    async def _end(self) -> None:
        for process in self.processes:
            process.die()
        for _ in range(2000):
            if not any(process.tasks for process in self.processes):
                return
            await asyncio.sleep(0.1)


async def _at_once(work: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return work(*given)


@contextmanager
def on_one_thread(world: World) -> Iterator[pytest.MonkeyPatch]:
    """Within the block, seed Python's random numbers from the world, and run the calls of Starlette's threads at once.
    Neither comes from a runtime."""
    before = random.getstate()
    with pytest.MonkeyPatch.context() as patch:
        random.seed(world.random.getrandbits(64))
        patch.setattr(anyio.to_thread, "run_sync", _at_once)
        patch.setattr("oaiserve.app.LAG_INTERVAL_SECONDS", 60.0)  # it says nothing here, and 10 a second are many
        try:
            yield patch
        finally:
            random.setstate(before)
