"""The open requests: the life of each request from its submission to its terminal event. No torch.

The engine loop calls this after each command and each step. The events that follow leave with the next hand-over, by
one call per consumer. Engine thread only, except for the numbers that are marked.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import getrandbits

from oaiserve.engine.accounts.step_account import RequestNotes
from oaiserve.engine.accounts.step_causes import StepCauses
from oaiserve.engine.backpressure import Deadlines, DrainRate
from oaiserve.engine.banned import leaves_no_token
from oaiserve.engine.draws import draw_key
from oaiserve.engine.grammars.constraint import Constraint
from oaiserve.engine.grammars.grammar import CompiledGrammar, GrammarGivenUp, GrammarViolation
from oaiserve.engine.logprobs import TokenLogprobs
from oaiserve.engine.output import ChoiceOutput, add_logprobs, prompt_logprobs
from oaiserve.engine.reports import MOST_PROMPTS_KEPT, ComputedPrompt
from oaiserve.engine.request import (
    Aborted,
    Deliver,
    Event,
    Failed,
    Finished,
    Pooled,
    PromptDone,
    Request,
    SamplingParams,
    Terminal,
    TextPrompt,
    Usage,
)
from oaiserve.engine.scheduler import Scheduler
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.shared_limit import SharedLimit
from oaiserve.engine.step import Chunk, ChunkResult, Draw, Logprobs, Step
from oaiserve.engine.text.detokenize import StopStrings, TokenTable
from oaiserve.engine.tokenize import Tokenized
from oaiserve.errors import APIError, InternalError, InvalidRequest, Overloaded, RequestTimeout, Unavailable
from oaiserve.explain.causes import RequestCauses
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import EngineAccount, EventKind
from oaiserve.facts.times import RequestTimes

log = logging.getLogger(__name__)

# Forced tokens are taken at once while a step has fewer tokens than this in all. So few cost little more than one,
# since the weights are read once for all: on two CPU cores, the demo model takes 8.2 ms for one token and 10.0 ms for
# 8, but 45 ms for 64. In larger steps, where each token makes the others wait, forced tokens are drawn like others.
FEW_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of what a request may ask for, and of how long it may take."""

    max_model_len: int  # tokens of prompt and answer together
    max_waiting_tokens: int | None = None  # of the prompts of all requests that have not entered a step
    queue_timeout_seconds: float = 0  # until it enters a step; 0: no limit
    request_timeout_seconds: float = 0  # in all; 0: no limit
    # Of answers whose requests set no limit; None: no limit but the context.
    default_max_tokens: int | None = None
    default_max_length: int | None = None  # with the prompt, where that is shorter

    def default_length(self, num_prompt_tokens: int) -> int:
        """Return the most tokens of a prompt and its answer where the request sets no limit."""
        length = self.max_model_len
        if self.default_max_tokens is not None:
            length = min(length, num_prompt_tokens + self.default_max_tokens)
        if self.default_max_length is not None and num_prompt_tokens < self.default_max_length:
            length = min(length, self.default_max_length)
        return length


@dataclass(slots=True)
class _Prompt:
    """The data of a prompt, until it has been sent."""

    token_ids: list[int]
    logprobs: TokenLogprobs | None
    sent: bool = False


@dataclass(slots=True)
class OpenRequest:
    """The state of a request from its submission to its terminal event."""

    request: Request
    deliver: Deliver
    times: RequestTimes
    account: EngineAccount
    notes: RequestNotes
    causes: RequestCauses | None = None  # where they are asked for
    prompts: list[_Prompt] = field(default_factory=list)
    outputs: dict[Sequence, ChoiceOutput] = field(default_factory=dict)  # of choices that have not finished
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    waiting_tokens: int = 0  # of its prompts, until it enters a step
    num_waiting: int = 0  # choices that have not entered a step


class OpenRequests:
    """All open requests. They count in the engine's `numbers`, in which the step account adds up the steps so far."""

    def __init__(
        self,
        model: ServedModel,
        scheduler: Scheduler,
        numbers: EngineNumbers,
        bounds: Bounds,
        *,
        waiting: SharedLimit,
        clock_ns: Callable[[], int],
        stop_tokenizing: Callable[[str], None],
        causes: StepCauses | None = None,
    ) -> None:
        """Begin without requests. `waiting` counts the choices until they enter a step or end; who submits a request
        has taken their room. `stop_tokenizing` takes the id of a request that has ended before it was tokenized. With
        the `causes` of steps, each request's account has its own."""
        self._scheduler = scheduler
        self._table = TokenTable(model.tokenizer.backend)
        self._numbers = numbers
        self._bounds = bounds
        self._vocab_size = model.vocab_size
        self._eos_token_ids = model.eos_token_ids
        self._pools = model.pooling is not None  # each prompt is computed in one step, and answered by a vector
        self._clock_ns = clock_ns
        self._stop_tokenizing = stop_tokenizing
        self._causes = causes
        self._open: dict[str, OpenRequest] = {}
        self._outbox: dict[Deliver, list[Event]] = {}
        self._waiting = waiting
        self._waiting_tokens = SharedLimit(bounds.max_waiting_tokens)
        self._queue_deadlines = Deadlines(bounds.queue_timeout_seconds)
        self._request_deadlines = Deadlines(bounds.request_timeout_seconds)
        self._num_forceable = 0  # tokens that grammars may force as results of the step under way
        # read by any thread
        self.num_left_waiting = 0  # choices that entered a step, or ended before
        self.drain_rate = DrainRate()
        # taken by `Reports`: prompts that are in the prefix cache now, as far as routers know their beginnings
        self.computed_prompts: deque[ComputedPrompt] = deque(maxlen=MOST_PROMPTS_KEPT)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_waiting_tokens(self) -> int:
        """Return the tokens of the prompts of all requests that have not entered a step. Any thread may ask."""
        return self._waiting_tokens.total

    @property
    def has_events(self) -> bool:
        """Return whether events wait for a hand-over."""
        return bool(self._outbox)

    @property
    def deadlines_ns(self) -> list[int]:
        """Return the times at which the next requests will have waited, or taken, too long."""
        found = (self._queue_deadlines.next_ns, self._request_deadlines.next_ns)
        return [deadline_ns for deadline_ns in found if deadline_ns is not None]

    def submitted(self, request: Request, deliver: Deliver, submitted_ns: int) -> None:
        """Open a request. Its deadlines count from `submitted_ns`: a step may have been under way since then."""
        received_ns = submitted_ns if request.received_ns is None else request.received_ns
        times = RequestTimes(received=received_ns, submitted=submitted_ns)
        grammar = request.params.grammar
        grammar_kind = None if grammar is None else grammar.kind
        account = EngineAccount(num_choices=request.num_choices, grammar_kind=grammar_kind)
        causes = None if self._causes is None else RequestCauses(has_several=request.num_choices > 1)
        notes = RequestNotes(times, account, self._causes, causes)
        self._open[request.request_id] = OpenRequest(
            request, deliver, times, account, notes, causes, num_waiting=request.num_choices
        )
        self._queue_deadlines.begin(request.request_id, submitted_ns)
        self._request_deadlines.begin(request.request_id, submitted_ns)

    def tokenize_started(self, request: Request, started_ns: int) -> None:
        if (opened := self._find(request)) is not None:
            opened.times.tokenize_started = started_ns

    def grammar_compiled(self, request: Request, grammar: CompiledGrammar, compiled_ns: int) -> None:
        opened, asked = self._find(request), request.params.grammar
        if opened is None or asked is None:
            return
        account, compile_ns = opened.account, grammar.compile_ns
        account.grammar_compile_ns, account.grammar_was_cached = compile_ns, grammar.was_cached
        cache = account.grammar_cache
        account.note(EventKind.GRAMMAR_COMPILED, compiled_ns, None, compile_ns=compile_ns, cache=cache, kind=asked.kind)

    def tokenize_failed(self, request: Request, error: APIError) -> None:
        if (opened := self._find(request)) is not None:
            self._fail(opened, error)

    def tokenized(self, tokenized: Tokenized, kv_version: int) -> None:
        """Make the sequences of a request, unless it has ended while it was tokenized.

        They share cached blocks only with sequences of the same `kv_version`, see `loop.Runner`.
        """
        request = tokenized.request
        opened = self._find(request)
        if opened is None:
            return
        opened.times.tokenized = tokenized.at_ns
        if not self._waiting_tokens.take(request.client, tokenized.num_prompt_tokens):
            message = f"{self.num_waiting_tokens} prompt tokens are waiting already; try again later."
            self._fail(opened, Overloaded(message, retry_after_seconds=self._retry_after_seconds()))
            return
        opened.waiting_tokens = tokenized.num_prompt_tokens
        params = request.params
        stop_ids = (frozenset() if params.ignore_eos else self._eos_token_ids) | set(params.stop_token_ids)
        stops = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        opened.usage.prompt_tokens = tokenized.num_prompt_tokens
        opened.account.prompts, opened.account.cache_salt = tokenized.token_ids, request.cache_salt
        second_starts = tokenized.second_starts or [None] * len(tokenized.token_ids)
        for prompt_index, token_ids in enumerate(tokenized.token_ids):
            seed = getrandbits(64) if params.seed is None else params.seed
            if params.max_tokens is None:
                limit = self._bounds.default_length(len(token_ids))
            else:
                limit = len(token_ids) + params.max_tokens
            logprobs = None if params.prompt_logprobs is None else prompt_logprobs(self._table, token_ids[0])
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
                    cache_salt=f"{kv_version} {request.adapter} {request.cache_salt}",
                    adapter=request.adapter,
                    client_name=request.client,
                    bad_words=tokenized.bad_words,
                    constraint=self._constraint(tokenized.grammar, params, stop_ids),
                    is_whole=self._pools,
                    second_start=second_starts[prompt_index],
                )
                sequence.wants_prompt_logprobs = logprobs is not None and choice == 0
                sequence.causes = opened.causes
                opened.outputs[sequence] = ChoiceOutput(
                    sequence,
                    self._table,
                    stops,
                    eos_token_ids=self._eos_token_ids,
                    stream_interval=request.stream_interval,
                )
                self._scheduler.add(sequence, leader, since_ns=tokenized.at_ns or self._clock_ns())
                leader = leader or sequence

    def _constraint(
        self, grammar: CompiledGrammar | None, params: SamplingParams, stop_ids: frozenset[int]
    ) -> Constraint | None:
        """Return the constraint of one choice."""
        if grammar is None:
            return None
        return Constraint(grammar.matcher(), params, eos_token_ids=self._eos_token_ids, stop_ids=stop_ids)

    def abort(self, request_id: str) -> None:
        """Abort a request. This does nothing if it has ended."""
        opened = self._open.get(request_id)
        if opened is not None:
            self._end(opened, Aborted(request_id, opened.usage, opened.times, opened.account))

    def fail(self, request_id: str, error: APIError) -> None:
        """Fail a request. This does nothing if it has ended."""
        opened = self._open.get(request_id)
        if opened is not None:
            self._fail(opened, error)

    def has_adapter(self, number: int) -> bool:
        """Return whether an open request has this adapter."""
        return any(opened.request.adapter == number for opened in self._open.values())

    def masked(self, chunks: Iterable[Chunk]) -> None:
        """Note that the tokens of each of these are drawn among those that its grammar lets come next."""
        for chunk in chunks:
            self._open[chunk.sequence.request_id].account.num_masked_draws += 1 + len(chunk.draft)

    def grammar_failed(self, sequence: Sequence, error: BaseException) -> None:
        """Fail the request of a sequence whose grammar does not say what may come next, or forbids what came."""
        opened = self._open.get(sequence.request_id)
        if opened is None:
            return
        grammar = opened.request.params.grammar
        if isinstance(error, GrammarGivenUp) and grammar is not None:
            reason = f"the server gave up on it while it wrote the answer: {error}. Please simplify it"
            self._fail(opened, InvalidRequest(f"Invalid '{grammar.param}': {reason}.", param=grammar.param))
            return
        log.error("The grammar of request %s failed", sequence.request_id, exc_info=error)
        self._fail(opened, InternalError("The server failed on this request's grammar."))

    def fail_all(self, error: APIError) -> None:
        for opened in list(self._open.values()):
            self._fail(opened, error)

    def end_overdue(self, now_ns: int) -> None:
        for request_id in self._queue_deadlines.take_expired(now_ns):
            opened = self._open.get(request_id)
            if opened is not None and opened.times.scheduled is None:
                seconds = f"{self._bounds.queue_timeout_seconds:g}"
                message = f"The request waited {seconds} seconds and was not begun; try again later."
                self._fail(opened, Unavailable(message, retry_after_seconds=self._retry_after_seconds()))
        for request_id in self._request_deadlines.take_expired(now_ns):
            seconds = f"{self._bounds.request_timeout_seconds:g}"
            self.fail(request_id, RequestTimeout(f"The request took longer than {seconds} seconds, the limit here."))

    def scheduled(self, step: Step, now_ns: int) -> list[OpenRequest]:
        """Note that a step is about to be launched. Return the requests whose first step it is."""
        for sequence in step.preempted:
            self._open[sequence.request_id].notes.preempted(sequence, now_ns)
        newcomers = []
        for sequence in step.admitted:
            opened = self._open[sequence.request_id]
            if not sequence.num_preemptions:
                self._stop_waiting(opened, 1)
            if opened.notes.admitted(sequence, now_ns):
                newcomers.append(opened)
        return newcomers

    def computed(self, step: Step, results: list[ChunkResult], now_ns: int) -> None:
        """Process the results of a step: commit them to the scheduler, and make events of them."""
        self._num_forceable = FEW_TOKENS - len(step.chunks)
        for chunk, result in zip(step.chunks, results, strict=True):
            opened = self._open.get(chunk.sequence.request_id)
            if opened is None or chunk.sequence not in opened.outputs:
                continue  # it has ended since the step was scheduled
            if chunk.draw is Draw.VOID:
                continue  # it is scheduled again
            try:
                self._process_chunk(opened, chunk, result, now_ns, batch=len(step.chunks))
            except (GrammarGivenUp, GrammarViolation) as error:
                self.grammar_failed(chunk.sequence, error)
            except BaseException:  # the request's own data met a bug; a panic in the Rust detokenizer is no Exception
                log.exception("Request %s failed", chunk.sequence.request_id)
                self._fail(opened, InternalError("The server failed on this request's output."))

    def has_open(self, sequence: Sequence) -> bool:
        """Return whether the choice of a sequence has not ended."""
        opened = self._open.get(sequence.request_id)
        return opened is not None and sequence in opened.outputs

    def observe_drain(self) -> None:
        self.drain_rate.observe(self.num_left_waiting, self._scheduler.num_waiting, self._clock_ns())

    def hand_over(self) -> None:
        """Deliver all events since the last hand-over to their consumers."""
        outbox, self._outbox = self._outbox, {}
        for deliver, events in outbox.items():
            try:
                deliver(events)
            except Exception:  # a consumer that fails must not stop the others
                log.exception("A consumer failed to take its events; its requests are dropped")
                for opened in [opened for opened in self._open.values() if opened.deliver == deliver]:
                    self._fail(opened, InternalError("The server lost a part of this request's answer."))

    def _find(self, request: Request) -> OpenRequest | None:
        """Return the state of this very request, or None once it has ended: another one may have its id by then."""
        opened = self._open.get(request.request_id)
        return opened if opened is not None and opened.request is request else None

    def _retry_after_seconds(self) -> int:
        """Return when to try again."""
        return self.drain_rate.retry_after_seconds(self._waiting.total)

    def _stop_waiting(self, opened: OpenRequest, num_choices: int) -> None:
        """Note that choices of a request wait no longer. Its tokens wait until the first of them enters a step."""
        opened.num_waiting -= num_choices
        self.num_left_waiting += num_choices
        self._waiting.give_back(opened.request.client, num_choices)
        self._waiting_tokens.give_back(opened.request.client, opened.waiting_tokens)
        opened.waiting_tokens = 0

    def _process_chunk(
        self, opened: OpenRequest, chunk: Chunk, result: ChunkResult, now_ns: int, *, batch: int
    ) -> None:
        sequence, notes = chunk.sequence, opened.notes
        prompt = opened.prompts[sequence.index // opened.request.params.n]
        if result.prompt_logprobs is not None and prompt.logprobs is not None:
            # A prompt that was preempted half-way is computed again from its start.
            prompt.logprobs.truncate(chunk.start + 1)
            for row in result.prompt_logprobs:
                add_logprobs(prompt.logprobs, self._table, row)
        if chunk.num_known > 1 and (chunk.start < sequence.prompt_len or sequence.num_preemptions):
            notes.computed(chunk, now_ns, batch)
        if chunk.draw is Draw.SUPERSEDED:
            self._scheduler.commit(chunk, [])
            return
        if result.error is not None:
            chunk = chunk.without_draft()
            is_exhausted = leaves_no_token(chunk, self._vocab_size)
            self._fail(opened, _no_token_left(chunk) if is_exhausted else InternalError(result.error))
            return
        if result.vector is not None:
            self._pooled(opened, sequence, result.vector, now_ns)
            return
        output = opened.outputs[sequence]
        token_ids = self._push(opened, output, chunk, result, now_ns, batch) if chunk.max_draws else []
        if chunk.draft:
            self._note_draft(opened, chunk, token_ids)
        if self._scheduler.commit(chunk, token_ids):
            notes.preempted(sequence, now_ns)
        self._emit_chunk(opened, prompt, sequence, output)
        if output.finish_reason is not None:
            notes.finished(sequence, output.finish_reason, now_ns, batch)
            self._scheduler.remove(sequence)
            del opened.outputs[sequence]
            opened.account.note_length(output.num_tokens)
            if not opened.outputs:
                opened.times.last_token = now_ns
                request_id = opened.request.request_id
                self._end(opened, Finished(request_id, opened.usage, opened.times, opened.account))

    def _pooled(self, opened: OpenRequest, sequence: Sequence, vector: array[float], now_ns: int) -> None:
        """Emit the vector of a prompt. The last one of its request ends that, and with it the phase `prefill`."""
        self._emit(opened, Pooled(opened.request.request_id, sequence.index, vector))
        del opened.outputs[sequence]
        if not opened.outputs:
            opened.times.first_token = opened.times.last_token = now_ns
            self._end(opened, Finished(opened.request.request_id, opened.usage, opened.times, opened.account))

    def _push(
        self, opened: OpenRequest, output: ChoiceOutput, chunk: Chunk, result: ChunkResult, now_ns: int, batch: int
    ) -> list[int]:
        """Push the tokens of a chunk's result to the output of its choice, one by one, up to the end of the choice.

        Return those that were taken. What comes after the end counts nowhere.
        """
        sequence, notes = chunk.sequence, opened.notes
        sequence.wants_prompt_logprobs = False
        is_empty = sequence.max_len == sequence.prompt_len  # with max_tokens 0, the prompt is all that is computed
        is_begun = sequence.last_token_ns is not None
        if not is_begun and sequence.index % opened.request.params.n == 0 and (result.token_ids or is_empty):
            opened.usage.cached_tokens += sequence.num_cached
            if opened.request.beginnings:
                self._note_beginnings(opened.request.beginnings, sequence)
        if is_empty:
            notes.drew(sequence, now_ns, batch)
            output.finish_without_token()
            return []
        taken: list[int] = []
        for token_id, logprobs in self._tokens(opened, sequence, result):
            notes.drew(sequence, now_ns, batch)
            opened.usage.completion_tokens += 1
            output.push(token_id, logprobs)
            taken.append(token_id)
            if output.finish_reason is not None:
                break
        return taken

    def _note_beginnings(self, beginnings: tuple[tuple[int, float], ...], sequence: Sequence) -> None:
        """Note in which blocks the beginnings of a prompt end, now that all of it has been computed."""
        size, hashes = self._scheduler.pool.block_size, sequence.hashes
        ends = ((key, min(int(share * sequence.prompt_len) // size, len(hashes))) for key, share in beginnings)
        self.computed_prompts.append([(key, hashes[end - 1]) for key, end in ends if end])

    def _note_draft(self, opened: OpenRequest, chunk: Chunk, token_ids: list[int]) -> None:
        """Note how much of a chunk's draft is in the answer."""
        num_accepted = chunk.num_accepted(token_ids)
        self._numbers.num_drafts += 1
        for counted in (self._numbers, opened.account):
            counted.num_draft_tokens += len(chunk.draft)
            counted.num_accepted_tokens += num_accepted
            if chunk.sequence.draft_is_models:
                counted.num_model_draft_tokens += len(chunk.draft)
                counted.num_accepted_model_tokens += num_accepted

    def _tokens(
        self, opened: OpenRequest, sequence: Sequence, result: ChunkResult
    ) -> Iterator[tuple[int, Logprobs | None]]:
        """Yield the tokens that were drawn, and behind these the ones that a grammar forces, as many as may be taken.

        The caller pushes each token before it asks for the next one.
        """
        for index, token_id in enumerate(result.token_ids):
            yield token_id, None if result.logprobs is None else result.logprobs[index]
        constraint = sequence.constraint
        if constraint is None or not result.token_ids:
            return
        while self._num_forceable > 0 and (forced_ids := constraint.forced_ids()):
            for token_id in forced_ids[: self._num_forceable]:
                self._num_forceable -= 1
                self._numbers.num_forced_tokens += 1
                opened.account.num_forced_tokens += 1
                yield token_id, None

    def _emit_chunk(self, opened: OpenRequest, prompt: _Prompt, sequence: Sequence, output: ChoiceOutput) -> None:
        token_chunk = output.take()
        if token_chunk is None:
            return
        if not prompt.sent:
            prompt.sent = True
            self._emit(opened, self._prompt_done(opened, sequence.index // opened.request.params.n, prompt))
        self._emit(opened, token_chunk)

    def _prompt_done(self, opened: OpenRequest, prompt_index: int, prompt: _Prompt) -> PromptDone:
        request, text = opened.request, None
        if request.echo:
            given = request.prompts[prompt_index]
            text = given.text if isinstance(given, TextPrompt) else self._table.decode(prompt.token_ids)
        times = replace(opened.times)
        return PromptDone(request.request_id, prompt_index, prompt.token_ids, text, prompt.logprobs, times)

    def _fail(self, opened: OpenRequest, error: APIError) -> None:
        request_id = opened.request.request_id
        self._end(opened, Failed(request_id, error, opened.usage, opened.times, opened.account))

    def _end(self, opened: OpenRequest, terminal: Terminal) -> None:
        """End a request: free what it holds, and emit its terminal event. All requests end here."""
        del self._open[opened.request.request_id]
        self._close_account(opened)
        for sequence in opened.outputs:
            self._scheduler.remove(sequence)
        self._stop_waiting(opened, opened.num_waiting)
        if opened.times.tokenized is None:
            self._stop_tokenizing(opened.request.request_id)
        self._emit(opened, terminal)

    def _close_account(self, opened: OpenRequest) -> None:
        now_ns = self._clock_ns()
        opened.notes.close(self._numbers, now_ns)
        for output in opened.outputs.values():
            opened.account.note_length(output.num_tokens)
        if opened.times.scheduled is None and opened.outputs:  # it never entered a step
            first = next(iter(opened.outputs))
            opened.account.waits_ns = self._scheduler.waits.settle(first, now_ns)

    def _emit(self, opened: OpenRequest, event: Event) -> None:
        self._outbox.setdefault(opened.deliver, []).append(event)


def _no_token_left(chunk: Chunk) -> InvalidRequest:
    """Return the error of a request whose own parameters leave no token to choose."""
    params, num_tokens = chunk.sequence.params, chunk.end - chunk.sequence.prompt_len
    names = [] if params.grammar is None else [params.grammar.param]
    names += [name for name in ("allowed_token_ids", "bad_words", "min_tokens") if getattr(params, name)]
    shown = ", ".join(f"'{name}'" for name in names)
    message = f"After {num_tokens} tokens of an answer, no token is left that {shown} allow."
    return InvalidRequest(message, param=names[0])
