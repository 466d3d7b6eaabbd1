"""The workers of the world, whose turns are callbacks of its event loop, and its pools."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
        self.is_held = False  # it takes no turns until it is let go
        self._world = world
        self._turn = turn
        self._begin = begin
        self._items: deque[Item] = deque()
        self._context = copy_context()  # It belongs to the process that has made it.
        self._due_at = inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_alive(self) -> bool:
        return self.has_begun and not self.has_ended

    def start(self) -> None:
        self._begin()
        self.has_begun = True
        self._wake(self._world.now)

    def post(self, item: Item, /) -> None:
        self._items.append(item)
        if self.is_alive:
            self._wake(max(self._world.now + self._world.ahead, self.free_at))

    def take(self) -> Item:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def num_waiting(self) -> int:
        return len(self._items)

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Let it take its turns until it has ended. Within a callback, nothing else can run meanwhile."""
        self._world.wait_for(lambda: not self.is_alive, timeout_seconds)
        while timeout_seconds is None and self.is_alive:
            self.take_turn()
        return not self.is_alive

    def hold(self) -> None:
        self.is_held = True

    def let_go(self) -> None:
        self.is_held = False
        if self.is_alive:
            self._wake(max(self._world.now, self.free_at))

    def end(self) -> None:
        """End it without a further turn, as the end of its process does."""
        self.has_ended = True

    def take_turn(self) -> None:
        if not self.is_alive or self.is_held:
            return
        world = self._world
        due_ns = ENDED
        try:
            due_ns = self._turn()
        finally:
            self.has_ended = due_ns == ENDED
            self.free_at = world.now + world.ahead
            world.ahead = 0.0
        if not self.has_ended and (self._items or due_ns is not None):
            due = 0.0 if due_ns in (None, AT_ONCE) or self._items else due_ns / 1e9
            self._wake(max(self.free_at, due, world.now + LEAST_SECONDS))

    def _wake(self, when: float) -> None:
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
    """A future whose result can be waited for: other things happen meanwhile."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def result(self, timeout: float | None = None) -> Any:
        self._world.wait_for(self.done, timeout)
        return super().result(0)


class WorldPool(Executor):
    """A pool of threads, whose calls take no time unless they move the clock ahead."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._worker: WorldWorker[None] = WorldWorker(world, name, self._turn, lambda: None)
        self._worker.start()

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future = self._world.future()
        self._calls.append((future, lambda: call(*given, **named)))
        self._worker.post(None)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while wait and self._calls:
            self._turn()

    def _turn(self) -> int | None:
        while self._worker.num_waiting():
            self._worker.take()
        if not self._calls:
            return None
        future, call = self._calls.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        return AT_ONCE
