"""The workers of the world, whose turns are callbacks of its event loop, and its queues.

A turn should not wait, but the double of a device may let it: its stack waits as a greenlet, while the world goes on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from greenlet import getcurrent, greenlet

from oaiserve.runtime import AT_ONCE, ENDED, Empty, Turn

if TYPE_CHECKING:
    from tests.world.loop import World

Item = TypeVar("Item")
LEAST_SECONDS = 1e-6  # from one turn of a worker to the next, so that time goes on


class WorldWorker(Generic[Item]):
    """A worker in simulated time. A turn happens at one moment, and its thread is busy for as long as it has moved the
    clock ahead."""

    def __init__(self, world: World, name: str, turn: Turn, begin: Callable[[], None]) -> None:
        self.name = name
        self.free_at = 0.0  # when its thread has done its last turn
        self.has_begun = False
        self.has_ended = False
        self.num_turns = 0
        self._world = world
        self._turn = turn
        self._begin = begin
        self._items: deque[Item] = deque()
        self._context = copy_context()  # It belongs to the process that has made it.
        self._due_at = inf
        self._timer: asyncio.TimerHandle | None = None
        self._stack: Any = None  # of the turn under way
        self._waits_for: Callable[[], object] | None = None

    @property
    def is_alive(self) -> bool:
        return self.has_begun and not self.has_ended

    def start(self) -> None:
        self._context.run(self._begin)
        self.has_begun = True
        self.wake(self._world.now)

    def post(self, item: Item, /) -> None:
        self._items.append(item)
        if self.is_alive:
            self.wake(max(self._world.now + self._world.ahead, self.free_at))

    def take(self) -> Item:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def clear(self) -> None:
        self._items.clear()

    def num_waiting(self) -> int:
        return len(self._items)

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it has ended. Within a callback of an event loop, nothing but its own turns can come meanwhile."""
        world = self._world
        if world.worker_now is None and world.is_running():
            while timeout_seconds is None and self.is_alive:
                world.ahead = max(world.ahead, self.free_at - world.now)
                self.take_turn()
                world.ahead = max(0.0, self.free_at - world.now)
        else:
            world.wait_for(lambda: not self.is_alive, timeout_seconds)
        return not self.is_alive

    def end(self) -> None:
        """End it without a further turn, as the end of its process does."""
        self.has_ended = True

    def take_turn(self) -> None:
        if not self.is_alive or self._stack is not None:
            return
        self.num_turns += 1
        self._stack = greenlet(self._turn)
        self._stack.gr_context = self._context.copy()
        self._go_on()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Let the turn under way wait, within its stack."""
        while not condition():
            self._waits_for = condition
            self._stack.parent.switch()

    def look(self) -> None:
        """Go on with the turn that waits if it can."""
        if self._waits_for is not None and not self._waits_for():
            self._world.waiting.append(self)
        elif self.is_alive:
            self._waits_for = None
            self._go_on()

    def give_up(self) -> None:
        """End it in the middle of its turn."""
        self.has_ended = True
        self._stack.throw()

    def _go_on(self) -> None:
        world = self._world
        stack = self._stack
        due_ns = ENDED
        before = world.worker_now
        world.worker_now = self
        stack.parent = getcurrent()
        try:
            due_ns = stack.switch()
        except BaseException:
            self.has_ended = True
            raise
        finally:
            world.worker_now = before
            self.free_at = world.now + world.ahead
            world.ahead = 0.0
        if not stack.dead:
            world.waiting.append(self)
            return
        self._stack = None
        self.has_ended |= due_ns == ENDED
        if self.has_ended:
            return
        soon = max(self.free_at, world.now + LEAST_SECONDS)
        if self._items or due_ns == AT_ONCE:
            self.wake(soon)
        elif due_ns is not None and world.test_clock_ns is None:
            self.wake(max(soon, due_ns / 1e9))
        elif due_ns is not None:
            world.sleepers[self] = due_ns

    def wake(self, when: float) -> None:
        self._world.sleepers.pop(self, None)
        if when >= self._due_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_at = when
        late = self._world.lateness(self)
        self._timer = self._world.call_at(when + late, self._run, context=self._context)

    def _run(self) -> None:
        self._due_at = inf
        self._timer = None
        self.take_turn()


class WorldFuture(Future[Any]):
    """A future whose result can be waited for. Other things happen meanwhile, in a callback its executor's."""

    def __init__(self, world: World, executor: WorldExecutor | None = None) -> None:
        super().__init__()
        self._world = world
        self._executor = executor

    def result(self, timeout: float | None = None) -> Any:
        self._world.wait_for(self.done, timeout)
        if self._executor is not None:
            self._executor.do_all()
        return super().result(0)


class WorldExecutor(Executor):
    """An executor of one thread, whose calls take no time unless they move the clock ahead."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._worker: WorldWorker[None] = WorldWorker(world, name, self._turn, lambda: None)
        self._worker.start()

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future = WorldFuture(self._world, self)
        self._calls.append((future, lambda: call(*given, **named)))
        self._worker.post(None)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if wait:
            self.do_all()

    def do_all(self) -> None:
        while self._calls:
            self._turn()

    def _turn(self) -> int | None:
        self._worker.clear()
        if not self._calls:
            return None
        future, call = self._calls.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        return AT_ONCE


class Beside(Executor):
    """Makes each call beside the test, as if it had a thread of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._futures: list[WorldFuture] = []

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future = WorldFuture(self._world)

        def make() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*given, **named))
            except Exception as error:
                future.set_exception(error)

        self._futures.append(future)
        self._world.begin(make)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if wait:
            self._world.wait_for(lambda: all(future.done() for future in self._futures))


class WorldQueue(Generic[Item]):
    """A queue whose reader waits in the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.queue: deque[Item] = deque()  # as in `queue.Queue`
        self.put = self.queue.append
        self.qsize = self.queue.__len__

    def get(self, timeout: float | None = None) -> Item:
        if not self._world.wait_for(lambda: self.queue, timeout):
            raise Empty
        return self.queue.popleft()

    def get_nowait(self) -> Item:
        if not self.queue:
            raise Empty
        return self.queue.popleft()

    def empty(self) -> bool:
        return not self.queue
