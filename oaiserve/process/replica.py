"""`Replica`: one engine process of a front, and the processes that replace it when it ends."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from threading import Lock
from typing import Any, Protocol

from oaiserve.engine.current_numbers import current_numbers
from oaiserve.engine.types.adapters import ServedAdapter
from oaiserve.errors import StartupError, Unavailable
from oaiserve.facts.engine_numbers import EngineNumbers, added, sums_of
from oaiserve.process.link import Link
from oaiserve.process.messages import Answer, Begun, Ended, Health, NotStarted, Ready, Step, Stop, ToFront
from oaiserve.process.passed_room import PassedRoom
from oaiserve.process.suspects import Suspects
from oaiserve.runtime import AT_ONCE, ENDED, Empty, Queue, Runtime, When, Worker

log = logging.getLogger(__name__)

LOOK_NS = 1_000_000_000
MOST_ENDS = 3  # After this many ends of its processes within ENDS_NS, no other one is started.
ENDS_NS = 60 * 10**9


class EngineProcess(Protocol):
    """An engine process that has been started."""

    @property
    def link(self) -> Link: ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def ended(self) -> str:
        """Wait until it has ended, and return how. One that has closed its link and does not end is killed."""
        ...


class EngineGone(Exception):
    """The engine has ended too often."""


class Front(Protocol):
    """Receives the reports of replicas: the first two on the reading thread, the others on the keeper's."""

    def took_step(self, replica: Replica, step: Step) -> None: ...
    def began(self, replica: Replica, request_ids: Iterable[str]) -> None: ...
    def lost(self, replica: Replica) -> None:
        """The process has ended. If the replica has no `failure` and is not stopped, another one is started next."""
        ...

    def is_ready_again(self, replica: Replica, ready: Ready) -> None:
        """Another process is ready. It gets requests once the replica `is_up`."""
        ...

    def looked(self, replica: Replica) -> None:
        """Called once a second."""
        ...


class Replica:
    """A replica of a front. Its keeper, a thread, starts another process when one has ended."""

    def __init__(
        self,
        name: str,
        title: str,
        launch: Callable[[], EngineProcess],
        front: Front,
        lock: Lock,
        watchdog_seconds: float,
        load_timeout_seconds: float,
        runtime: Runtime,
    ) -> None:
        """Start an engine process with `launch`. `first` waits until it is ready. The log calls it `title`."""
        self.name = name
        self._title = title
        self._launch = launch
        self._front = front
        self._watchdog_seconds = watchdog_seconds
        self._load_timeout_seconds = load_timeout_seconds
        self._runtime = runtime
        self._lock = lock  # the front's lock, which guards the attributes up to the empty line
        self.is_up = False  # The process has reported that it is ready, and it has not ended.
        self.adapter_numbers: dict[int, int] = {}  # the process's numbers, keyed by those in requests
        self.suspects = Suspects()
        self.choices: Counter[str] = Counter()  # how often the replica was chosen, by reason
        self._asked: dict[int, Future[Any]] = {}

        self.room: PassedRoom  # under the lock, too; set by the front
        self.is_stopping = False
        self.failure: EngineGone | None = None
        self.num_restarts = 0
        self.numbers = EngineNumbers()
        self.health = Health(0, 0, 0, "", None)
        self._numbers_of_questions = count()
        self._before = EngineNumbers()  # the sums of the processes that have ended
        self._reason = ""  # the reason that the process gave for its end
        self._ends_ns: deque[int] = deque(maxlen=MOST_ENDS)
        self._silent_looks = 0
        self._next_look_ns = 0
        # Gets a process that has ended, or one that is ready, with its facts.
        self._keeper: Worker[tuple[EngineProcess, Ready | None]] = runtime.worker(f"engine-keeper-{name}", self._keep)
        first: Queue[Ready | NotStarted | None] = runtime.queue()
        self._first: Queue[Ready | NotStarted | None] | None = first
        self.process = launch()
        self._begin(self.process)

    def first(self) -> Ready:
        """Wait until the first process is ready, and return its facts. Raises StartupError."""
        assert self._first is not None
        match self._first.get():
            case Ready() as ready:
                self._first = None
                self.adapter_numbers = {adapter.number: adapter.number for adapter in ready.adapters}
                self.is_up = True
                return ready
            case NotStarted(error):
                self.process.ended()
                raise error
            case _:
                raise StartupError(f"{self._title} has ended {self.process.ended()} while it loaded the model.")

    def start(self) -> None:
        """Begin to watch the process, which is ready by now."""
        self._keeper.start()

    def kill(self) -> None:
        self.process.kill()

    def send(self, message: object) -> None:
        self.process.link.send(message)

    def ask(self, question: Callable[[int], Any], *, is_up: bool = False) -> Future[Any]:
        """Send the question that `question` makes from its number, and return a future for the answer. Raises
        Unavailable if no process is up. The future raises it, too, if the process ends."""
        asked: Future[Any] = self._runtime.future()
        number = next(self._numbers_of_questions)
        with self._lock:
            if not (self.is_up or is_up):
                raise unavailable()
            self._asked[number] = asked
            self.process.link.send(question(number))
        return asked

    def now(self, adapters: Iterable[ServedAdapter], now_ns: int, *, explains: bool) -> EngineNumbers:
        """Return the numbers as of the last message, plus the sums over earlier processes."""
        with self._lock:
            published = self.numbers
            health = self.health
            before = self._before
        numbers = self.adapter_numbers
        now = current_numbers(
            published,
            [replace(adapter, number=numbers.get(adapter.number, -1)) for adapter in adapters],
            now_ns=now_ns,
            cores_ns=health.cores_ns,
            explains=explains,
            num_tokenizing=health.num_tokenizing,
            num_hangs=health.num_hangs,
        )
        return added((now, before)) if self._ends_ns else now

    def stop(self, drain_timeout_seconds: float) -> None:
        """Ask the process to end."""
        self.is_stopping = True
        self.process.link.send(Stop(drain_timeout_seconds))

    def join(self, timeout_seconds: float) -> None:
        """Wait until the process has ended. It is killed after the timeout."""
        if not self._keeper.join(timeout_seconds):
            self.process.kill()
            self._keeper.join()
        self.process.ended()

    # Messages from the process

    def _begin(self, process: EngineProcess) -> None:
        process.link.start(partial(self._received, process), partial(self._closed, process))

    def _received(self, process: EngineProcess, message: ToFront) -> None:
        """Take a message. Only one thread calls this at a time for one process."""
        if process is not self.process and self._first is None:
            return
        match message:
            case Step():  # At least one comes each second. Answers don't count: they come even if other threads hang.
                self._silent_looks = 0
                if message.numbers is not None:
                    self.numbers = message.numbers
                if message.health is not None:
                    self.health = message.health
                self._front.took_step(self, message)
            case Begun(request_ids):
                self._front.began(self, request_ids)
            case Answer():
                with self._lock:
                    asked = self._asked.pop(message.number, None)
                if asked is not None:
                    _settle(asked, message)
            case Ready() | NotStarted() if self._first is not None:
                self._first.put(message)
            case Ready():
                self._keeper.post((process, message))
            case NotStarted(error):
                self._reason = str(error)
            case Ended(reason):
                self._reason = reason

    def _closed(self, process: EngineProcess) -> None:
        """Note that a process has ended. Questions that it has not answered get an error."""
        if self._first is not None:
            self._first.put(None)
        with self._lock:
            self.is_up = False
            asked = [*self._asked.values()]
            self._asked.clear()
        for each in asked:
            each.set_exception(unavailable())
        self._keeper.post((process, None))

    # A process that has ended, and the next one. These methods run on the keeper's thread.

    def _keep(self) -> When:
        with suppress(Empty):
            process, ready = self._keeper.take()
            if process is not self.process:
                return AT_ONCE
            if ready is None:
                return self._go_on_without()
            self._front.is_ready_again(self, ready)
            return AT_ONCE
        now_ns = self._runtime.clock_ns()
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + LOOK_NS
            self._look()
            self._front.looked(self)
        return self._next_look_ns

    def _look(self) -> None:
        """Kill a process that has sent nothing for too long. Looks are counted instead of time, because this process
        may have been suspended, too."""
        self._silent_looks += 1
        most_seconds = self._watchdog_seconds if self.is_up else self._load_timeout_seconds
        if self._silent_looks > most_seconds:
            done = "sent nothing" if self.is_up else "not loaded the model"
            log.error("%s has %s for %d s, and is killed", self._title, done, self._silent_looks)
            self.process.kill()
            self._silent_looks = 0  # It may not have ended by the next look.

    def _go_on_without(self) -> When:
        """Start another process in place of one that has ended, unless that happens too often."""
        how = self.process.ended()
        if self._reason:
            how = f"{how} ({self._reason})"
            self._reason = ""
        with self._lock:
            ended = replace(self.numbers, num_hangs=self.health.num_hangs)
            self._before = added((self._before, sums_of(ended)))
            self.numbers = EngineNumbers()
            self.health = Health(0, 0, 0, "", None)
        now_ns = self._runtime.clock_ns()
        self._ends_ns.append(now_ns)
        if self.is_stopping:
            pass
        elif len(self._ends_ns) == MOST_ENDS and now_ns - self._ends_ns[0] <= ENDS_NS:
            message = f"{self._title} has ended {MOST_ENDS} times within a minute, at last {how}."
            self.failure = EngineGone(message)
        else:
            log.error("%s has ended %s. Another one is started, and open requests go on", self._title, how)
            self.num_restarts += 1
        self._front.lost(self)
        if self.is_stopping or self.failure is not None:
            return ENDED
        self._silent_looks = 0
        self.process = self._launch()
        self._begin(self.process)
        return AT_ONCE


def unavailable() -> Unavailable:
    return Unavailable("The engine is started again; try again later.", retry_after_seconds=5)


def _settle(asked: Future[Any], answer: Answer) -> None:
    if not asked.set_running_or_notify_cancel():
        return
    if answer.error is not None:
        asked.set_exception(answer.error)
    else:
        asked.set_result(answer)
