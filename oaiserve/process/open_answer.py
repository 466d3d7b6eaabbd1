"""The front's record of an open request: its events so far, from which a new engine continues the same answer.

A new engine gets the tokens that the consumer already has, as a replica does that continues another one's answer
(`oaiserve.wire.continuation`). It repeats their events, which are not passed on again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import getrandbits
from typing import NamedTuple

from oaiserve.engine.event_streams import append
from oaiserve.engine.request import (
    TERMINAL,
    Deliver,
    Event,
    LeftOut,
    Pooled,
    PromptDone,
    PromptProgress,
    Request,
    Terminal,
    TokenChunk,
    Usage,
)
from oaiserve.facts.record import Cause, EngineAccount, WaitReason
from oaiserve.facts.times import RequestTimes
from oaiserve.wire.continuation import Piece

# Tokens per event of an answer that is not streamed. A new engine has to compute at most these again.
WHOLE_INTERVAL = 64


class LimitedAnswer(NamedTuple):
    request: Request
    times: RequestTimes


@dataclass(slots=True)
class OpenAnswer:
    """A request that an engine process has or will get, with the part of the answer that its consumer already has."""

    request: Request
    deliver: Deliver
    submitted_ns: int
    clock_ns: Callable[[], int]
    replica: str = ""  # name of the replica that has it, or will get it
    is_sent: bool = False  # The current engine process has it.
    is_aborted: bool = False  # The abort has been sent to that process.
    has_begun: bool = False  # It has entered a step there.
    has_progressed: bool = False  # That process has added to its answer.
    num_deaths: int = 0  # consecutive engine processes that ended after it had begun and before it progressed
    times: RequestTimes | None = None  # times up to the first token, from the process that computed it
    restart_ns: int = 0  # total time without a process that continued it
    _ended_ns: int | None = None  # when its process ended; None once another one continues it
    _tokens: dict[int, list[int]] = field(default_factory=dict)  # passed on, by choice
    _num_sent: dict[int, int] = field(default_factory=dict)  # pieces of `request.sent` passed on, by choice
    _to_drop: dict[int, int] = field(default_factory=dict)  # repeated pieces still to come, by choice
    _whole: dict[int, TokenChunk] = field(default_factory=dict)  # joined chunks of unstreamed answers, by choice
    _passed: set[tuple[type, int]] = field(default_factory=set)  # one-time events so far, with the prompt's index

    @classmethod
    def of(cls, request: Request, deliver: Deliver, clock_ns: Callable[[], int]) -> OpenAnswer:
        """Return the state of a new request. It gets a seed, so that another engine draws the same tokens."""
        if request.draw_seed is None:
            request = replace(request, draw_seed=getrandbits(64))
        return cls(request, deliver, clock_ns(), clock_ns)

    def so_far(self) -> tuple[Usage, RequestTimes, EngineAccount]:
        """Return its usage, times and account while no process has it, for a terminal event that `take` completes."""
        received_ns = self.request.received_ns or self.submitted_ns
        usage = Usage(0, 0, sum(map(len, self._tokens.values())))
        times = RequestTimes(received=received_ns, submitted=self.submitted_ns)
        return usage, times, EngineAccount(num_choices=self.request.num_choices)

    def limited(self) -> LimitedAnswer:
        """Return its request and times, to check its time limits while no process has it."""
        return LimitedAnswer(self.request, self.times or self.so_far()[1])

    def to_send(self) -> Request:
        """Return the request for an engine process, with the part of the answer that was passed on."""
        self.is_sent = True
        self.has_begun = self.has_progressed = False
        request = self.request
        if request.stream_interval == 0:
            request = replace(request, stream_interval=WHOLE_INTERVAL)
        if sum(self._num_sent.values()) < len(request.sent):
            self._to_drop = dict(self._num_sent)
            return request
        self._to_drop = dict.fromkeys(self._tokens, 1)
        return replace(request, sent=tuple(Piece(choice, ids) for choice, ids in self._tokens.items()))

    def process_ended(self) -> None:
        """Note that the engine process has ended."""
        if self.has_progressed:
            self.num_deaths = 0
        elif self.is_sent and self.has_begun:
            self.num_deaths += 1
        self.is_sent = False
        if self._ended_ns is None:
            self._ended_ns = self.clock_ns()

    def take(self, event: Event) -> Event | None:
        """Return the event for the consumer, or None if the consumer has it already or will get it as part of a later
        one."""
        if isinstance(event, TokenChunk):
            return self._take_chunk(event)
        if isinstance(event, PromptDone):
            if self._is_passed(event, event.prompt_index):
                return None
            self.has_progressed = True
            if self.times is None:
                self.times = event.times
        elif isinstance(event, LeftOut):
            return None if self._is_passed(event, 0) else event
        elif isinstance(event, Pooled):
            if self._is_passed(event, event.index):
                return None
            self.has_progressed = True
        elif isinstance(event, TERMINAL):
            self._settle(event)
        elif isinstance(event, PromptProgress) and self._tokens:
            return None
        return event

    def _is_passed(self, event: Event, index: int) -> bool:
        key = (type(event), index)
        if key in self._passed:
            return True
        self._passed.add(key)
        return False

    def _take_chunk(self, chunk: TokenChunk) -> TokenChunk | None:
        index = chunk.index
        if chunk.was_sent:
            if self._to_drop.get(index):
                self._to_drop[index] -= 1
                return None
            self._num_sent[index] = self._num_sent.get(index, 0) + 1
        self.has_progressed = True
        if self._ended_ns is not None:
            self._went_on(self.clock_ns())
        # A copy: the consumer may join the chunk with the next ones.
        self._tokens.setdefault(index, []).extend(chunk.token_ids)
        if self.request.stream_interval or chunk.was_sent:
            return chunk
        if (whole := self._whole.get(index)) is not None:
            append(whole, chunk)
        else:
            whole = self._whole[index] = chunk
        if whole.finish_reason is None:
            return None
        return self._whole.pop(index)

    def _went_on(self, now_ns: int) -> None:
        if self._ended_ns is not None:
            self.restart_ns += max(0, now_ns - self._ended_ns)
            self._ended_ns = None

    def _settle(self, event: Terminal) -> None:
        """Add the time in earlier engine processes to the account from the last one."""
        if self._ended_ns is None and not self.restart_ns:
            return
        account = event.account
        account.num_continued_tokens = sum(len(piece.token_ids) for piece in self.request.sent)
        times = event.times
        first = self.times
        if first is None or first.first_token is None or first.first_token == times.first_token:
            self._went_on(times.tokenize_started or self.clock_ns())
            if times.tokenize_started is not None:
                account.engine_restart_ns = self.restart_ns
            return
        last_ns = times.last_token or self.clock_ns()
        self._went_on(min(last_ns, self.clock_ns()))
        event.times = replace(first, last_token=times.last_token)
        account.waits_ns = {
            WaitReason.NOT_KNOWN: (first.scheduled or 0) - (first.media_encoded or first.tokenized or 0)
        }
        explained_ns = 0 if times.first_token is None else last_ns - times.first_token
        account.engine_restart_ns = max(0, min(self.restart_ns, last_ns - first.first_token - explained_ns))
        if account.prefill_causes_ns:
            lost_ns = last_ns - first.first_token - explained_ns - account.engine_restart_ns
            causes_ns = {**account.decode_causes_ns, Cause.ENGINE_RESTART: account.engine_restart_ns}
            causes_ns[Cause.UNEXPLAINED] = causes_ns.get(Cause.UNEXPLAINED, 0) + lost_ns
            account.decode_causes_ns = causes_ns
            account.prefill_causes_ns = {Cause.UNEXPLAINED: first.first_token - (first.scheduled or 0)}
