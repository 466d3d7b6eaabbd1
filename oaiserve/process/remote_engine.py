"""`RemoteEngine`: the front's end of an engine in a process of its own, with the members of `Engine` that routes use.

If the process ends, another one is started and goes on with the open requests. Their consumers notice only a pause.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from time import process_time_ns
from typing import Any, Protocol, TypeVar

from oaiserve.config import EngineOptions
from oaiserve.engine.accounts.energy import Energy
from oaiserve.engine.adapters import ServedAdapter
from oaiserve.engine.admission import Admission
from oaiserve.engine.current_numbers import current_numbers
from oaiserve.engine.request import (
    TERMINAL,
    Aborted,
    ChatPrompt,
    Deliver,
    Event,
    Failed,
    Prompt,
    Request,
    Terminal,
    Usage,
)
from oaiserve.engine.requests.drain_rate import drain_seconds
from oaiserve.engine.requests.open_request import Bounds
from oaiserve.engine.requests.time_limits import TimeLimits
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import (
    AdapterUnloaded,
    APIError,
    InternalError,
    NotFound,
    StartupError,
    Unavailable,
    invalid,
)
from oaiserve.explain.step_cost import StepCost
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.open_row import OpenRow
from oaiserve.facts.record import EngineAccount
from oaiserve.facts.step_record import StepRecord
from oaiserve.facts.times import RequestTimes
from oaiserve.http.fair_turns import LONG, TurnWorkers, Work
from oaiserve.process.link import Link
from oaiserve.process.messages import (
    Abort,
    Answer,
    AskOpenRows,
    AskReport,
    AskTokens,
    Begun,
    Ended,
    Health,
    LoadAdapter,
    NotStarted,
    Ready,
    Step,
    Stop,
    Submit,
    ToFront,
    UnloadAdapter,
)
from oaiserve.process.open_answer import OpenAnswer
from oaiserve.process.passed_room import PassedRoom
from oaiserve.process.remote_adapters import RemoteAdapters
from oaiserve.process.suspects import MOST_DEATHS, Suspects, refusal
from oaiserve.runtime import AT_ONCE, ENDED, Empty, Queue, Runtime, When, Worker
from oaiserve.wire.report import ReplicaReport

log = logging.getLogger(__name__)
Result = TypeVar("Result")

LOOK_NS = 1_000_000_000
MOST_ENDS = 3  # ends of engine processes within ENDS_NS, with which the server ends
ENDS_NS = 60 * 10**9
MOST_STEPS = 100_000  # records of steps that nobody has taken
STOP_SECONDS = 10.0  # for a process to end after its open requests


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


class RemoteEngine:
    """An engine in another process. All of its methods may be called from any thread."""

    def __init__(
        self,
        launch: Callable[[], EngineProcess],
        options: EngineOptions,
        load_tokenizer: Callable[[Path], Tokenizer],
        runtime: Runtime,
        energy: Energy | None = None,
        cores_ns: Callable[[], int] = process_time_ns,
    ) -> None:
        """Start an engine process with `launch`, and wait until it is ready. Raises StartupError."""
        self._launch = launch
        self._runtime = runtime
        self._clock_ns = runtime.clock_ns
        self._cores_ns = cores_ns
        self._options = options
        self._lock = Lock()  # of what follows, up to the empty line
        self._open: dict[str, OpenAnswer] = {}
        self._is_up = False  # The process has reported that it is ready, and it has not ended.
        self._asked: dict[int, Future[Any]] = {}
        self._suspects = Suspects()

        # Those of the engine are its own. These are for requests that wait until another process is there.
        bounds = Bounds(0, options.queue_timeout_seconds, options.request_timeout_seconds)
        self._limits = TimeLimits(bounds, self._open.__contains__)
        self._numbers_of_questions = count()
        self._is_draining = False
        self._is_reporting = False
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._reason = ""  # why the process has ended, as it has said itself
        self._ends_ns: deque[int] = deque(maxlen=MOST_ENDS)
        self.num_restarts = 0
        self._steps: deque[StepRecord] = deque(maxlen=MOST_STEPS)
        self._silent_looks = 0
        self._next_look_ns = 0
        self._numbers = EngineNumbers()
        self._health = Health(0, 0, 0, "", None)
        # Gets a process that has ended, or one that is ready with its facts.
        self._keeper: Worker[tuple[EngineProcess, Ready | None]] = runtime.worker("engine-keeper", self._keep)
        first: Queue[Ready | NotStarted | None] = runtime.queue()
        self._first: Queue[Ready | NotStarted | None] | None = first
        self._process = launch()
        self._begin(self._process)
        match first.get():
            case Ready() as ready:
                pass
            case NotStarted(error):
                self._process.ended()
                raise error
            case _:
                raise StartupError(f"The engine process has ended {self._process.ended()} while it loaded the model.")
        self._first = None
        assert ready.path is not None
        self.path: Path | None = ready.path
        self.tokenizer = load_tokenizer(ready.path)
        self.pooling = ready.pooling
        self.media = ready.media
        self.adapters = RemoteAdapters(ready.adapters)
        self.max_model_len = ready.max_model_len
        self.vocab_size = ready.vocab_size
        self.default_params: Mapping[str, Any] = ready.default_params
        self.recommendation = ready.recommendation
        self.energy = energy or Energy.found(runtime.clock_ns)
        self.is_on_cpu = ready.is_on_cpu
        self.kv_bytes = ready.kv_bytes
        self.model_info = ready.model_info
        self.capacity: dict[str, int] = ready.capacity
        self.features = ready.features
        self.admission = Admission(
            options.max_waiting,
            lambda num_waiting: drain_seconds(self._numbers.drain_rate, num_waiting),
            has_media=bool(ready.media),
        )
        self._room = PassedRoom(self.admission)  # under the lock
        self._workers = TurnWorkers(options.tokenize_workers, "front", has_long=bool(ready.media), runtime=runtime)
        self._is_up = True

    # What routes see of it.

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def hang(self) -> str:
        return self._health.hang

    @property
    def pause(self) -> str:
        if self._is_up or self._failure is not None:
            return ""
        return "The engine is started again. Open requests go on then."

    @property
    def is_ready(self) -> bool:
        return not self._is_draining and self._failure is None and not self.hang

    @property
    def is_reporting(self) -> bool:
        return self._is_reporting

    @property
    def step_cost(self) -> StepCost | None:
        return self._health.step_cost

    def snapshot(self) -> EngineNumbers:
        """Return the engine's numbers after its last message. The CPU time of this process is nobody's."""
        health = self._health
        now = current_numbers(
            self._numbers,
            self.adapters.served,
            now_ns=self._clock_ns(),
            cores_ns=health.cores_ns,
            explains=self._options.explain,
            num_tokenizing=health.num_tokenizing,
            num_hangs=health.num_hangs,
        )
        front_ns = self._cores_ns()
        now.core_ns += front_ns
        now.nobody_core_ns += front_ns
        return now

    def take_steps(self) -> list[StepRecord]:
        """As of `Engine`."""
        steps = []
        while self._steps:
            steps.append(self._steps.popleft())
        return steps

    def report(self, replica: str = "") -> ReplicaReport:
        """As of `Engine`. Raises Unavailable while there is no engine process."""
        self._is_reporting = True
        report: ReplicaReport = self._ask(AskReport(next(self._numbers_of_questions), replica)).result().report
        return report

    def open_requests(self, epoch_offset_ns: int, request_id: str | None = None) -> dict[str, OpenRow]:
        """As of `Engine`. While there is no engine process, there are no rows."""
        try:
            answer = self._ask(AskOpenRows(next(self._numbers_of_questions), epoch_offset_ns, request_id)).result()
        except Unavailable:
            return {}
        rows: dict[str, OpenRow] = answer.rows
        return rows

    def load_adapter(self, name: str, path: Path, *, in_place: bool = False) -> ServedAdapter:
        """As of `Engine`."""
        loaded = self._ask(LoadAdapter(next(self._numbers_of_questions), name, path, in_place)).result()
        return self.adapters.add(loaded.adapter)

    def unload_adapter(self, name: str) -> ServedAdapter:
        """As of `Engine`."""
        adapter = self.adapters.get(name)
        if adapter is None:
            raise NotFound(f"No adapter '{name[:200]}' is loaded.", param="lora_name")
        self._ask(UnloadAdapter(next(self._numbers_of_questions), name)).result()
        self.adapters.remove(name)
        return adapter

    def start(self) -> None:
        """Begin to watch the process, which is ready."""
        self._keeper.start()

    def submit(self, request: Request, deliver: Deliver) -> None:
        """As of `Engine`. While an engine process is started again, requests wait for it."""
        self._check_open()
        if self._suspects.has_quarantined(request):
            raise refusal()
        if request.is_background:
            num_open = sum(answer.request.is_background for answer in self._open.copy().values())
            self.admission.take_in_background(request.client, request.num_bytes, num_open)
        else:
            self.admission.take(request.client, request.num_choices, request.num_bytes)
        answer = OpenAnswer.of(request, deliver, self._clock_ns)
        with self._lock:
            self._open[request.request_id] = answer
            self._limits.begin(request, answer.submitted_ns)
            self._room.note(request)
            if self._is_up:
                self._send(answer)

    def abort(self, request_id: str) -> None:
        """As of `Engine`."""
        with self._lock:
            answer = self._open.get(request_id)
            if answer is None:
                return
            if answer.is_sent:
                answer.is_aborted = True
                self._process.link.send(Abort(request_id))
                return
        self._abort(answer)

    def encode(self, prompt: Prompt, most_tokens: int) -> Work[list[int]]:
        """As of `Engine`. Images and sounds are read in the engine process."""
        if isinstance(prompt, ChatPrompt) and prompt.media:
            if not self.media:
                raise invalid(prompt.param, "this model reads text alone")
            yield LONG
            asked = self._ask(AskTokens.of(next(self._numbers_of_questions), prompt, most_tokens))
            token_ids: list[int] = asked.result().token_ids
            return token_ids
        return (yield from self.tokenizer.encode_in_pieces(prompt, most_tokens))

    def run_in_turns(self, work: Work[Result], *, client: str, num_bytes: int) -> Future[Result]:
        """As of `Engine`."""
        self._check_open()
        self.admission.take(client, 1, num_bytes)

        def on_end() -> None:
            self.admission.waiting.give_back(client, 1)
            self.admission.body_bytes.give_back(client, num_bytes)

        return self._workers.run(work, client=client, num_bytes=num_bytes, on_end=on_end)

    def give_back_later(self) -> None:
        """As of `Engine`."""
        self._workers.give_back_later()

    def drain(self) -> None:
        """As of `Engine`."""
        self._is_draining = True

    def stop(self, drain_timeout_seconds: float = 0.0) -> None:
        """As of `Engine`. The process is killed if it does not end."""
        self.drain()
        self._is_stopping = True
        self._process.link.send(Stop(drain_timeout_seconds))
        if not self._keeper.join(drain_timeout_seconds + STOP_SECONDS):
            self._process.kill()
            self._keeper.join()
        self._process.ended()
        self._workers.stop()

    # What comes from the process.

    def _begin(self, process: EngineProcess) -> None:
        process.link.start(partial(self._received, process), partial(self._closed, process))

    def _received(self, process: EngineProcess, message: ToFront) -> None:
        """Take a message. Only one thread calls this at a time for one process."""
        if process is not self._process and self._first is None:
            return
        self._silent_looks = 0
        match message:
            case Step():
                self._take(message)
            case Begun(request_ids):
                for answer in filter(None, map(self._open.get, request_ids)):
                    answer.has_begun = True
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
            self._is_up = False
            asked = [*self._asked.values()]
            self._asked.clear()
        for each in asked:
            each.set_exception(_unavailable())
        self._keeper.post((process, None))

    def _take(self, step: Step) -> None:
        if step.numbers is not None:
            self._numbers = step.numbers
        if step.health is not None:
            self._health = step.health
        self._steps.extend(step.steps)
        if step.left_waiting or step.tokenized_bytes:
            with self._lock:
                self._room.left(step.left_waiting, step.tokenized_bytes)
        of_consumers: dict[Deliver, list[Event]] = {}
        for event in step.events():
            answer = self._open.get(event.request_id)
            if answer is None:
                continue
            if (passed := answer.take(event)) is not None:
                of_consumers.setdefault(answer.deliver, []).append(passed)
            if isinstance(event, TERMINAL):
                with self._lock:
                    del self._open[event.request_id]
        for deliver, events in of_consumers.items():
            try:
                deliver(events)
            except Exception:  # As in one process, a consumer that fails must not stop the others.
                log.exception("A consumer failed to take its events; its requests are dropped")
                for event in events:
                    self.abort(event.request_id)
        if self._suspects:
            with self._lock:
                self._send_next_suspect()

    # The process that has ended, and the next one. All of this is on the keeper's thread.

    def _keep(self) -> When:
        with suppress(Empty):
            process, ready = self._keeper.take()
            if process is not self._process:
                return AT_ONCE
            if ready is None:
                return self._go_on_without()
            self._go_on_with(ready)
            return AT_ONCE
        now_ns = self._clock_ns()
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + LOOK_NS
            self._look()
            self._end_overdue(now_ns)
        return self._next_look_ns

    def _end_overdue(self, now_ns: int) -> None:
        """End requests at their time limits that no process has. The engine ends the others."""
        with self._lock:
            expired = [*self._limits.deadlines.take_expired(now_ns)]
        for request_id, limit in expired:
            answer = self._open.get(request_id)
            if answer is None or answer.is_sent:
                continue
            seconds = drain_seconds(self._numbers.drain_rate, self.admission.waiting.total)
            if (error := self._limits.overdue(answer.limited(), limit, seconds)) is not None:
                self._fail_one(answer, error)

    def _look(self) -> None:
        """Kill a process that has sent nothing for long. The looks are counted, not the time: this process may have
        been stopped, too."""
        self._silent_looks += 1
        if self._is_up and self._silent_looks > self._options.watchdog_seconds:
            log.error("The engine process has sent nothing for %d s, and is killed", self._silent_looks)
            self._process.kill()

    def _go_on_without(self) -> When:
        """Start another process in place of one that has ended, unless that happens too often."""
        how = self._process.ended()
        if self._reason:
            how = f"{how} ({self._reason})"
            self._reason = ""
        now_ns = self._clock_ns()
        with self._lock:
            for answer in self._open.values():
                answer.process_ended()
            self._suspects.clear()
            self._room.count_again(answer.request for answer in self._open.values())
        if self._is_stopping:
            self._fail_all(Unavailable("The server is shutting down.", retry_after_seconds=5))
            return ENDED
        for answer in [answer for answer in self._open.copy().values() if answer.is_aborted]:
            self._abort(answer)
        self._ends_ns.append(now_ns)
        if len(self._ends_ns) == MOST_ENDS and now_ns - self._ends_ns[0] <= ENDS_NS:
            message = f"The engine process has ended {MOST_ENDS} times within a minute, at last {how}."
            log.error("%s The server ends", message)
            self._failure = EngineGone(message)
            self._fail_all(
                InternalError("The engine has stopped after an internal error; the server must be restarted.")
            )
            return ENDED
        log.error("The engine process has ended %s. Another one is started, and goes on with the open requests", how)
        self._refuse_guilty()
        self.num_restarts += 1
        self._silent_looks = 0
        self._process = self._launch()
        self._begin(self._process)
        return AT_ONCE

    def _refuse_guilty(self) -> None:
        """Refuse requests that have ended as many processes as one may, and their prompts from now on."""
        guilty = [answer for answer in self._open.copy().values() if answer.num_deaths >= MOST_DEATHS]
        for answer in guilty:
            log.error("The request %s has ended %d engine processes", answer.request.request_id, MOST_DEATHS)
            self._suspects.quarantine(answer.request)
            self._fail_one(answer, refusal())

    def _go_on_with(self, ready: Ready) -> None:
        """Let a process that is ready go on with the open requests."""
        try:
            numbers = self._adapters_again(ready)
        except APIError as error:  # It has ended meanwhile, which comes next.
            log.debug("The process has ended: %s", error)
            return
        with self._lock:
            self.adapters.renumber(numbers)
            self._numbers = ready.numbers
            answers = [*self._open.values()]
            self._suspects.wait(answers)
            for answer in answers:
                if not answer.num_deaths and not answer.is_sent:
                    self._send(answer)
            self._send_next_suspect()
            self._is_up = True
        lost = [answer for answer in answers if answer.request.adapter and answer.request.adapter not in numbers]
        for answer in lost:
            message = "The adapter that 'model' names has just been unloaded."
            self._fail_one(answer, AdapterUnloaded(message, param="model"))

    def _adapters_again(self, ready: Ready) -> dict[int, int]:
        """Load the adapters that the process lacks, and return the numbers of all. Raises Unavailable if it ends."""
        here = {adapter.name: adapter for adapter in ready.adapters}
        numbers = {}
        for adapter in self.adapters.served:
            if adapter.name in here:
                numbers[adapter.number] = here[adapter.name].number
                continue
            asked = self._ask(
                LoadAdapter(next(self._numbers_of_questions), adapter.name, Path(adapter.path), False), is_up=True
            )
            try:
                numbers[adapter.number] = asked.result().adapter.number
            except Unavailable:
                raise
            except Exception as error:
                log.error("The adapter %s could not be loaded again: %s", adapter.name, error)
                self.adapters.remove(adapter.name)
        return numbers

    def _send_next_suspect(self) -> None:
        """Send the next request that may have ended a process, if it is its turn."""
        if (answer := self._suspects.next(self._open)) is not None:
            self._send(answer)

    def _send(self, answer: OpenAnswer) -> None:
        request = answer.to_send()
        if request.adapter:
            number = self.adapters.number_of(request.adapter)
            if number is None:
                return
            request = replace(request, adapter=number)
        self._process.link.send(Submit.of(request, answer.submitted_ns))

    # Small parts.

    def _check_open(self) -> None:
        if self._is_draining:
            raise Unavailable("The server is shutting down. Please try again.", retry_after_seconds=5)
        if self._failure is not None:
            raise _unavailable()

    def _abort(self, answer: OpenAnswer) -> None:
        """Abort a request that no process has."""
        self._end(answer, lambda *so_far: Aborted(answer.request.request_id, *so_far))

    def _fail_all(self, error: APIError) -> None:
        for answer in self._open.copy().values():
            self._fail_one(answer, error)

    def _fail_one(self, answer: OpenAnswer, error: APIError) -> None:
        """Fail a request that no process has."""
        self._end(answer, lambda *so_far: Failed(answer.request.request_id, error, *so_far))

    def _end(self, answer: OpenAnswer, terminal: Callable[[Usage, RequestTimes, EngineAccount], Terminal]) -> None:
        with self._lock:
            if self._open.pop(answer.request.request_id, None) is None:
                return
            self._room.give_back(answer.request)
        end = terminal(*answer.so_far())
        answer.take(end)
        try:
            answer.deliver([end])
        except Exception:
            log.exception("A consumer failed to take the end of its request")

    def _ask(self, question: Any, *, is_up: bool = False) -> Future[Any]:
        """Send a question, and return its future answer. Raises Unavailable if no process is there, or it ends."""
        asked: Future[Any] = self._runtime.future()
        with self._lock:
            if not (self._is_up or is_up):
                raise _unavailable()
            self._asked[question.number] = asked
            self._process.link.send(question)
        return asked


def _unavailable() -> Unavailable:
    return Unavailable("The engine is started again; try again later.", retry_after_seconds=5)


def _settle(asked: Future[Any], answer: Answer) -> None:
    if not asked.set_running_or_notify_cancel():
        return
    if answer.error is not None:
        asked.set_exception(answer.error)
    else:
        asked.set_result(answer)
