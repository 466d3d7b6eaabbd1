"""The open requests: the life of each request from its submission to its terminal event. No torch.

The loop calls this for commands, `Stepper` when a step is scheduled, and `Results` when its results are there. Events
leave with the next hand-over, by one call per consumer. Engine thread only, except for the numbers that are marked as
read by any thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from oaiserve.engine.accounts.costs import Rates
from oaiserve.engine.accounts.step_account import RequestNotes
from oaiserve.engine.accounts.step_causes import StepCauses
from oaiserve.engine.encoder import Encoding
from oaiserve.engine.grammars.grammar import CompiledGrammar, GrammarGivenUp, GrammarViolation
from oaiserve.engine.replica_reports import MOST_PROMPTS_KEPT, ComputedPrompt
from oaiserve.engine.request import Aborted, Deliver, Failed, Finished, LeftOut, Request, Terminal
from oaiserve.engine.requests.choices import Choices
from oaiserve.engine.requests.continuation import Continuations, take_up
from oaiserve.engine.requests.drain_rate import DrainRate
from oaiserve.engine.requests.event_outbox import Outbox
from oaiserve.engine.requests.open_request import Bounds, OpenRequest
from oaiserve.engine.requests.prompt_progress import begin_progress
from oaiserve.engine.requests.time_limits import TimeLimits
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.text.detokenize import TokenTable
from oaiserve.engine.tokenize import Tokenized
from oaiserve.errors import APIError, InternalError, InvalidRequest
from oaiserve.explain.causes import RequestCauses
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import EngineAccount, EventKind, WaitReason
from oaiserve.facts.times import RequestTimes
from oaiserve.http.shared_limit import SharedLimit

log = logging.getLogger(__name__)


class OpenRequests:
    """All open requests. They are counted in the engine's `numbers`, to which the step account adds what steps have
    computed."""

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
        rates: Rates,
        causes: StepCauses | None = None,
        note_end: Callable[[str], object] = lambda request_id: None,
        new_notes: Callable[..., RequestNotes] = RequestNotes,
    ) -> None:
        """Begin without requests. `waiting` counts choices until they enter a step or end; submitting a request
        reserves their room there. `stop_tokenizing` is called with the id of a request that ends before it is
        tokenized. With the `causes` of steps, each request's account has causes of its own. `note_end` gets the ids of
        ended requests, and `new_notes` makes the writer of a request's stamps."""
        self._scheduler = scheduler
        self.table = TokenTable(model.tokenizer.backend)
        self._numbers = numbers
        self._choices = Choices(model, bounds, self.table)
        self._clock_ns = clock_ns
        self._stop_tokenizing = stop_tokenizing
        self._rates = rates
        self._causes = causes
        self._note_end = note_end
        self._new_notes = new_notes
        self._open: dict[str, OpenRequest] = {}
        self.outbox = Outbox()
        self._taken_up = Continuations()
        self.limits = TimeLimits(bounds, self._open.__contains__)
        self._waiting = waiting
        # read by any thread
        self.num_waiting_tokens = 0  # prompt tokens of all requests before their first step
        self.num_background = 0  # open background requests
        self.num_left_waiting = 0  # choices that have entered a step, or ended before that
        self.drain_rate = DrainRate()
        # Called on the engine thread with the ids of requests that are about to enter their first step.
        self.on_first_step: Callable[[list[str]], object] | None = None
        # Read by `Reports`: prompts that are now in the prefix cache, with the prefix keys that routers use
        self.computed_prompts: deque[ComputedPrompt] = deque(maxlen=MOST_PROMPTS_KEPT)

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> dict[str, OpenRequest]:
        """Return the open requests by id, oldest first. Any thread may call this."""
        return self._open.copy()

    def reason_of(self, sequence: Sequence) -> WaitReason:
        """Return the reason why a sequence is in no step. Any thread may call this."""
        return self._scheduler.of(sequence).waits.reason_of(sequence)

    @property
    def has_events(self) -> bool:
        return bool(self.outbox or self._taken_up)

    def submitted(self, request: Request, deliver: Deliver, submitted_ns: int) -> None:
        """Open a request. Its deadlines count from `submitted_ns`, because a step may have been running since then."""
        if request.received_ns is None:
            received_ns = submitted_ns
        else:
            received_ns = request.received_ns
        times = RequestTimes(received=received_ns, submitted=submitted_ns)
        grammar = request.params.grammar
        grammar_kind = None if grammar is None else grammar.kind
        account = EngineAccount(num_choices=request.num_choices, grammar_kind=grammar_kind)
        if self._causes is None:
            causes = None
        else:
            client = self._causes.clients.opened(request.client, request.origin.client)
            causes = RequestCauses(has_several=request.num_choices > 1, client=client)
        notes = self._new_notes(request.request_id, times, account, self._causes, causes)
        self._open[request.request_id] = OpenRequest(
            request, deliver, times, account, notes, causes, num_waiting=request.num_choices
        )
        self.num_background += request.is_background
        self.limits.begin(request, submitted_ns)

    def tokenize_started(self, request: Request, started_ns: int) -> None:
        if (opened := self.find(request)) is not None:
            opened.times.tokenize_started = started_ns

    def grammar_compiled(self, request: Request, grammar: CompiledGrammar, compiled_ns: int) -> None:
        opened = self.find(request)
        wanted = request.params.grammar
        if opened is None or wanted is None:
            return
        account = opened.account
        compile_ns = grammar.compile_ns
        cache = "hit" if grammar.was_cached else "miss"
        account.grammar_compile_ns = compile_ns
        account.grammar_cache = cache
        account.note(
            EventKind.GRAMMAR_COMPILED, compiled_ns, None, compile_ns=compile_ns, cache=cache, kind=wanted.kind
        )
        if grammar.left_out:
            self.outbox.emit(opened, LeftOut(request.request_id, grammar.left_out))

    def tokenize_failed(self, request: Request, error: APIError) -> None:
        if (opened := self.find(request)) is not None:
            self._fail(opened, error)

    def tokenized(self, tokenized: Tokenized) -> None:
        """Make the sequences of a request, unless it has ended while it was tokenized.

        A long answer that another server has begun is read in parts, between steps.
        """
        if (opened := self.admitted(tokenized)) is not None:
            self._begin(opened, tokenized)

    def encoded(self, encoding: Encoding) -> None:
        """Make the sequences of an admitted request's prompts whose media have been encoded, unless the request has
        ended."""
        if (opened := self.find(encoding.tokenized.request)) is not None:
            if opened.times.media_encoded is None:
                opened.notes.media_encoded(self._clock_ns())
            self._begin(opened, encoding.tokenized, encoding)

    def _begin(self, opened: OpenRequest, tokenized: Tokenized, encoding: Encoding | None = None) -> None:
        self._taken_up.begin(self._start(opened, tokenized, encoding))

    def take_up(self) -> None:
        """Read the next part of an answer that another server has begun, if there is one."""
        self._taken_up.go_on()

    def _start(self, opened: OpenRequest, tokenized: Tokenized, encoding: Encoding | None) -> Iterator[None]:
        """Make and schedule the sequences of a request, pausing while it reads what another server has sent. An error
        fails only this request."""
        try:
            yield from self._made(opened, tokenized, encoding)
        except GeneratorExit:  # The engine has ended.
            raise
        except (GrammarGivenUp, GrammarViolation) as error:
            self._grammar_failed(opened, error)
        except BaseException:  # a bug that the request's data triggered; a panic in Rust code is not an Exception
            log.exception("Request %s failed", opened.request.request_id)
            self._fail(opened, InternalError("The server failed at the start of this request."))

    def _made(self, opened: OpenRequest, tokenized: Tokenized, encoding: Encoding | None) -> Iterator[None]:
        request = tokenized.request
        if opened.prompts:  # Sequences for earlier prompts of the request exist already.
            since_ns = self._clock_ns()
        else:
            since_ns = opened.times.media_encoded or tokenized.at_ns or self._clock_ns()
            opened.notes.arrived(since_ns)
        leader: Sequence | None = None  # the first choice, which computes the prompt for the others
        after = next(reversed(opened.outputs), None)  # Prompts are computed in order.
        for sequence in self._choices.make(opened, tokenized, encoding):
            if not request.sent:
                is_first = sequence.index % request.params.n == 0
                self._scheduler.add(sequence, None if is_first else leader, after=after, since_ns=since_ns)
                after = sequence
                leader = sequence if is_first else leader
            else:
                self._scheduler.of(sequence).waits.expect(sequence, since_ns)
        if request.sent and opened.has_all_prompts:
            for sequence in [*opened.outputs]:
                try:
                    for pause in take_up(opened, sequence, self.table, self.outbox.emit_chunk):
                        yield pause
                        if self.find(request) is None:
                            return
                except InvalidRequest as error:
                    self._fail(opened, error)
                    return
                if opened.outputs[sequence].finish_reason is not None:
                    self._note_waits(opened, sequence, self._clock_ns())
                    opened.note_choice(sequence, opened.outputs.pop(sequence))
                    self._stop_waiting(opened, 1)
            for sequence in opened.outputs:
                self._scheduler.add(sequence, since_ns=since_ns)
        self.finish_if_complete(opened, self._clock_ns())

    def admitted(self, tokenized: Tokenized) -> OpenRequest | None:
        """Return the open request whose prompts have been tokenized, or None if it has ended."""
        request = tokenized.request
        opened = self.find(request)
        if opened is None:
            self._note_end(request.request_id)
            return None
        opened.note_tokenized(tokenized)
        opened.waiting_tokens = 0 if request.is_background else tokenized.num_prompt_tokens
        self.num_waiting_tokens += opened.waiting_tokens
        opened.note_prompts(tokenized)
        return opened

    def abort(self, request_id: str) -> None:
        """Abort a request. This does nothing if it has ended."""
        opened = self._open.get(request_id)
        if opened is not None:
            self.end(opened, Aborted(request_id, opened.usage, opened.times, opened.account))

    def fail(self, request_id: str, error: APIError) -> None:
        """Fail a request. This does nothing if it has ended."""
        opened = self._open.get(request_id)
        if opened is not None:
            self._fail(opened, error)

    def has_adapter(self, number: int) -> bool:
        return any(opened.request.adapter == number for opened in self._open.values())

    def masked(self, chunks: Iterable[Chunk]) -> None:
        """Count the draws in these chunks that use grammar masks."""
        for chunk in chunks:
            self._open[chunk.sequence.request_id].account.num_masked_draws += 1 + len(chunk.draft)

    def grammar_failed(self, sequence: Sequence, error: BaseException) -> None:
        """Fail the request of a sequence whose grammar has given up, or doesn't allow its last token."""
        opened = self._open.get(sequence.request_id)
        if opened is not None:
            self._grammar_failed(opened, error)

    def _grammar_failed(self, opened: OpenRequest, error: BaseException) -> None:
        grammar = opened.request.params.grammar
        if isinstance(error, GrammarGivenUp) and grammar is not None:
            reason = f"the server gave up on it while it wrote the answer: {error}. Please simplify it"
            self._fail(opened, InvalidRequest(f"Invalid '{grammar.param}': {reason}.", param=grammar.param))
            return
        log.error("The grammar of request %s failed", opened.request.request_id, exc_info=error)
        self._fail(opened, InternalError("The server failed on this request's grammar."))

    def fail_all(self, error: APIError) -> None:
        for opened in list(self._open.values()):
            self._fail(opened, error)

    def end_overdue(self, now_ns: int) -> None:
        for request_id, limit in self.limits.deadlines.take_expired(now_ns):
            opened = self._open.get(request_id)
            if opened is None:
                continue
            if (error := self.limits.overdue(opened, limit, self._retry_after_seconds())) is not None:
                self._fail(opened, error)

    def scheduled(self, step: Step, now_ns: int) -> list[OpenRequest]:
        """Note a step that is about to be launched. Return the requests that enter their first step."""
        for sequence in step.preempted:
            self._open[sequence.request_id].notes.preempted(sequence, now_ns)
        newcomers = []
        for sequence in step.admitted:
            opened = self._open[sequence.request_id]
            if not sequence.num_preemptions:
                self._stop_waiting(opened, 1)
                opened.count_cached(sequence)
            if opened.notes.admitted(sequence, now_ns):
                newcomers.append(opened)
                begin_progress(self.outbox, opened, sequence, now_ns)
        if newcomers and self.on_first_step is not None:
            self.on_first_step([opened.request.request_id for opened in newcomers])
        return newcomers

    def of_choice(self, sequence: Sequence) -> OpenRequest | None:
        """Return the request of a sequence, or None if that choice has ended."""
        opened = self._open.get(sequence.request_id)
        if opened is not None and sequence in opened.outputs:
            return opened
        return None

    def hand_over(self) -> None:
        """Deliver all events since the last hand-over to their consumers."""
        for deliver in self.outbox.hand_over():
            for opened in [opened for opened in self._open.values() if opened.deliver == deliver]:
                self._fail(opened, InternalError("The server lost a part of this request's answer."))

    def find(self, request: Request) -> OpenRequest | None:
        """Return the state of exactly this request, or None once it has ended: another request may reuse its id by
        then."""
        opened = self._open.get(request.request_id)
        if opened is not None and opened.request is request:
            return opened
        return None

    def _retry_after_seconds(self) -> int:
        return self.drain_rate.retry_after_seconds(self._waiting.total)

    def _stop_waiting(self, opened: OpenRequest, num_choices: int) -> None:
        """Stop counting choices of a request as waiting. Its tokens stop waiting when the first choice enters a
        step."""
        opened.num_waiting -= num_choices
        if opened.request.is_background:
            return  # A background request took no room from others.
        self.num_left_waiting += num_choices
        self._waiting.give_back(opened.request.client, num_choices)
        self.num_waiting_tokens -= opened.waiting_tokens
        opened.waiting_tokens = 0

    def _fail(self, opened: OpenRequest, error: APIError) -> None:
        request_id = opened.request.request_id
        self.end(opened, Failed(request_id, error, opened.usage, opened.times, opened.account))

    def end(self, opened: OpenRequest, terminal: Terminal) -> None:
        """End a request: free its resources, and emit its terminal event. All requests end here."""
        del self._open[opened.request.request_id]
        self.num_background -= opened.request.is_background
        now_ns = self._clock_ns()
        opened.notes.close(self._numbers, now_ns)
        self._scheduler.pool.at(now_ns)
        for sequence, output in opened.outputs.items():
            opened.note_choice(sequence, output)
        if opened.times.scheduled is None and opened.outputs:  # it never entered a step
            self._note_waits(opened, next(iter(opened.outputs)), now_ns)
        for sequence in opened.outputs:
            self._scheduler.remove(sequence)
            opened.held_ns += sequence.held_ns
        self._note_cost(opened)
        self._stop_waiting(opened, opened.num_waiting)
        if opened.times.tokenized is None:
            self._stop_tokenizing(opened.request.request_id)
        self._note_end(opened.request.request_id)
        self.outbox.emit(opened, terminal)

    def _note_waits(self, opened: OpenRequest, sequence: Sequence, now_ns: int) -> None:
        """Note how long a request has waited, in case it ends before its first step."""
        # A copy, because the sequence's waits are settled again when the next step begins.
        opened.account.waits_ns = self._scheduler.of(sequence).waits.settle(sequence, now_ns).copy()

    def _note_cost(self, opened: OpenRequest) -> None:
        account = opened.account
        steps = self._causes
        account.kv_byte_seconds = opened.held_ns * self._rates.block_bytes / 1e9
        if steps is None or opened.causes is None:
            return
        self._rates.close(account, opened.causes, steps.shares, is_last=not self._open)
        if opened.times.first_token is not None and (step_time := self._scheduler.step_time) is not None:
            fits = (steps.cost, steps.shares.cores_fit.cost)
            self._rates.compare(account, *fits, opened.work, step_time.lone_tokens)

    def finish_if_complete(self, opened: OpenRequest, now_ns: int) -> None:
        if opened.has_all_prompts and not opened.outputs:
            opened.times.last_token = now_ns
            finished = Finished(opened.request.request_id, opened.usage, opened.times, opened.account)
            self.end(opened, finished)
