"""Worker threads for work in short pieces. Clients take turns, and large work is kept apart from small. Stdlib only.

A piece takes milliseconds, so nobody waits long for a turn. Work announces longer pieces, such as decoding an image.
These run on threads of their own, so that nothing else waits for them. A single thread does the large work, and rests
between its pieces: all threads share the interpreter's lock, and on a CPU the model needs the cores.

This module must not depend on the content of the work.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from time import thread_time_ns
from typing import Any, Generic, TypeAlias, TypeVar

from oaiserve.errors import APIError, InternalError, Unavailable
from oaiserve.runtime import AT_ONCE, ENDED, Priority, Runtime, When, Worker
from oaiserve.system_memory import give_back, take

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")
Work: TypeAlias = Generator[bool | None, None, Result]  # stops after each piece

LARGE_BYTES = 2**16  # bytes of a body that takes more than a moment of work
LONG = True  # Work yields this if its next piece takes more than a few milliseconds.
MUCH_BYTES = 2**20  # From this body size on, memory is taken from the system before the work, and given back after it.
# How long the thread for large work rests, in multiples of the CPU time that it has used, so that it gets at most a
# quarter of a core. Parsing and rendering hold the interpreter's lock for up to 10 ms, which delays the engine's step.
REST = 3.0
GIVE_BACK_SECONDS = 1.0  # after the last such body, when everything made from it has been freed


def at_once(work: Work[Result]) -> Result:
    """Do all of the work now, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            result: Result = stop.value
            return result


class CpuTime:
    """Measures the CPU time of work, whichever threads do it."""

    def __init__(self, cpu_ns: Callable[[], int] = thread_time_ns) -> None:
        """`cpu_ns` returns the CPU time of the calling thread."""
        self._cpu_ns = cpu_ns
        self.ns = 0

    def of(self, work: Work[Result]) -> Work[Result]:
        """Do the work, and add the time of each piece."""
        while True:
            began_ns = self._cpu_ns()
            try:
                kind = next(work)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            finally:
                self.ns += self._cpu_ns() - began_ns
            yield kind


class Turns(Generic[Item]):
    """A queue in which clients take turns. Each client's own items are first come, first served.

    Between two items of one client, every other client that was waiting at the first of them gets one. A client without
    waiting items takes no memory. Not thread-safe: the owner must hold a lock.
    """

    def __init__(self) -> None:
        self._items: dict[str, deque[Item]] = {}  # no deque is empty
        self._order: deque[str] = deque()  # each client of `_items` once

    def __bool__(self) -> bool:
        return bool(self._order)

    def add(self, client: str, item: Item) -> None:
        self._of(client).append(item)

    def put_back(self, client: str, item: Item) -> None:
        """Put an item back at the head of its client's queue."""
        self._of(client).appendleft(item)

    def take(self) -> Item:
        """Take the first item of the client whose turn it is. There must be one."""
        client = self._order.popleft()
        items = self._items[client]
        item = items.popleft()
        if items:
            self._order.append(client)
        else:
            del self._items[client]
        return item

    def _of(self, client: str) -> deque[Item]:
        if client not in self._items:
            self._items[client] = deque()
            self._order.append(client)
        return self._items[client]


@dataclass(slots=True, eq=False)
class Task:
    """Work that is done in turns. At its end, a worker's thread calls exactly one of `done`, `failed` and `dropped`."""

    client: str
    num_bytes: int  # size of the body that caused this work
    work: Work[Any]
    done: Callable[[Any], None]  # called with the result
    failed: Callable[[APIError], None]
    dropped: Callable[[], None]  # called when the work is no longer wanted
    is_unwanted: Callable[[], bool]
    name: str  # shown in the log
    rest: float = 0  # pause of the thread after each piece of a large body, in multiples of the piece's CPU time
    is_begun: bool = False
    is_long: bool = False  # whether its next piece takes long
    has_been_long: bool = False


class _Lane:
    """Tasks that wait for the same workers. The owner must hold a lock."""

    def __init__(self) -> None:
        self.turns: Turns[Task] = Turns()
        self.workers: list[Worker[None]] = []
        self.idle: list[Worker[None]] = []  # workers without work

    def wake(self) -> None:
        if self.idle:
            self.idle.pop().post(None)


class TurnWorkers:
    """The workers. Every task that is added ends, even if the workers stop."""

    def __init__(
        self,
        num_threads: int,
        name: str,
        *,
        has_long: bool = False,
        give_back: Callable[[], None] = give_back,
        give_back_seconds: float = GIVE_BACK_SECONDS,
        runtime: Runtime,
    ) -> None:
        """Start `num_threads` threads for small work and one for large work. With `has_long`, half as many additional
        threads do long pieces. With 0 threads, `add` does all work itself."""
        self._give_back = give_back
        self._give_back_ns = int(give_back_seconds * 1e9)
        self._runtime = runtime
        self._lock = Lock()  # guards the attributes below; nothing but a wake-up of workers is called under it
        self._small, self._large, self._long = (_Lane() for _ in range(3))
        self._num_waiting = 0
        self._is_stopped = False
        self._give_back_at_ns: int | None = None
        for number in range(num_threads):
            self._employ(self._small, f"{name}-{number}")
        if num_threads:
            self._employ(self._large, f"{name}-large")
        if has_long:
            for number in range((num_threads + 1) // 2):
                self._employ(self._long, f"{name}-long-{number}")

    def _employ(self, lane: _Lane, name: str) -> None:
        # The model needs the cores more than long pieces do.
        priority = Priority.LOW if lane is self._long else Priority.NORMAL
        worker: Worker[None] = self._runtime.worker(name, lambda: self._turn(lane, worker), priority=priority)
        lane.workers.append(worker)
        worker.start()

    @property
    def num_waiting(self) -> int:
        """Return the number of tasks of which no piece has begun yet."""
        return self._num_waiting

    def add(self, task: Task) -> None:
        """Add a task, without blocking if there are threads."""
        lane = self._lane_of(task)
        with self._lock:
            self._num_waiting += 1
            is_stopped = self._is_stopped
            if self._small.workers and not is_stopped:
                lane.turns.add(task.client, task)
                lane.wake()
                return
        if is_stopped:
            self._refuse(task)
            return
        while not self._run_piece(task):
            pass

    def run(
        self,
        work: Work[Result],
        *,
        client: str,
        num_bytes: int,
        on_end: Callable[[], None] = lambda: None,
        rest: float = REST,
    ) -> Future[Result]:
        """Add work on a client's body, and return a future for its result. Cancelling the future ends the work early.

        Any error but an APIError becomes an InternalError. `on_end` is called when the work has ended.
        """
        promised: Future[Result] = self._runtime.future()

        def settle(settle: Callable[[Any], None], value: object) -> None:
            on_end()
            if promised.set_running_or_notify_cancel():
                settle(value)

        # The future must not refer to the task: a reference cycle would keep the body until the next garbage
        # collection.
        self.add(
            Task(
                client,
                num_bytes,
                work,
                done=lambda result: settle(promised.set_result, result),
                failed=lambda error: settle(promised.set_exception, error),
                dropped=on_end,
                is_unwanted=promised.cancelled,
                name="work on a body",
                rest=rest,
            )
        )
        return promised

    def give_back_later(self) -> None:
        """Give freed memory back to the system once no large work has ended for a moment."""
        with self._lock:
            self._give_back_at_ns = self._runtime.clock_ns() + self._give_back_ns
            self._large.wake()

    def stop(self) -> None:
        """Fail all waiting work, and the work under way unless its piece is the last one, and join the threads."""
        waiting = []
        with self._lock:
            self._is_stopped = True
            for lane in (self._small, self._large, self._long):
                while lane.turns:
                    waiting.append(lane.turns.take())
        for task in waiting:
            self._refuse(task)
        workers = [*self._small.workers, *self._large.workers, *self._long.workers]
        for worker in workers:
            worker.post(None)
        for worker in workers:
            worker.join()

    def _turn(self, lane: _Lane, worker: Worker[None]) -> When:
        """Do a piece of the next task of the lane, and rest after it if it was large."""
        worker.clear()
        with self._lock:
            if worker in lane.idle:
                lane.idle.remove(worker)
            # Only large work leaves memory worth giving back.
            at_ns = self._give_back_at_ns if lane is self._large else None
            if at_ns is not None and at_ns <= self._runtime.clock_ns():
                self._give_back_at_ns = None
                task = None
            elif lane.turns:
                task = lane.turns.take()
            elif self._is_stopped:
                return ENDED
            else:
                lane.idle.append(worker)
                return at_ns
        if task is None:
            self._give_back()
            return AT_ONCE
        cpu_ns = self._runtime.thread_cpu_ns  # not the clock, which continues while other threads have the core
        began_ns = cpu_ns()
        if not self._run_piece(task):
            following = self._lane_of(task)
            with self._lock:
                is_stopped = self._is_stopped
                if not is_stopped:
                    (following.turns.put_back if following is lane else following.turns.add)(task.client, task)
                    following.wake()
            if is_stopped:
                self._refuse(task)
        if lane is self._large and task.rest:
            return self._runtime.clock_ns() + int(task.rest * (cpu_ns() - began_ns))
        return AT_ONCE

    def _lane_of(self, task: Task) -> _Lane:
        if task.is_long:
            return self._long
        if task.num_bytes > LARGE_BYTES:
            return self._large
        return self._small

    def _run_piece(self, task: Task) -> bool:
        """Run the work of a task up to its next stop. Return whether it has ended."""
        if task.is_unwanted():
            self._end(task, task.dropped)
            return True
        if not task.is_begun and task.num_bytes >= MUCH_BYTES:
            take(task.num_bytes)  # Only the first pieces copy the body, and this takes milliseconds.
        self._begin(task)
        task.has_been_long |= task.is_long
        try:
            task.is_long = next(task.work) is LONG
        except StopIteration as stop:
            result = stop.value
            self._end(task, lambda: task.done(result))
        except APIError as error:
            failure = error.without_frames()
            self._end(task, lambda: task.failed(failure))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the Rust encoder is no Exception, and must not end the thread
            logger.exception("The tokenize stage failed: %s.", task.name)
            failed = InternalError("The server failed while it read or tokenized this request.")
            self._end(task, lambda: task.failed(failed))
        else:
            return False
        return True

    def _begin(self, task: Task) -> None:
        if not task.is_begun:
            task.is_begun = True
            with self._lock:
                self._num_waiting -= 1

    def _refuse(self, task: Task) -> None:
        self._end(task, lambda: task.failed(Unavailable("The server is shutting down.")))

    def _end(self, task: Task, end: Callable[[], None]) -> None:
        """End a task, which no longer counts as waiting."""
        task.work.close()
        self._begin(task)
        if task.num_bytes >= MUCH_BYTES or task.has_been_long:
            self.give_back_later()
        end()
