"""The facts about one request to a generation route, from before its first byte is read until its record is made.

This file knows neither the shapes of the API nor the readers of the record. Routes read a request's timestamps here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from oaiserve.engine.event_streams import LoopStream
from oaiserve.engine.request import TokenChunk, Usage
from oaiserve.engine.types.adapters import ServedAdapter
from oaiserve.errors import APIError, RequestTimeout, SlowReader, Unavailable
from oaiserve.facts.record import DeadlineOutcome, EngineAccount, Outcome, ReadAgain, ToolCallOutcome
from oaiserve.facts.times import RequestTimes
from oaiserve.facts.trace import TraceContext
from oaiserve.facts.turn import Turn
from oaiserve.http.keys import KeyUse
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.prompt_reuse import PromptReuse
from oaiserve.wire.continuation import StreamIds

COST_HEADER = "x-include-cost"  # with the value true, the usage contains the cost of the request
REUSE_HEADER = "x-include-reuse"  # with true, the usage of chat and completions contains what was read again


class RequestTimings(msgspec.Struct):
    """The phases of a streamed answer, in nanoseconds, without `respond`, which has not ended.

    `others_ns` says of the phases in the engine what went to other requests of the same client, and of other clients.
    """

    phases_ns: dict[str, int]
    time_to_first_token_ns: int | None
    queue_waits_ns: dict[str, int]
    causes_ns: dict[str, dict[str, int]]
    others_ns: dict[str, dict[str, int]]
    stalled_ns: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    trace_id: str


@dataclass(slots=True)
class AnswerFacts:
    """The facts that an answer states about itself. The shape that renders it notes them."""

    finish_reasons: dict[int, str] = field(default_factory=dict)  # keyed by choice index, in the route's terms
    tool_calls: dict[ToolCallOutcome, int] = field(default_factory=dict)  # keyed by outcome, see RequestRecord
    reasoning_tokens: int | None = None  # None: reasoning is not separated from the answer


@dataclass(slots=True)
class Exchange:
    """The facts about one request so far. The route fills them in, and `Accounting` turns them into the record."""

    request_id: str  # value of the header x-request-id; the client may have chosen it
    unique_id: str  # our own
    trace: TraceContext
    client: str  # the name of its API key, or else its address; clients take turns by it
    clock_ns: Callable[[], int]  # the monotonic clock
    key_name: str | None = None
    owner: str = ""  # a digest of the key; "" without keys
    use: KeyUse | None = None  # use of its key, if that is limited or counted
    operation: str = ""
    http_route: str = ""
    ids: StreamIds | None = None  # ids from a gateway
    used_tokens: int | None = None  # tokens to count in `use`; None: those in the answer's usage
    received_ns: int | None = None
    deadline_ns: int | None = None  # deadline for the end of its answer, counted from its receipt
    ttft_deadline_ns: int | None = None  # deadline for its first token, counted likewise
    model_load_ns: int = 0  # time that it waited for the model to load, before this process received it
    http_status: int | None = None
    full_piece_bytes: int = 0  # bytes of the answer that were written in full pieces
    error: APIError | None = None  # the error that was reported to the client, if that was possible
    refusal_delay_ns: int = 0  # time for which its refusal is held back
    client_left: bool = False  # The client left before it had the whole answer.
    adapter: ServedAdapter | None = None  # the adapter that the request names as its model
    stream: LoopStream | None = None  # the engine's events, once the request was accepted
    is_streaming: bool = False
    is_background: bool = False  # The request can wait.
    background_wait_ns: int | None = None  # how long it stays background work; None: forever
    has_prediction: bool = False  # The client expects a certain text, and asks how much of it came true.
    wants_cost: bool = False  # The client wants the cost in `usage`.
    wants_reuse: bool = False  # The client wants the tokens that were read again in `usage`.
    max_tokens_cut_to: int | None = None  # the least of all prompts; None: no limit was cut
    finish_reasons: dict[int, str] = field(default_factory=dict)  # the engine's, by index of the choice
    answer_facts: AnswerFacts = field(default_factory=AnswerFacts)
    requested_model: str | None = None  # documented in RequestRecord, like the next three
    stop_sequences: tuple[str, ...] = ()
    reasoning_level: str | None = None
    previous_response_id: str | None = None
    params: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    sampling: Mapping[str, int | float] = field(default_factory=dict)
    adaptations: Adaptations = field(default_factory=Adaptations)
    prompt_reuse: PromptReuse = field(default_factory=PromptReuse)
    response_id: str | None = None  # the answer's `id`
    engine_id: str | None = None  # the engine's id of the request
    conversation_id: str | None = None  # id of the first answer in its conversation, if there may be several
    routing: Mapping[str, str | int | float] = field(default_factory=dict)  # the decision of the router in front
    event_tokens: array[int] = field(default_factory=lambda: array("q"))  # documented in RequestRecord, like the next
    event_gaps_ns: array[int] = field(default_factory=lambda: array("q"))
    last_sign_ns: int = 0  # when the client of a stream last got an event that resets its idle timeout
    num_signs: int = 0  # numbered signs of life that another server has sent in this stream
    _last_event_ns: dict[int, int] = field(default_factory=dict)  # keyed by choice index
    _num_unseen: dict[int, int] = field(default_factory=dict)  # the tokens of a choice since its last event

    @property
    def times(self) -> RequestTimes:
        if self.stream is None or self.stream.times is None:
            return RequestTimes(received=self.received_ns)
        return self.stream.times

    @property
    def account(self) -> EngineAccount:
        """Return the engine's account, which comes with the terminal event."""
        terminal = None if self.stream is None else self.stream.terminal
        if terminal is None:
            return EngineAccount()
        return terminal.account

    def held_back(self, since_ns: int) -> None:
        self.received_ns = since_ns if self.received_ns is None else self.received_ns
        self.refusal_delay_ns = self.clock_ns() - since_ns

    def streamed(self, chunk: TokenChunk, *, is_seen: bool) -> None:
        """Note tokens of a stream as they are written. Tokens that show no text yet count towards the next event."""
        choice = chunk.index
        num_tokens = self._num_unseen.pop(choice, 0) + len(chunk.token_ids)
        if not is_seen:
            self._num_unseen[choice] = num_tokens
            return
        now_ns = self.clock_ns()
        last_ns = self._last_event_ns.get(choice)
        if last_ns is not None:
            self.event_gaps_ns.append(now_ns - last_ns)
        self._last_event_ns[choice] = now_ns
        self.last_sign_ns = now_ns
        self.event_tokens.append(num_tokens)

    def server_timing(self) -> str:
        """Return the value of the header `server-timing`: the finished phases, in milliseconds."""
        return ", ".join(f"{phase};dur={phase_ns / 1e6:.3f}" for phase, phase_ns in self._phases_ns().items())

    def timings(self, usage: Usage) -> RequestTimings:
        """Return the timings for the end of a stream: the same integers as in the record. The engine's account is
        complete by then."""
        # Causes are known only for phases that ended with the last step.
        known = {"prefill": self.account.prefill_causes_ns, "decode": self.account.decode_causes_ns}
        causes_ns = {
            phase: {str(cause): ns for cause, ns in sorted(causes.items(), key=lambda cause: -cause[1])}
            for phase, causes in known.items()
            if causes
        }
        return RequestTimings(
            self._phases_ns(),
            self.times.time_to_first_token_ns,
            {str(reason): wait_ns for reason, wait_ns in self.account.waits_ns.items()},
            causes_ns,
            {phase: {str(whose): ns for whose, ns in sums.items()} for phase, sums in self.account.whose_ns.items()},
            self.account.stalled_ns,
            usage.cached_tokens,
            self.account.num_draft_tokens,
            self.account.num_accepted_tokens,
            self.trace.trace_id_hex,
        )

    def _phases_ns(self) -> dict[str, int]:
        """Return the completed phases, computed from the same timestamps as those in the record."""
        return {phase.name: phase.duration_ns for phase in self.times.ended(self.clock_ns).phases()[:-1]}

    @property
    def read_again_tokens(self) -> int:
        return self.prompt_reuse.tokens

    @property
    def read_again_reason(self) -> ReadAgain | None:
        return self.prompt_reuse.reason

    @property
    def reuse(self) -> dict[str, str | int]:
        return self.prompt_reuse.facts

    @property
    def turn(self) -> Turn | None:
        return self.prompt_reuse.turn(self.key_name or "")

    @property
    def outcome(self) -> Outcome:
        if self.client_left or isinstance(self.error, SlowReader):
            return Outcome.CANCELLED
        if self.error is None:
            return Outcome.FINISHED
        is_refused = self.http_status != 200 and (self.error.status < 500 or isinstance(self.error, Unavailable))
        is_refused |= isinstance(self.error, RequestTimeout)  # This isn't the server's fault in a stream, either.
        if is_refused:
            return Outcome.REJECTED
        return Outcome.FAILED

    def deadline_outcome(self, times: RequestTimes) -> DeadlineOutcome | None:
        """Return whether an ended request kept its deadlines; None if that is unknown, or if it had none."""
        limits_ns = (self.deadline_ns, times.duration_ns), (self.ttft_deadline_ns, times.time_to_first_token_ns)
        if limits_ns[0][0] is limits_ns[1][0] is None or self.outcome is Outcome.CANCELLED:
            return None
        in_time = all(limit is None or (took is not None and took <= limit) for limit, took in limits_ns)
        if self.outcome is Outcome.FINISHED and in_time:
            return DeadlineOutcome.MET
        return DeadlineOutcome.MISSED
