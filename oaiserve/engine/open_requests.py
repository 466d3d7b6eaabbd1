"""The open requests: the life of each request from its submission to its terminal event. No torch.

The loop calls this for commands, `Stepper` when a step is scheduled, and `Results` when its results are there. Events
leave with the next hand-over, by one call per consumer. Engine thread only, except for the numbers that are marked.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import getrandbits

from oaiserve.engine.accounts.costs import Rates
from oaiserve.engine.accounts.step_account import RequestNotes
from oaiserve.engine.accounts.step_causes import StepCauses
from oaiserve.engine.backpressure import Deadlines, DrainRate, Limit, SharedLimit
from oaiserve.engine.draws import draw_key
from oaiserve.engine.encoder import Encoding
from oaiserve.engine.forecast.forecaster import Ended
from oaiserve.engine.grammars.constraint import Constraint
from oaiserve.engine.grammars.grammar import CompiledGrammar, GrammarGivenUp, GrammarViolation
from oaiserve.engine.grammars.parts import Leads, PartsConstraint
from oaiserve.engine.grammars.thinking import Thinking
from oaiserve.engine.logprobs import TokenLogprobs
from oaiserve.engine.media import Encoded
from oaiserve.engine.output import ChoiceOutput, add_logprobs, prompt_logprobs
from oaiserve.engine.reports import MOST_PROMPTS_KEPT, ComputedPrompt
from oaiserve.engine.request import (
    Aborted,
    Deliver,
    Event,
    Failed,
    Finished,
    PromptDone,
    PromptProgress,
    Request,
    Terminal,
    TokenChunk,
    Usage,
)
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.scheduling.slack import alone_ns, refusal, turn_ns
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.step import Chunk, Logprobs, Step
from oaiserve.engine.text.detokenize import StopStrings, TokenTable
from oaiserve.engine.tokenize import Tokenized
from oaiserve.errors import (
    APIError,
    DeadlineMissed,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    Unavailable,
)
from oaiserve.explain.causes import RequestCauses
from oaiserve.explain.step_cost import StepCost, Work
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import EngineAccount, EventKind
from oaiserve.facts.report import Pace
from oaiserve.facts.times import RequestTimes

PACE_TOKENS = 512  # of the prompt by which routers are told how fast prompts are computed
LONG_PROMPT = 64  # tokens to compute: for fewer, no progress is reported
PROGRESS_NS = 1_000_000_000  # between two reports of a request
MOST_TAKEN_UP = 64  # tokens that another server has sent, between two steps: each takes some 6 us

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
    max_model_len: int  # tokens of prompt and answer together
    max_waiting_tokens: int | None = None  # of the prompts of all requests that have not entered a step
    queue_timeout_seconds: float = 0  # until it enters a step; 0: no limit
    request_timeout_seconds: float = 0  # in all; 0: no limit
    # Of answers whose requests set no limit; None: no limit but the context.
    default_max_tokens: int | None = None
    default_max_length: int | None = None  # with the prompt, where that is shorter

    def length(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Return the most tokens of a prompt and its answer."""
        if max_tokens is not None:
            return min(num_prompt_tokens + max_tokens, self.max_model_len)
        length = self.max_model_len
        if self.default_max_tokens is not None:
            length = min(length, num_prompt_tokens + self.default_max_tokens)
        if self.default_max_length is not None and num_prompt_tokens < self.default_max_length:
            length = min(length, self.default_max_length)
        return length


@dataclass(slots=True)
class OpenPrompt:
    token_ids: list[int]
    logprobs: TokenLogprobs | None
    cached_tokens: int = 0
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
    prompts: list[OpenPrompt] = field(default_factory=list)
    outputs: dict[Sequence, ChoiceOutput] = field(default_factory=dict)  # of choices that have not finished
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    waiting_tokens: int = 0  # of its prompts, until it enters a step
    num_waiting: int = 0  # choices that have not entered a step
    needs_ids: bool = False  # as in its sequences
    held_ns: float = 0.0  # as in those of its sequences that have ended
    progress_ns: int | None = None  # when its progress was last reported

    def count_cached(self, sequence: Sequence) -> None:
        """Count the cached tokens of a prompt as its first choice enters its first step.

        Every report of a request's cached tokens comes from here, however far the request gets."""
        if sequence.index % self.request.params.n == 0:
            prompt = self.prompts[sequence.index // self.request.params.n]
            prompt.cached_tokens = min(sequence.num_cached, sequence.prompt_len)
            self.usage.cached_tokens += prompt.cached_tokens

    @property
    def computed_prompt_tokens(self) -> int:
        """Return the tokens of its prompts that need no further computation, cached ones included. Any thread may ask.

        The tokens of the current step count at once on a GPU, and at its end on a CPU."""
        if self.times.scheduled is None:
            return 0
        missing = [
            max(0, sequence.prompt_len - sequence.num_computed)
            for sequence in self.outputs.copy()
            if sequence.index % self.request.params.n == 0 and sequence.last_token_ns is None
        ]
        return max(0, self.usage.prompt_tokens - sum(missing))


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
        rates: Rates,
        causes: StepCauses | None = None,
        note_end: Callable[[Ended], object] = lambda ended: None,
    ) -> None:
        """Begin without requests. `waiting` counts the choices until they enter a step or end; who submits a request
        has taken their room. `stop_tokenizing` takes the id of a request ended before it was tokenized. With
        the `causes` of steps, each request's account has its own. `note_end` is told of ended requests."""
        self._scheduler = scheduler
        self.table = TokenTable(model.tokenizer.backend)
        self._numbers = numbers
        self._bounds = bounds
        self._vocab_size = model.vocab_size
        self._eos_token_ids = model.eos_token_ids
        self._pools = model.pooling is not None  # each prompt is computed in one step, and answered by a vector
        self._clock_ns = clock_ns
        self._stop_tokenizing = stop_tokenizing
        self._rates = rates
        self._causes = causes
        self._note_end = note_end
        self._open: dict[str, OpenRequest] = {}
        self._outbox: dict[Deliver, list[Event]] = {}
        self._taken_up: deque[Iterator[None]] = deque()  # answers that other servers have begun
        self._waiting = waiting
        self._waiting_tokens = SharedLimit(bounds.max_waiting_tokens)
        self._deadlines = Deadlines(self._open.__contains__)
        self._slack = scheduler.order.slack
        # read by any thread
        self.num_background = 0  # open requests that can wait
        self.num_left_waiting = 0  # choices that entered a step, or ended before
        self.drain_rate = DrainRate()
        # taken by `Reports`: prompts that are in the prefix cache now, as far as routers know their prefix keys
        self.computed_prompts: deque[ComputedPrompt] = deque(maxlen=MOST_PROMPTS_KEPT)

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> dict[str, OpenRequest]:
        """Return the open requests by id, oldest first. Any thread may ask."""
        return self._open.copy()

    @property
    def num_waiting_tokens(self) -> int:
        """Return the prompt tokens of all requests before their first step. Any thread may ask."""
        return self._waiting_tokens.total

    @property
    def has_events(self) -> bool:
        return bool(self._outbox or self._taken_up)

    @property
    def next_deadline_ns(self) -> int | None:
        """Return the time at which the next request will have waited, or taken, too long."""
        return self._deadlines.next_ns

    @property
    def pace(self) -> Pace:
        """Return the time of a prompt token and of an answer, as of late, for routers. Any thread may ask."""
        return Pace(alone_ns(self._cost, PACE_TOKENS) / PACE_TOKENS / 1e9, self._slack.answer_ns / 1e9)

    @property
    def _cost(self) -> StepCost | None:
        return None if self._causes is None else self._causes.cost

    def turn(self, request: Request, prompts: list[list[int]], arrived_ns: int) -> tuple[int, int | None]:
        """Return when the turn of a request comes under the policy `deadline`, and its latest start, or None without a
        deadline. Any thread may ask."""
        prompt_ns, start_ns = alone_ns(self._cost, sum(map(len, prompts))), None
        deadlines_ns = request.first_token_deadline_ns, request.deadline_ns
        if prompts and deadlines_ns != (None, None):
            most_tokens = self._bounds.length(len(prompts[0]), request.params.max_tokens) - len(prompts[0])
            start_ns = self._slack.latest_start_ns(*deadlines_ns, prompt_ns, most_tokens)
        return turn_ns(arrived_ns, start_ns, self._slack.turn_share(prompt_ns)), start_ns

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
        self.num_background += request.is_background
        queue_seconds, seconds = self._bounds.queue_timeout_seconds, self._bounds.request_timeout_seconds
        if request.is_background:  # only its own deadlines hold
            queue_seconds = seconds = 0
        for at_ns, limit in (
            (queue_seconds and submitted_ns + int(queue_seconds * 1e9), Limit.QUEUE),
            (seconds and submitted_ns + int(seconds * 1e9), Limit.REQUEST),
            (request.first_token_deadline_ns, Limit.FIRST_TOKEN),
            (request.deadline_ns, Limit.END),
        ):
            if at_ns:
                self._deadlines.add(int(at_ns), request.request_id, limit)

    def tokenize_started(self, request: Request, started_ns: int) -> None:
        if (opened := self.find(request)) is not None:
            opened.times.tokenize_started = started_ns

    def grammar_compiled(self, request: Request, grammar: CompiledGrammar, compiled_ns: int) -> None:
        opened, asked = self.find(request), request.params.grammar
        if opened is None or asked is None:
            return
        account, compile_ns, cache = opened.account, grammar.compile_ns, "hit" if grammar.was_cached else "miss"
        account.grammar_compile_ns, account.grammar_cache = compile_ns, cache
        account.note(EventKind.GRAMMAR_COMPILED, compiled_ns, None, compile_ns=compile_ns, cache=cache, kind=asked.kind)

    def tokenize_failed(self, request: Request, error: APIError) -> None:
        if (opened := self.find(request)) is not None:
            self._fail(opened, error)

    def tokenized(self, tokenized: Tokenized) -> None:
        """Make the sequences of a request, unless it has ended while it was tokenized.

        A long answer that another server has begun is taken up in parts, between steps.
        """
        if (opened := self.admitted(tokenized)) is not None:
            self._begin(opened, tokenized, {})

    def encoded(self, encoding: Encoding) -> None:
        """Make the sequences of an admitted request whose media have been encoded, unless it has ended."""
        if (opened := self.find(encoding.tokenized.request)) is not None:
            opened.notes.media_encoded(self._clock_ns())
            self._begin(opened, encoding.tokenized, encoding.encoded)

    def _begin(self, opened: OpenRequest, tokenized: Tokenized, encoded: Mapping[bytes, Encoded]) -> None:
        begun = self._begun(opened, tokenized, encoded)
        if next(begun, begun) is None:
            self._taken_up.append(begun)

    def take_up(self) -> None:
        """Take up a further part of an answer that another server has begun, if there is one."""
        if self._taken_up:
            begun = self._taken_up[0]
            if next(begun, begun) is begun:
                self._taken_up.popleft()

    def _constraint(self, tokenized: Tokenized, stop_ids: frozenset[int]) -> Constraint | None:
        """Return the constraint of one choice: its grammar, the reasoning before it, and the end of its budget."""
        params, grammar = tokenized.request.params, tokenized.grammar
        reasoning, thinking = params.reasoning, None
        # An answer that may begin with reasoning obeys a grammar from its first token on.
        leads = () if params.grammar is None else params.grammar.leads
        is_free = grammar is None or bool(leads)
        if reasoning is not None and (reasoning.budget is not None if is_free else not reasoning.opening):
            thinking = Thinking(reasoning, self.table, tokenized.closing_ids)
        if grammar is None and thinking is None:
            return None
        if grammar is not None and leads:
            hidden = self.table.special_ids - params.visible_special_ids if params.skip_special_tokens else frozenset()
            return PartsConstraint(
                Leads(leads, self.table, hidden),
                grammar.matcher,
                params,
                thinking=thinking,
                eos_token_ids=self._eos_token_ids,
                stop_ids=stop_ids,
            )
        matcher = None if grammar is None else grammar.matcher()
        return Constraint(matcher, params, thinking=thinking, eos_token_ids=self._eos_token_ids, stop_ids=stop_ids)

    def admitted(self, tokenized: Tokenized) -> OpenRequest | None:
        """Return a request whose prompts are encoded, or None if it has ended, or fails now. It fails if it would miss
        its deadline, or if too many tokens wait."""
        request = tokenized.request
        opened = self.find(request)
        if opened is None:
            self._note_end(Ended(request.request_id, RequestTimes()))
            return None
        opened.times.tokenized, opened.account.forecast = tokenized.at_ns, tokenized.forecast
        opened.times.has_media = any(tokenized.media)
        received_ns, first_ns, end_ns = opened.times.received or 0, request.first_token_deadline_ns, request.deadline_ns
        if first_ns is not None or end_ns is not None:
            within = (None if at_ns is None else at_ns - received_ns for at_ns in (first_ns, end_ns))
            if (refused := refusal(tokenized.forecast, *within)) is not None:
                self._fail(opened, refused)
                return None
        num_waiting = 0 if request.is_background else tokenized.num_prompt_tokens
        if not self._waiting_tokens.take(request.client, num_waiting):
            message = f"{self.num_waiting_tokens} prompt tokens are waiting already; try again later."
            self._fail(opened, Overloaded(message, retry_after_seconds=self._retry_after_seconds()))
            return None
        opened.waiting_tokens = num_waiting
        opened.usage.prompt_tokens = tokenized.num_prompt_tokens
        for medium in (one for prompt in tokenized.media if prompt is not None for one in prompt.media):
            opened.account.note_medium(medium.kind, medium.num_rows)
        opened.usage.image_tokens, opened.usage.audio_tokens = opened.account.image_tokens, opened.account.audio_tokens
        opened.account.prompts, opened.account.cache_salt = tokenized.token_ids, request.cache_salt
        return opened

    def _begun(self, opened: OpenRequest, tokenized: Tokenized, encoded: Mapping[bytes, Encoded]) -> Iterator[None]:
        """Make the sequences of a request, with a pause after so many tokens that another server has sent."""
        request, params = tokenized.request, tokenized.request.params
        stop_ids = (frozenset() if params.ignore_eos else self._eos_token_ids) | set(params.stop_token_ids)
        stops = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        arrived_ns = tokenized.at_ns or self._clock_ns()
        waits_since_ns = opened.times.media_encoded or arrived_ns
        own_turn_ns, start_ns = self.turn(request, tokenized.token_ids, arrived_ns)
        second_starts = tokenized.second_starts or [None] * len(tokenized.token_ids)
        media = tokenized.media or [None] * len(tokenized.token_ids)
        for prompt_index, token_ids in enumerate(tokenized.token_ids):
            seed = getrandbits(64) if params.seed is None else params.seed
            limit = self._bounds.length(len(token_ids), params.max_tokens)
            logprobs = None if params.prompt_logprobs is None else prompt_logprobs(self.table, token_ids[0])
            opened.prompts.append(OpenPrompt(token_ids, logprobs))
            leader: Sequence | None = None  # the first choice computes the prompt for the others
            for choice in range(params.n):
                constraint = self._constraint(tokenized, stop_ids)
                sequence = Sequence(
                    request.request_id,
                    prompt_index * params.n + choice,
                    token_ids,
                    params,
                    max_len=limit,
                    stop_ids=stop_ids,
                    draw_key=draw_key(seed, choice),
                    priority=request.priority,
                    turn_ns=own_turn_ns,
                    deadline_ns=request.deadline_ns,
                    latest_start_ns=None if start_ns is None or start_ns < arrived_ns else start_ns,
                    cache_salt=f"{request.adapter} {request.cache_salt}",
                    adapter=request.adapter,
                    client_name=request.client,
                    is_background=request.is_background,
                    bad_words=tokenized.bad_words,
                    constraint=constraint,
                    is_whole=self._pools,
                    second_start=second_starts[prompt_index],
                    media=(of_prompt := media[prompt_index]),
                    encoded=() if of_prompt is None else tuple(encoded[one.key] for one in of_prompt.media),
                )
                sequence.wants_prompt_logprobs = logprobs is not None and choice == 0
                sequence.causes = opened.causes
                opened.needs_ids = sequence.needs_ids
                opened.outputs[sequence] = ChoiceOutput(
                    sequence,
                    self.table,
                    stops,
                    eos_token_ids=self._eos_token_ids,
                    stream_interval=request.stream_interval,
                )
                if not request.sent:
                    self._scheduler.add(sequence, leader, since_ns=waits_since_ns)
                    leader = leader or sequence
        if request.sent:
            for sequence in [*opened.outputs]:
                yield from self._taking_up(opened, sequence)
                if self.find(request) is None:
                    return
            for sequence in opened.outputs:
                self._scheduler.add(sequence, since_ns=waits_since_ns)
        self.finish_if_complete(opened, self._clock_ns())

    def _taking_up(self, opened: OpenRequest, sequence: Sequence) -> Iterator[None]:
        """Put the tokens that another server has sent into a choice, which emits them as the same chunks.

        The request fails if they cannot be what was sent.
        """
        output, prompt = opened.outputs[sequence], opened.prompts[sequence.index // opened.request.params.n]
        pieces = [piece.token_ids for piece in opened.request.sent if piece.choice == sequence.index]
        # Shapes count the tokens that they have told of, by their log-probabilities where these are asked for.
        if pieces and prompt.logprobs is not None and not prompt.sent:
            for token_id in prompt.token_ids[1:]:
                add_logprobs(prompt.logprobs, self.table, Logprobs(token_id, 0.0, [], []))
        sequence.wants_prompt_logprobs &= not pieces
        try:
            for token_ids in pieces:
                for token_id in token_ids:
                    if output.num_tokens and output.num_tokens % MOST_TAKEN_UP == 0:
                        yield
                        if self.find(opened.request) is None:
                            return
                    if output.finish_reason is not None:
                        raise GrammarViolation("it has tokens behind its end")
                    is_told = sequence.params.logprobs is not None
                    output.push(token_id, Logprobs(token_id, 0.0, [], []) if is_told else None)
                opened.usage.completion_tokens += len(token_ids)
                sequence.token_ids += token_ids
                if (chunk := output.take(was_sent=True)) is not None:
                    self.emit_chunk(opened, chunk)
        except (GrammarGivenUp, GrammarViolation) as error:
            self._fail(opened, InvalidRequest(f"What was sent of this answer cannot be its begin: {error}."))
            return
        sequence.num_tokens = len(sequence.token_ids)
        if output.finish_reason is not None:
            del opened.outputs[sequence]
            opened.account.note_length(output.num_tokens)
            self._stop_waiting(opened, 1)

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
        """Count the draws of these chunks with masks of grammars."""
        for chunk in chunks:
            self._open[chunk.sequence.request_id].account.num_masked_draws += 1 + len(chunk.draft)

    def grammar_failed(self, sequence: Sequence, error: BaseException) -> None:
        """Fail the request of a sequence whose grammar has given up, or forbids its last token."""
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
        for request_id, limit in self._deadlines.take_expired(now_ns):
            opened = self._open.get(request_id)
            if opened is not None and (error := self._overdue(opened, limit)) is not None:
                self._fail(opened, error)

    def _overdue(self, opened: OpenRequest, limit: Limit) -> APIError | None:
        """Return the error of a request at one of its limits, or None if it has kept it."""
        times = opened.times
        match limit:
            case Limit.QUEUE if times.scheduled is None:
                seconds = f"{self._bounds.queue_timeout_seconds:g}"
                message = f"The request waited {seconds} seconds and was not begun; try again later."
                return Unavailable(message, retry_after_seconds=self._retry_after_seconds())
            case Limit.REQUEST:
                seconds = f"{self._bounds.request_timeout_seconds:g}"
                return RequestTimeout(f"The request took longer than {seconds} seconds, the limit here.")
            case Limit.FIRST_TOKEN if times.first_token is None:
                asked, at_ns = "begun", opened.request.first_token_deadline_ns
            case Limit.END:
                asked, at_ns = "ended", opened.request.deadline_ns
            case _:
                return None
        within_ms = ((at_ns or 0) - (times.received or 0)) / 1e6
        return DeadlineMissed(f"The answer has not {asked} within {within_ms:,.0f} ms, as the request asks for.")

    def scheduled(self, step: Step, now_ns: int) -> list[OpenRequest]:
        """Note a step about to be launched. Return the requests whose first step it is."""
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
                if opened.request.reports_progress and sequence.prompt_len - sequence.num_computed >= LONG_PROMPT:
                    self._emit_progress(opened, now_ns)
        return newcomers

    def of_choice(self, sequence: Sequence) -> OpenRequest | None:
        """Return the request of a sequence, or None if that choice has ended."""
        opened = self._open.get(sequence.request_id)
        return opened if opened is not None and sequence in opened.outputs else None

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

    def find(self, request: Request) -> OpenRequest | None:
        """Return the state of this very request, or None once it has ended: another one may have its id by then."""
        opened = self._open.get(request.request_id)
        return opened if opened is not None and opened.request is request else None

    def _retry_after_seconds(self) -> int:
        return self.drain_rate.retry_after_seconds(self._waiting.total)

    def _stop_waiting(self, opened: OpenRequest, num_choices: int) -> None:
        """Count choices of a request as waiting no longer. Its tokens wait until the first of them enters a step."""
        opened.num_waiting -= num_choices
        if opened.request.is_background:
            return  # it has taken no room of others
        self.num_left_waiting += num_choices
        self._waiting.give_back(opened.request.client, num_choices)
        self._waiting_tokens.give_back(opened.request.client, opened.waiting_tokens)
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
        for output in opened.outputs.values():
            opened.account.note_length(output.num_tokens)
        if opened.times.scheduled is None and opened.outputs:  # it never entered a step
            first = next(iter(opened.outputs))
            opened.account.waits_ns = self._scheduler.of(first).waits.settle(first, now_ns)
        for sequence in opened.outputs:
            self._scheduler.remove(sequence)
            opened.held_ns += sequence.held_ns
        self._note_cost(opened)
        self._stop_waiting(opened, opened.num_waiting)
        if opened.times.tokenized is None:
            self._stop_tokenizing(opened.request.request_id)
        num_tokens, is_whole, times = opened.account.longest_choice_tokens, isinstance(terminal, Finished), opened.times
        is_late = isinstance(terminal, Failed) and isinstance(terminal.error, DeadlineMissed)
        self._note_end(Ended(opened.request.request_id, times, num_tokens, is_whole, now_ns if is_late else None))
        if times.scheduled is not None and times.first_token is not None:
            prompt_ns = alone_ns(self._cost, opened.usage.prompt_tokens - opened.usage.cached_tokens)
            decode_ns = (times.last_token or now_ns) - times.first_token
            self._slack.note(prompt_ns, times.first_token - times.scheduled, decode_ns, num_tokens, is_whole=is_whole)
        self.emit(opened, terminal)

    def _note_cost(self, opened: OpenRequest) -> None:
        account, usage, steps = opened.account, opened.usage, self._causes
        account.kv_byte_seconds = opened.held_ns * self._rates.block_bytes / 1e9
        if steps is None or opened.causes is None:
            return
        self._rates.close(account, opened.causes, steps.shares, is_last=not self._open)
        if opened.times.first_token is not None and (step_time := self._scheduler.step_time) is not None:
            work = Work(
                len(opened.prompts),
                usage.prompt_tokens,
                usage.cached_tokens,
                account.num_choices,
                usage.completion_tokens,
                account.longest_choice_tokens,
                opened.needs_ids,
            )
            self._rates.compare(account, steps.cost, steps.shares.cores_fit.cost, work, step_time.lone_tokens)

    def finish_if_complete(self, opened: OpenRequest, now_ns: int) -> None:
        if not opened.outputs:
            opened.times.last_token = now_ns
            finished = Finished(opened.request.request_id, opened.usage, opened.times, opened.account)
            self.end(opened, finished)

    def emit_chunk(self, opened: OpenRequest, chunk: TokenChunk) -> None:
        """Emit a chunk of a choice, and before the first of a prompt the prompt."""
        request, index = opened.request, chunk.index // opened.request.params.n
        prompt = opened.prompts[index]
        if not prompt.sent:
            prompt.sent = True
            done = (prompt.token_ids, prompt.logprobs, replace(opened.times), prompt.cached_tokens)
            self.emit(opened, PromptDone(request.request_id, index, *done, opened.account.forecast))
        self.emit(opened, chunk)

    def report_progress(self, opened: OpenRequest, now_ns: int) -> None:
        """Report the progress of a request's prompts, if it has been reported before, a while ago."""
        if opened.progress_ns is not None and now_ns - opened.progress_ns >= PROGRESS_NS:
            self._emit_progress(opened, now_ns)

    def _emit_progress(self, opened: OpenRequest, now_ns: int) -> None:
        usage = opened.usage
        opened.progress_ns = now_ns
        elapsed_ns = now_ns - (opened.times.scheduled or now_ns)
        tokens = usage.prompt_tokens, usage.cached_tokens, opened.computed_prompt_tokens
        done = (*tokens, elapsed_ns, replace(opened.times), opened.account.forecast)
        self.emit(opened, PromptProgress(opened.request.request_id, *done))

    def emit(self, opened: OpenRequest, event: Event) -> None:
        """Put an event into the next hand-over."""
        self._outbox.setdefault(opened.deliver, []).append(event)
