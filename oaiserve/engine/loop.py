"""The engine thread: takes commands, schedules, launches steps, hands the results over. No torch: the runner is given.

The thread owns scheduler, runner and outputs. Commands come in through one inbox, events go out with one call per step
and consumer, numbers go out as an immutable snapshot. Hence no locks.

With overlap, a step is launched before the results of the one before are here, so that the device has something to do
while they are handed over. At most one step is under way when the next is scheduled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from random import getrandbits
from threading import Thread
from typing import Any, Protocol

from oaiserve.engine.backpressure import Deadlines, DrainRate
from oaiserve.engine.detokenize import StopStrings, TokenTable
from oaiserve.engine.draws import draw_key
from oaiserve.engine.output import ChoiceOutput, first_token_logprob, token_logprob
from oaiserve.engine.pacing import PrefillBudget
from oaiserve.engine.request import (
    Aborted,
    Deliver,
    Event,
    Failed,
    Finished,
    PromptDone,
    Request,
    TextPrompt,
    TokenLogprob,
    Usage,
)
from oaiserve.engine.scheduler import Scheduler
from oaiserve.engine.sequence import Chunk, ChunkResult, Sequence, Step
from oaiserve.engine.step_account import EngineSnapshot, RequestNotes, StepAccount
from oaiserve.engine.tokenize import Tokenized, TokenizeFailed
from oaiserve.errors import APIError, InternalError, Overloaded, RequestTimeout, Unavailable

log = logging.getLogger(__name__)

TELL_INTERVAL_NS = 60_000_000_000  # between two lines about the same trouble


class Runner(Protocol):
    is_asynchronous: bool  # `launch` returns before the step has been computed

    def launch(self, step: Step) -> Any:
        """Begins to compute the step, after all those launched before. Returns what `collect` is to be given."""

    def collect(self, launched: Any) -> list[ChunkResult]:
        """Waits until the step has been computed. One result per chunk, in order; in the order of the launches."""


@dataclass(frozen=True, slots=True)
class Submitted:
    request: Request
    deliver: Deliver


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the thread: when what is open has ended (`drain`), or at once, failing what is open."""

    drain: bool


Command = Submitted | Tokenized | TokenizeFailed | Abort | Stop


@dataclass(slots=True)
class _Prompt:
    """A prompt of an open request until its data has been sent."""

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    sent: bool = False


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not had its terminal event."""

    request: Request
    deliver: Deliver
    prompts: list[_Prompt] = field(default_factory=list)
    outputs: dict[Sequence, ChoiceOutput] = field(default_factory=dict)  # of choices that have not finished
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    waiting_tokens: int = 0  # of its prompts, until it enters a step
    notes: RequestNotes = field(init=False)

    def __post_init__(self) -> None:
        self.notes = RequestNotes(self.request)


@dataclass(slots=True)
class _Launched:
    """A step under way."""

    step: Step
    handle: Any  # of the runner
    at_ns: int
    newcomers: list[_OpenRequest]  # whose first step it is


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        table: TokenTable,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        clock_ns: Callable[[], int],
        overlap: bool = False,
        max_waiting_tokens: int | None = None,
        queue_timeout_seconds: float = 0,
        request_timeout_seconds: float = 0,
        itl_target_seconds: float | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._table = table
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._clock_ns = clock_ns
        self._overlap = overlap
        self._max_waiting_tokens = max_waiting_tokens
        self._queue_timeout_seconds = queue_timeout_seconds
        self._request_timeout_seconds = request_timeout_seconds
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        # owned by the engine thread
        self._open: dict[str, _OpenRequest] = {}
        self._outbox: dict[Deliver, list[Event]] = {}
        self._draining = False
        self._in_flight: _Launched | None = None
        self._account = StepAccount()
        self._told_of_preemptions_ns: int | None = None
        self._num_submitted = 0
        self._num_waiting_tokens = 0
        self._pacing: PrefillBudget | None = None
        if itl_target_seconds is not None:
            self._pacing = PrefillBudget(itl_target_seconds, scheduler.limits.max_step_tokens)
        self._queue_deadlines = Deadlines(queue_timeout_seconds)
        self._request_deadlines = Deadlines(request_timeout_seconds)
        # written by the engine thread, read by anyone
        self.failure: BaseException | None = None
        self.is_stopped = False
        self.snapshot = EngineSnapshot(blocks_total=scheduler.pool.num_blocks)
        self.num_left_waiting = 0  # requests that entered a step, or ended before
        self.drain_rate = DrainRate()
        self.steps = self._account.steps

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self.is_stopped

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """From any thread. What is posted after the end of the loop is answered by the poster itself."""
        self._inbox.put(command)
        if self.is_stopped:
            self._refuse_inbox()

    def join(self, timeout_seconds: float | None = None) -> bool:
        """True when the thread has ended."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._turn()
        except BaseException as error:  # a panic in Rust code is no Exception
            log.exception("The engine has stopped")
            self.failure = error
        finally:
            self._close()

    def _turn(self) -> None:
        self._end_overdue()
        if self._outbox:
            self._hand_over()  # what has ended between two steps need not wait for the next
        launched = self._launch()
        in_flight, self._in_flight = self._in_flight, launched
        if in_flight is not None:
            self._complete(in_flight)
        if launched is not None and not self._may_overlap(launched.step):
            self._in_flight = None
            self._complete(launched)
        elif in_flight is None:
            self._publish()

    def _launch(self) -> _Launched | None:
        now_ns = self._clock_ns()
        step = self._scheduler.schedule(now_ns)
        if step is None:
            return None
        newcomers = self._note_scheduled(step, now_ns)
        at_ns = self._clock_ns()
        launched = _Launched(step, self._runner.launch(step), at_ns, newcomers)
        self._scheduler.advance(step)
        return launched

    def _may_overlap(self, step: Step) -> bool:
        """Whether the next step can be launched without the ids that this one draws."""
        return self._overlap and not any(chunk.samples and chunk.sequence.needs_ids for chunk in step.chunks)

    def _complete(self, launched: _Launched) -> None:
        step, results = launched.step, self._runner.collect(launched.handle)
        ended_ns = self._clock_ns()
        for opened in launched.newcomers:
            opened.notes.first_step_ended(self._account.totals)
        step_ns = self._account.step_ended(step, launched.at_ns, ended_ns)
        self._process(step, results, ended_ns)
        self._pace(step, step_ns)
        self._hand_over()

    def _take_commands(self) -> bool:
        """Waits for a command only where there is nothing to compute. False: the thread shall end."""
        while not (self._draining and not self._open):
            try:
                is_idle = self._in_flight is None and not self._scheduler.has_work and not self._outbox
                command = self._inbox.get(block=is_idle, timeout=self._seconds_to_deadline() if is_idle else None)
            except Empty:
                return True
            if is_idle:
                self._account.work_arrived(self._clock_ns())
            match command:
                case Submitted():
                    self._admit(command)
                case Tokenized():
                    self._accept(command)
                case TokenizeFailed():
                    if command.request.request_id in self._open:
                        self._fail(self._open[command.request.request_id], command.error)
                case Abort():
                    if command.request_id in self._open:
                        opened = self._open[command.request_id]
                        self._end(opened, Aborted(command.request_id, opened.usage))
                case Stop(drain=True):
                    self._draining = True
                case Stop():
                    return False
        return False

    def _admit(self, submitted: Submitted) -> None:
        request = submitted.request
        self._num_submitted += 1
        self._open[request.request_id] = _OpenRequest(request, submitted.deliver)
        request.account.num_choices = len(request.prompts) * request.params.n
        # Not from now: a step may have been under way when it came.
        submitted_ns = request.times.submitted or self._clock_ns()
        self._queue_deadlines.begin(request.request_id, submitted_ns)
        self._request_deadlines.begin(request.request_id, submitted_ns)

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [d.next_ns for d in (self._queue_deadlines, self._request_deadlines) if d.next_ns is not None]
        return max(0.0, (min(deadlines) - self._clock_ns()) / 1e9) if deadlines else None

    def _end_overdue(self) -> None:
        now_ns = self._clock_ns()
        for request_id in self._queue_deadlines.over(now_ns):
            opened = self._open.get(request_id)
            if opened is not None and opened.request.times.scheduled is None:
                seconds = f"{self._queue_timeout_seconds:g}"
                message = f"The request waited {seconds} seconds and was not begun; try again later."
                self._fail(opened, Unavailable(message, retry_after_seconds=self._retry_after_seconds()))
        for request_id in self._request_deadlines.over(now_ns):
            if request_id in self._open:
                message = f"The request took longer than {self._request_timeout_seconds:g} seconds, the limit here."
                self._fail(self._open[request_id], RequestTimeout(message))

    def _accept(self, tokenized: Tokenized) -> None:
        """Makes the sequences of a request. One that was aborted meanwhile is not open any more."""
        request = tokenized.request
        opened = self._open.get(request.request_id)
        if opened is None:
            return
        if self._is_too_much(tokenized.num_prompt_tokens):
            message = f"{self._num_waiting_tokens} prompt tokens are waiting already; try again later."
            self._fail(opened, Overloaded(message, retry_after_seconds=self._retry_after_seconds()))
            return
        opened.waiting_tokens = tokenized.num_prompt_tokens
        self._num_waiting_tokens += opened.waiting_tokens
        params = request.params
        stop_ids = (frozenset() if params.ignore_eos else self._eos_token_ids) | set(params.stop_token_ids)
        stops = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        opened.usage.prompt_tokens = tokenized.num_prompt_tokens
        for prompt_index, token_ids in enumerate(tokenized.token_ids):
            seed = getrandbits(64) if params.seed is None else params.seed
            limit = self._max_model_len if params.max_tokens is None else len(token_ids) + params.max_tokens
            logprobs = None if params.prompt_logprobs is None else [first_token_logprob(self._table, token_ids[0])]
            opened.prompts.append(_Prompt(token_ids, logprobs))
            leader: Sequence | None = None  # the first choice computes the prompt for the others
            for choice in range(params.n):
                sequence = Sequence(
                    request.request_id,
                    prompt_index * params.n + choice,
                    token_ids,
                    params,
                    max_len=limit,
                    stop_ids=stop_ids,
                    draw_key=draw_key(seed, choice),
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    bad_words=tokenized.bad_words,
                )
                sequence.wants_prompt_logprobs = logprobs is not None and choice == 0
                opened.outputs[sequence] = ChoiceOutput(
                    sequence,
                    self._table,
                    stops,
                    eos_token_ids=self._eos_token_ids,
                    stream_interval=request.stream_interval,
                )
                self._scheduler.add(sequence, leader, since_ns=request.times.tokenized or self._clock_ns())
                leader = leader or sequence

    def _is_too_much(self, num_tokens: int) -> bool:
        """Whoever comes first is let in, however long its prompt is."""
        most = self._max_waiting_tokens
        return most is not None and self._num_waiting_tokens > 0 and self._num_waiting_tokens + num_tokens > most

    def _retry_after_seconds(self) -> int:
        """By requests, as the drain rate counts them: the scheduler's sequences may be several of one request."""
        return self.drain_rate.retry_after_seconds(self._num_submitted - self.num_left_waiting)

    def _stop_waiting(self, opened: _OpenRequest) -> None:
        self.num_left_waiting += 1
        self._num_waiting_tokens -= opened.waiting_tokens
        opened.waiting_tokens = 0

    def _tell_of_preemptions(self, now_ns: int) -> None:
        if self._told_of_preemptions_ns is None or now_ns - self._told_of_preemptions_ns > TELL_INTERVAL_NS:
            self._told_of_preemptions_ns = now_ns
            log.warning(
                "The KV cache is full: %d preemptions so far. What they lose is computed again; more --kv-cache-memory "
                "or a lower --max-running avoids that.",
                self._scheduler.num_preemptions,
            )

    def _note_scheduled(self, step: Step, now_ns: int) -> list[_OpenRequest]:
        """Returns the requests whose first step it is."""
        if step.preempted:
            self._tell_of_preemptions(now_ns)
        for sequence in step.preempted:
            self._open[sequence.request_id].notes.preempted(sequence, now_ns)
        newcomers = []
        for sequence in step.admitted:
            opened = self._open[sequence.request_id]
            if opened.notes.admitted(sequence, now_ns):
                newcomers.append(opened)
                self._stop_waiting(opened)
        return newcomers

    def _pace(self, step: Step, step_ns: int) -> None:
        if self._pacing is not None:
            num_decodes = sum(chunk.num_tokens == 1 for chunk in step.chunks)
            self._pacing.observe(num_decodes, step.num_tokens - num_decodes, step_ns)
            self._scheduler.prefill_budget = self._pacing.tokens

    def _process(self, step: Step, results: list[ChunkResult], now_ns: int) -> None:
        for chunk, result in zip(step.chunks, results, strict=True):
            opened = self._open.get(chunk.sequence.request_id)
            if opened is None or chunk.sequence not in opened.outputs:
                continue  # it has ended since the step was scheduled
            try:
                self._process_chunk(opened, chunk, result, now_ns, batch=len(step.chunks))
            except BaseException:  # the request's own data met a bug; a panic in the Rust detokenizer is no Exception
                log.exception("Request %s failed", chunk.sequence.request_id)
                self._fail(opened, InternalError("The server failed on this request's output."))

    def _process_chunk(
        self, opened: _OpenRequest, chunk: Chunk, result: ChunkResult, now_ns: int, *, batch: int
    ) -> None:
        sequence, notes = chunk.sequence, opened.notes
        wants_token = chunk.samples and sequence.max_len > sequence.prompt_len  # not with max_tokens 0
        self._scheduler.commit(chunk, result.token_id if wants_token else None)
        prompt = opened.prompts[sequence.index // opened.request.params.n]
        if result.prompt_logprobs is not None and prompt.logprobs is not None:
            # A prompt that was preempted half-way is computed again from its start.
            prompt.logprobs[chunk.start + 1 :] = [token_logprob(self._table, row) for row in result.prompt_logprobs]
        if chunk.num_tokens > 1:
            notes.computed(chunk, now_ns, batch)
        if result.error is not None:
            self._fail(opened, InternalError(result.error))
            return
        if not chunk.samples:
            return
        sequence.wants_prompt_logprobs = False
        notes.drew(sequence, now_ns, batch)
        if sequence.num_generated <= 1 and sequence.index % opened.request.params.n == 0:
            opened.usage.cached_tokens += sequence.num_cached
        output = opened.outputs[sequence]
        if wants_token:
            assert result.token_id is not None
            opened.usage.completion_tokens += 1
            output.push(result.token_id, result.logprobs)
        else:
            output.finish_without_token()
        self._emit_chunk(opened, prompt, sequence, output)
        if output.finish_reason is not None:
            notes.finished(sequence, output.finish_reason, now_ns, batch)
            self._scheduler.remove(sequence)
            del opened.outputs[sequence]
            if not opened.outputs:
                opened.request.times.last_token = now_ns
                self._end(opened, Finished(opened.request.request_id, opened.usage))

    def _emit_chunk(self, opened: _OpenRequest, prompt: _Prompt, sequence: Sequence, output: ChoiceOutput) -> None:
        token_chunk = output.take()
        if token_chunk is None:
            return
        if not prompt.sent:
            prompt.sent = True
            self._emit(opened, self._prompt_done(opened.request, sequence.index // opened.request.params.n, prompt))
        self._emit(opened, token_chunk)

    def _prompt_done(self, request: Request, prompt_index: int, prompt: _Prompt) -> PromptDone:
        text = None
        if request.echo:
            given = request.prompts[prompt_index]
            text = given.text if isinstance(given, TextPrompt) else self._table.decode(prompt.token_ids)
        return PromptDone(request.request_id, prompt_index, prompt.token_ids, text, prompt.logprobs)

    def _fail(self, opened: _OpenRequest, error: APIError) -> None:
        self._end(opened, Failed(opened.request.request_id, error, opened.usage))

    def _end(self, opened: _OpenRequest, terminal: Finished | Failed | Aborted) -> None:
        """The one place where a request ends: frees what it holds and sends its terminal event."""
        del self._open[opened.request.request_id]
        self._close_account(opened)
        for sequence in opened.outputs:
            self._scheduler.remove(sequence)
        if opened.request.times.scheduled is None:
            self._stop_waiting(opened)
        self._emit(opened, terminal)

    def _close_account(self, opened: _OpenRequest) -> None:
        now_ns = self._clock_ns()
        opened.notes.close(self._account.totals, now_ns)
        if opened.request.times.scheduled is None and opened.outputs:  # it has only waited
            first = next(iter(opened.outputs))
            opened.request.account.waits_ns = self._scheduler.waits.settle(first, now_ns)

    def _emit(self, opened: _OpenRequest, event: Event) -> None:
        self._outbox.setdefault(opened.deliver, []).append(event)

    def _hand_over(self) -> None:
        self._publish()  # who learns from an event that a request has ended finds the numbers without it
        outbox, self._outbox = self._outbox, {}
        for deliver, events in outbox.items():
            try:
                deliver(events)
            except Exception:  # a consumer that is gone must not stop the others
                log.exception("A consumer does not take its events; its requests are dropped")
                for opened in [opened for opened in self._open.values() if opened.deliver == deliver]:
                    self._fail(opened, InternalError("The server lost a part of this request's answer."))

    def _publish(self) -> None:
        scheduler = self._scheduler
        self.drain_rate.observe(self.num_left_waiting, scheduler.num_waiting, self._clock_ns())
        self.snapshot = self._account.snapshot(
            scheduler, num_waiting_tokens=self._num_waiting_tokens, drain_rate=self.drain_rate.per_second
        )

    def _close(self) -> None:
        """Nobody is left without an answer, whatever ended the loop."""
        self.is_stopped = True
        for opened in list(self._open.values()):
            self._fail(opened, self._reason())
        self._hand_over()
        self._refuse_inbox()

    def _reason(self) -> APIError:
        if self.failure is not None:
            return InternalError("The engine has stopped after an internal error; the server must be restarted.")
        return Unavailable("The server is shutting down.", retry_after_seconds=5)

    def _refuse_inbox(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(command, Submitted):
                command.deliver([Failed(command.request.request_id, self._reason(), Usage(0, 0, 0))])
