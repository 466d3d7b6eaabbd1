"""`RemoteEngine`: the front's end of engines in processes of their own, with the members of `Engine` that routes use.

If a process ends, another one is started. The open requests continue there, or on another replica. Their consumers
notice only a pause.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from time import process_time_ns
from typing import Any, TypeVar

from oaiserve.config import EngineOptions
from oaiserve.engine.accounts.energy import Energy
from oaiserve.engine.admission import Admission
from oaiserve.engine.request import (
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
from oaiserve.engine.types.adapters import ServedAdapter
from oaiserve.errors import AdapterUnloaded, APIError, InternalError, NotFound, Unavailable, invalid
from oaiserve.explain.step_cost import StepCost
from oaiserve.facts.engine_numbers import EngineNumbers, ReplicaState, added
from oaiserve.facts.open_row import MOST_SHOWN, OpenRow
from oaiserve.facts.record import EngineAccount
from oaiserve.facts.step_record import StepRecord
from oaiserve.facts.times import RequestTimes
from oaiserve.http.fair_turns import LONG, TurnWorkers, Work
from oaiserve.process.messages import (
    Abort,
    Answer,
    AskOpenRows,
    AskReport,
    AskTokenizer,
    AskTokens,
    LoadAdapter,
    Ready,
    Step,
    Submit,
    UnloadAdapter,
)
from oaiserve.process.open_answer import OpenAnswer
from oaiserve.process.passed_room import PassedRoom
from oaiserve.process.remote_adapters import RemoteAdapters
from oaiserve.process.remote_tokenizer import Method, RemoteTokenizer
from oaiserve.process.replica import EngineProcess, Replica, unavailable
from oaiserve.process.replica_choice import ReplicaChoice
from oaiserve.process.suspects import MOST_DEATHS, Quarantine, refusal
from oaiserve.runtime import Runtime
from oaiserve.wire.prefix_keys import Prompt as RoutedPrompt
from oaiserve.wire.prefix_keys import prompt_of_body
from oaiserve.wire.report import ReplicaReport, together

log = logging.getLogger(__name__)
Result = TypeVar("Result")

MOST_STEPS = 100_000  # records of steps that wait for `take_steps`
STOP_SECONDS = 10.0  # time for a process to end after its open requests


class RemoteEngine:
    """Engines in other processes, which all have the same model. All methods may be called from any thread."""

    def __init__(
        self,
        launches: Sequence[Callable[[], EngineProcess]],
        options: EngineOptions,
        runtime: Runtime,
        energy: Energy | None = None,
        cores_ns: Callable[[], int] = process_time_ns,
        of: str = "",
    ) -> None:
        """Start an engine process with each of `launches`, and wait until all are ready. In the log, `of` follows the
        name of a process. Raises StartupError."""
        self._runtime = runtime
        self._clock_ns = runtime.clock_ns
        self.cores_ns = cores_ns  # returns the CPU time of the front
        self._options = options
        self._lock = Lock()  # guards the attributes up to the empty line
        self._open: dict[str, OpenAnswer] = {}
        # Time limits of requests that wait for a new process. The engines enforce the limits of the others.
        bounds = Bounds(0, options.queue_timeout_seconds, options.request_timeout_seconds)
        self._limits = TimeLimits(bounds, self._open.__contains__)
        self._quarantine = Quarantine()
        self._unloaded: list[OpenAnswer] = []  # requests that could not be sent, because their adapter was unloaded
        self._waiting: list[Future[None]] = []  # futures of questions that wait for an engine process

        self._is_draining = False
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._steps: deque[StepRecord] = deque(maxlen=MOST_STEPS)
        self._is_alone = len(launches) == 1
        self._replicas: dict[str, Replica] = {}
        for number, launch in enumerate(launches):
            name = str(number)
            title = f"The engine process{of}" if self._is_alone else f"The engine process of replica {name}{of}"
            limits = (options.watchdog_seconds, options.load_timeout_seconds)
            replica = Replica(name, title, launch, self, self._lock, *limits, runtime)
            self._replicas[name] = replica
        self._is_reporting = not self._is_alone
        self._num_reports = 0
        self._incarnation = runtime.token_hex(8)
        self._choice = ReplicaChoice(self._clock_ns)  # under the lock
        try:
            every = [replica.first() for replica in self._replicas.values()]
        except BaseException:
            for replica in self._replicas.values():
                replica.kill()
            raise
        ready = every[0]
        self.path = ready.path
        self.tokenizer = RemoteTokenizer(ready.tokenizer, self._encode, self._call_tokenizer)
        self.pooling = ready.pooling
        self.media = ready.media
        self.adapters = RemoteAdapters(ready.adapters)
        self.max_model_len = ready.max_model_len
        self.vocab_size = ready.vocab_size
        self.default_params: Mapping[str, Any] = ready.default_params
        self.recommendation = ready.recommendation
        self.energy = energy or Energy.found(runtime.clock_ns)
        self.is_on_cpu = ready.is_on_cpu
        self.kv_bytes = sum(each.kv_bytes for each in every)
        self.model_info = ready.model_info
        self.capacity: dict[str, int] = {
            **ready.capacity,
            **{name: sum(each.capacity[name] for each in every) for name in ("kv_blocks", "max_running")},
        }
        self.features = ready.features
        self.admission = Admission(options.max_waiting, self._drain_seconds, has_media=bool(ready.media))
        for replica in self._replicas.values():
            replica.room = PassedRoom(self.admission)
        self._workers = TurnWorkers(options.tokenize_workers, "front", has_long=True, runtime=runtime)

    # The interface for routes

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def hang(self) -> str:
        hangs = [replica.health.hang for replica in self._replicas.values()]
        return hangs[0] if all(hangs) else ""

    @property
    def pause(self) -> str:
        if self._failure is not None:
            return ""
        return " ".join(filter(None, map(self._pause_of, self._replicas.values())))

    def _pause_of(self, replica: Replica) -> str:
        if replica.is_up:
            return ""
        if self._is_alone:
            return "The engine is started again. Open requests go on then."
        name = f"Replica {replica.name} of {len(self._replicas)}"
        if replica.failure is not None:
            return f"{name} is down until the server is started again. {replica.failure}"
        return f"{name} is started again. Its requests go on on others."

    @property
    def num_restarts(self) -> int:
        return sum(replica.num_restarts for replica in self._replicas.values())

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        if self._is_alone:
            return ()
        return [
            ReplicaState(each.name, each.is_up, each.num_restarts, self._now(each), {**each.choices})
            for each in self._replicas.values()
        ]

    def has_others(self, client: str) -> bool:
        """Return whether other clients than this one have open requests."""
        return any(answer.request.client != client for answer in self._open.copy().values())

    @property
    def is_ready(self) -> bool:
        return not self._is_draining and self._failure is None and not self.hang

    @property
    def is_reporting(self) -> bool:
        return self._is_reporting

    def routing_of(self, content: bytes | bytearray) -> RoutedPrompt | None:
        """See `Engine`."""
        return prompt_of_body(content) if self._is_reporting else None

    @property
    def step_cost(self) -> StepCost | None:
        return next((cost for each in self._replicas.values() if (cost := each.health.step_cost) is not None), None)

    def snapshot(self) -> EngineNumbers:
        """Return the engines' numbers as of their last messages. No request is charged for the CPU time of this
        process."""
        numbers = [*map(self._now, self._replicas.values())]
        now = numbers[0] if self._is_alone else added(numbers)
        front_ns = self.cores_ns()
        now.core_ns += front_ns
        now.nobody_core_ns += front_ns
        return now

    def _now(self, replica: Replica) -> EngineNumbers:
        return replica.now(self.adapters.served, self._clock_ns(), explains=self._options.explain)

    def take_steps(self) -> list[StepRecord]:
        """See `Engine`."""
        steps = []
        while self._steps:
            steps.append(self._steps.popleft())
        return steps

    def report(self, replica: str = "") -> ReplicaReport:
        """See `Engine`. The report covers all replicas. Raises Unavailable while there is no engine process."""
        self._is_reporting = True
        asked = self._ask_all(lambda number: AskReport(number, replica))
        reports: list[ReplicaReport] = [each.result().report for each in asked.values()]
        if self._is_alone:
            return reports[0]
        self._num_reports += 1
        return replace(together(reports), incarnation=self._incarnation, number=self._num_reports)

    def open_requests(self, epoch_offset_ns: int, request_id: str | None = None) -> dict[str, OpenRow]:
        """See `Engine`. Requests that wait for an engine process have no rows."""
        found: list[tuple[str, OpenRow]] = []
        try:
            asked = self._ask_all(lambda number: AskOpenRows(number, epoch_offset_ns, request_id))
        except Unavailable:
            return {}
        for replica, question in asked.items():
            try:
                rows: dict[str, OpenRow] = question.result().rows
            except Unavailable:
                continue
            if not self._is_alone:
                for row in rows.values():
                    row.replica = replica.name
            found += rows.items()
        found.sort(key=lambda item: item[1].received_unix_ns, reverse=True)
        return dict(found[:MOST_SHOWN])

    def load_adapter(self, name: str, path: Path, *, in_place: bool = False) -> ServedAdapter:
        """See `Engine`. All replicas load the adapter, or none."""
        loaded: dict[EngineProcess, ServedAdapter] = {}
        while True:
            asked = self._ask_all(lambda number: LoadAdapter(number, name, path, in_place), without=loaded)
            for replica, question in asked.items():
                process = replica.process
                try:
                    loaded[process] = question.result().adapter
                except Unavailable:  # The next process loads it with the others.
                    continue
                except Exception:
                    if loaded:
                        self._unload(name)
                    raise
            with self._lock:
                ups = self._ups()
                if loaded and {replica.process for replica in ups} <= loaded.keys():
                    adapter = self.adapters.add(next(iter(loaded.values())))
                    for replica in ups:
                        replica.adapter_numbers[adapter.number] = loaded[replica.process].number
                    return adapter

    def unload_adapter(self, name: str) -> ServedAdapter:
        """See `Engine`."""
        adapter = self.adapters.get(name)
        if adapter is None:
            raise NotFound(f"No adapter '{name[:200]}' is loaded.", param="lora_name")
        self._unload(name)
        return adapter

    def start(self) -> None:
        """Begin to watch the processes, which are ready by now."""
        for replica in self._replicas.values():
            replica.start()

    def submit(self, request: Request, deliver: Deliver) -> None:
        """See `Engine`. While an engine process restarts, requests go to other replicas, or wait if there are none."""
        self._check_open()
        if request in self._quarantine:
            raise refusal()
        if request.is_background:
            num_open = sum(answer.request.is_background for answer in self._open.copy().values())
            self.admission.take_in_background(request.client, request.num_bytes, num_open)
        else:
            self.admission.take(request.client, request.num_choices, request.num_bytes)
        answer = OpenAnswer.of(request, deliver, self._clock_ns)
        with self._lock:
            replica = self._choose(request)
            answer.replica = replica.name
            self._open[request.request_id] = answer
            self._limits.begin(request, answer.submitted_ns)
            replica.room.note(request)
            if replica.is_up:
                self._send(replica, answer)
        self._fail_unloaded()

    def abort(self, request_id: str) -> None:
        """See `Engine`."""
        with self._lock:
            answer = self._open.get(request_id)
            if answer is None:
                return
            if answer.is_sent:
                answer.is_aborted = True
                self._replicas[answer.replica].send(Abort(request_id))
                return
            self._take_out(answer)  # Otherwise another thread could send it now.
        self._pass_end(answer, partial(Aborted, request_id))

    def encode(self, prompt: Prompt, most_tokens: int | None) -> Work[list[int]]:
        """See `Engine`."""
        if isinstance(prompt, ChatPrompt) and prompt.media and not self.media:
            raise invalid(prompt.param, "this model reads text alone")
        yield LONG
        return self._encode(prompt, most_tokens)

    def run_in_turns(self, work: Work[Result], *, client: str, num_bytes: int) -> Future[Result]:
        """See `Engine`."""
        self._check_open()
        self.admission.take(client, 1, num_bytes)

        def on_end() -> None:
            self.admission.waiting.give_back(client, 1)
            self.admission.body_bytes.give_back(client, num_bytes)

        return self._workers.run(work, client=client, num_bytes=num_bytes, on_end=on_end)

    def give_back_later(self) -> None:
        """See `Engine`."""
        self._workers.give_back_later()

    def drain(self) -> None:
        """See `Engine`."""
        self._is_draining = True

    def stop(self, drain_timeout_seconds: float = 0.0) -> None:
        """See `Engine`. Processes that do not end are killed."""
        self.drain()
        self._is_stopping = True
        self._wake_waiting()
        for replica in self._replicas.values():
            replica.stop(drain_timeout_seconds)
        last_ns = self._clock_ns() + int((drain_timeout_seconds + STOP_SECONDS) * 1e9)
        for replica in self._replicas.values():
            replica.join(max(0.0, (last_ns - self._clock_ns()) / 1e9))
        self._workers.stop()

    # Messages from the processes

    def began(self, replica: Replica, request_ids: Iterable[str]) -> None:
        for answer in filter(None, map(self._open.get, request_ids)):
            if answer.replica == replica.name:
                answer.has_begun = True

    def took_step(self, replica: Replica, step: Step) -> None:
        self._steps.extend(step.steps)
        if step.left_waiting or step.tokenized_bytes:
            with self._lock:
                replica.room.left(step.left_waiting, step.tokenized_bytes)
        of_consumers: dict[Deliver, list[Event]] = {}
        for event in step.events():
            answer = self._open.get(event.request_id)
            if answer is None:
                continue
            if (passed := answer.take(event)) is not None:
                events = of_consumers.get(answer.deliver)
                if events is None:
                    events = of_consumers[answer.deliver] = []
                events.append(passed)
        for end in step.ends():
            if not self._is_alone:
                end.account.replica = replica.name
            with self._lock:
                self._open.pop(end.request_id, None)
        for deliver, events in of_consumers.items():
            try:
                deliver(events)
            except Exception:  # A consumer that fails must not stop the others.
                log.exception("A consumer failed to take its events; its requests are dropped")
                for event in events:
                    self.abort(event.request_id)
        if replica.suspects:
            with self._lock:
                self._send_next_suspect(replica)
            self._fail_unloaded()

    def looked(self, replica: Replica) -> None:
        """End requests that reach a time limit while no process has them. The engines end the others. With several
        replicas, also ask for a report, which the choice of replicas needs."""
        with self._lock:
            expired = [*self._limits.deadlines.take_expired(self._clock_ns())]
        for request_id, limit in expired:
            answer = self._open.get(request_id)
            if answer is None or answer.is_sent:
                continue
            seconds = self._drain_seconds(self.admission.waiting.total)
            if (error := self._limits.overdue(answer.limited(), limit, seconds)) is not None:
                with self._lock:
                    if answer.is_sent or not self._take_out(answer):
                        continue
                self._pass_end(answer, partial(Failed, request_id, error))
        if replica.is_up and not self._is_alone:
            try:
                replica.ask(lambda number: AskReport(number, replica.name)).add_done_callback(self._learn)
            except Unavailable:  # The process has just ended.
                return

    def _learn(self, asked: Future[Any]) -> None:
        if asked.exception() is None:
            with self._lock:
                self._choice.learn(asked.result().report)

    # A process that has ended, and the next one. These methods run on the keeper's thread of the replica.

    def lost(self, replica: Replica) -> None:
        """Continue the requests of a process that has ended on other replicas, or let them wait for the next
        process."""
        with self._lock:
            answers = [answer for answer in self._open.values() if answer.replica == replica.name]
            for answer in answers:
                answer.process_ended()
            replica.suspects.clear()
            replica.room.count_again(answer.request for answer in answers)
        if self._is_stopping:
            self._fail_all(answers, Unavailable("The server is shutting down.", retry_after_seconds=5))
            return
        for answer in answers:
            if answer.is_aborted:
                self._end(answer, partial(Aborted, answer.request.request_id))
            elif answer.num_deaths >= MOST_DEATHS:
                self._refuse(answer)
        if replica.failure is not None:
            if all(each.failure is not None for each in self._replicas.values()):
                log.error("%s No other one is started", replica.failure)
                self._failure = replica.failure
                self._wake_waiting()
                message = "The engine has stopped after an internal error; the server must be restarted."
                self._fail_all(self._open.copy().values(), InternalError(message))
                return
            log.error("%s It stays down, and the others go on", replica.failure)
        self._move([answer for answer in answers if answer.request.request_id in self._open], replica)

    def _move(self, answers: Iterable[OpenAnswer], replica: Replica) -> None:
        """Move requests of a replica without a process to other replicas, if there are any. Requests that may have
        ended the process wait for the next one, which gets them one at a time."""
        with self._lock:
            for answer in answers:
                if answer.num_deaths and replica.failure is None:
                    continue
                other = self._choose(answer.request)
                if other is replica:
                    continue
                replica.room.give_back(answer.request)
                other.room.add(answer.request)
                answer.replica = other.name
                if not other.is_up:
                    continue
                if answer.num_deaths:
                    other.suspects.wait([answer])
                    self._send_next_suspect(other)
                else:
                    self._send(other, answer)
        self._fail_unloaded()

    def _refuse(self, answer: OpenAnswer) -> None:
        """Fail a request that has ended MOST_DEATHS engine processes, and refuse its prompts from now on."""
        log.error("The request %s has ended %d engine processes", answer.request.request_id, MOST_DEATHS)
        self._quarantine.add(answer.request)
        self._fail_one(answer, refusal())

    def is_ready_again(self, replica: Replica, ready: Ready) -> None:
        """Send the open requests of a replica to its new process, which is ready."""
        here = {adapter.name: adapter.number for adapter in ready.adapters}
        while True:
            try:
                self._load_missing(replica, here)
            except Unavailable as error:  # It has ended meanwhile, which is handled next.
                log.debug("The process has ended: %s", error)
                return
            with self._lock:
                served = self.adapters.served
                if not all(adapter.name in here for adapter in served):
                    continue
                replica.adapter_numbers = {adapter.number: here[adapter.name] for adapter in served}
                replica.numbers = ready.numbers
                answers = [answer for answer in self._open.values() if answer.replica == replica.name]
                replica.suspects.wait(answers)
                for answer in answers:
                    if not answer.num_deaths and not answer.is_sent:
                        self._send(replica, answer)
                self._send_next_suspect(replica)
                replica.is_up = True
                break
        self._wake_waiting()
        self._fail_unloaded()
        for name in here.keys() - {adapter.name for adapter in served}:
            self._unload_from([replica], name)

    def _load_missing(self, replica: Replica, here: dict[str, int]) -> None:
        """Load the adapters that the process lacks, and note their numbers. Raises Unavailable if it ends."""
        for adapter in self.adapters.served:
            if adapter.name in here:
                continue
            load = partial(LoadAdapter, name=adapter.name, path=Path(adapter.path), in_place=False)
            try:
                here[adapter.name] = replica.ask(load, is_up=True).result().adapter.number
            except Unavailable:
                raise
            except Exception as error:
                log.error("The adapter %s could not be loaded again: %s", adapter.name, error)
                self.adapters.remove(adapter.name)

    # Helpers. The first four and `_take_out` are called with the lock held.

    def _choose(self, request: Request) -> Replica:
        """Return the replica for a request: one that is up, if there is any."""
        replicas = self._ups() or [each for each in self._replicas.values() if each.failure is None]
        if len(replicas) == 1:
            return replicas[0]
        decision = self._choice.choose(request, [each.name for each in replicas])
        replica = self._replicas[decision.replica]
        replica.choices[decision.reason] += 1
        return replica

    def _ups(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.is_up]

    def _send_next_suspect(self, replica: Replica) -> None:
        """Send the next request that may have ended a process, if it is its turn."""
        if (answer := replica.suspects.next(self._open)) is not None:
            self._send(replica, answer)

    def _send(self, replica: Replica, answer: OpenAnswer) -> None:
        """Send a request to a process, unless it names an adapter that has been unloaded meanwhile."""
        adapter = answer.request.adapter
        number = replica.adapter_numbers.get(adapter, 0)
        if adapter and not number:
            self._unloaded.append(answer)
            return
        request = answer.to_send()
        replica.send(Submit.of(replace(request, adapter=number) if adapter else request, answer.submitted_ns))

    def _check_open(self) -> None:
        if self._is_draining:
            raise Unavailable("The server is shutting down. Please try again.", retry_after_seconds=5)
        if self._failure is not None:
            raise unavailable()

    def _drain_seconds(self, num_waiting: int) -> int:
        return drain_seconds(sum(each.numbers.drain_rate for each in self._replicas.values()), num_waiting)

    def _fail_unloaded(self) -> None:
        while self._unloaded:
            message = "The adapter that 'model' names has just been unloaded."
            self._fail_one(self._unloaded.pop(), AdapterUnloaded(message, param="model"))

    def _fail_all(self, answers: Iterable[OpenAnswer], error: APIError) -> None:
        for answer in answers:
            self._fail_one(answer, error)

    def _fail_one(self, answer: OpenAnswer, error: APIError) -> None:
        """Fail a request that no process has."""
        self._end(answer, partial(Failed, answer.request.request_id, error))

    def _end(self, answer: OpenAnswer, terminal: Callable[[Usage, RequestTimes, EngineAccount], Terminal]) -> None:
        with self._lock:
            is_open = self._take_out(answer)
        if is_open:
            self._pass_end(answer, terminal)

    def _take_out(self, answer: OpenAnswer) -> bool:
        """Remove a request that no process has from the open ones, and return whether it was still open."""
        if self._open.pop(answer.request.request_id, None) is None:
            return False
        self._replicas[answer.replica].room.give_back(answer.request)
        return True

    def _pass_end(self, answer: OpenAnswer, terminal: Callable[[Usage, RequestTimes, EngineAccount], Terminal]) -> None:
        end = terminal(*answer.so_far())
        answer.take(end)
        try:
            answer.deliver([end])
        except Exception:
            log.exception("A consumer failed to take the end of its request")

    def _encode(self, prompt: Prompt, most_tokens: int | None) -> list[int]:
        answer = self._ask_any(lambda number: AskTokens.of(number, prompt, most_tokens))
        assert answer.token_ids is not None
        return answer.token_ids

    def _call_tokenizer(self, method: Method, *arguments: Any, prompt: Prompt | None = None) -> Any:
        return self._ask_any(lambda number: AskTokenizer.of(number, method, prompt, arguments)).result

    def _ask_any(self, question: Callable[[int], Any]) -> Answer:
        """Return the answer of an engine process to a question. If the process ends meanwhile, ask another one, or wait
        for the next one. Raises the answer's error, or Unavailable."""
        for _ in range(MOST_DEATHS):
            while not (ups := self._ups()):
                with self._lock:
                    if self._is_stopping or self._failure is not None:
                        raise unavailable()
                    if self._ups():
                        continue
                    waiting = self._runtime.future()
                    self._waiting.append(waiting)
                waiting.result()
            with suppress(Unavailable):  # It has ended.
                answer: Answer = ups[0].ask(question).result()
                return answer
        raise unavailable()

    def _wake_waiting(self) -> None:
        with self._lock:
            waiting = self._waiting
            self._waiting = []
        for each in waiting:
            each.set_result(None)

    def _ask_all(
        self, question: Callable[[int], Any], without: Container[EngineProcess] = ()
    ) -> dict[Replica, Future[Any]]:
        """Send a question to all processes except `without`, and return futures for their answers. Raises Unavailable
        if there is no process."""
        asked: dict[Replica, Future[Any]] = {}
        ups = self._ups()
        for replica in ups:
            if replica.process not in without:
                with suppress(Unavailable):  # It has just ended.
                    asked[replica] = replica.ask(question)
        if not (asked or ups):
            raise unavailable()
        return asked

    def _unload(self, name: str) -> None:
        with self._lock:
            self.adapters.remove(name)
            ups = self._ups()
        self._unload_from(ups, name)

    def _unload_from(self, replicas: Iterable[Replica], name: str) -> None:
        for replica in replicas:
            with suppress(Unavailable, NotFound):
                replica.ask(lambda number: UnloadAdapter(number, name)).result()
