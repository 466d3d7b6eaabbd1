"""`FrontEnd` is a front end for the engine process: its open requests, its connections, and its questions.

All of this happens on the event loop of the engine process, except for `_deliver`, which the engine thread calls. When
the process of the front end has ended, its limits are given back, and its requests are aborted and recorded.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oaiserve.engine.adapters import ServedAdapter
from oaiserve.engine.request import TERMINAL, Event, Failed, Request, Terminal, Usage
from oaiserve.engine.tokenize import Tokenized, TokenizeFailed, TokenizeStarted
from oaiserve.errors import APIError, InternalError
from oaiserve.facts.record import (
    AccessRefusal,
    EngineAccount,
    Origin,
    Outcome,
    RequestRecord,
)
from oaiserve.facts.report import ReplicaReport
from oaiserve.facts.times import RequestTimes
from oaiserve.facts.trace import TraceContext
from oaiserve.files.adapters import BadAdapter
from oaiserve.http.connections import Connections
from oaiserve.routes.responses.store import ConversationTooLarge, ResponseDatabase
from oaiserve.scale.front_ends import messages
from oaiserve.scale.front_ends.calls import OFFERED, offered
from oaiserve.scale.front_ends.link import Link
from oaiserve.telemetry import Telemetry
from oaiserve.telemetry.log_limit import LogLimit

if TYPE_CHECKING:
    from oaiserve.engine.engine import Engine  # a front end has none, and names the methods of this class

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shared:
    """The components of the engine process for all front ends."""

    engine: Engine
    telemetry: Telemetry
    responses: ResponseDatabase
    connections: Connections
    log_limit: LogLimit | None
    tell: Callable[[messages.Message], None]  # sends all front ends a message


class FrontEnd:
    """One front end, from the start of its process to its end."""

    def __init__(self, link: Link, shared: Shared, on_up: Callable[[], None] = lambda: None) -> None:
        self._link = link
        self.shared = shared
        self._engine, self._telemetry = shared.engine, shared.telemetry
        self._on_up = on_up
        self._encoding: dict[str, Request] = {}  # whose prompts it encodes
        self.not_begun: set[str] = set()  # of these, those that no thread of it has taken yet
        self.unrecorded: dict[str, Terminal | None] = {}  # by request id, until the record comes: how they have ended
        self._origins: dict[str, Origin] = {}  # of the same, to record them if the front end is lost
        self._rooms: dict[int, tuple[str, int]] = {}  # that work on bodies has: client, bytes
        self._room_numbers = itertools.count()
        self._addresses: Counter[str] = Counter()  # of its connections
        self.num_connections = 0
        self._answering: set[asyncio.Task[None]] = set()
        self._is_lost = False
        self.is_ending = False  # written by the supervisor, when the shutdown begins
        self.num_finished = self.num_cut_off = 0  # requests that have ended since then
        self.is_up = False
        self.num_silent = 0  # for the supervisor, which adds to it: how often it has found nothing new
        self.ended = asyncio.get_running_loop().create_future()  # the number of requests that were lost

    def start(self) -> None:
        """Take the front end's messages from now on."""
        self._link.start(self._take, self._lost)

    def send(self, message: messages.Message) -> None:
        self._link.send(messages.framed(message))

    def connected(self, address: str) -> None:
        """Note an admitted connection of the front end."""
        self._addresses[address] += 1
        self.num_connections += 1

    def _take(self, body: bytes) -> None:
        self.num_silent = 0
        call = messages.of_front_end(body)
        called = OFFERED[call.method]
        owner, arguments = called.owner(self), called.arguments.decode(call.arguments)
        if not asyncio.iscoroutinefunction(called.method):
            called.method(owner, *arguments)
            return
        task = asyncio.get_running_loop().create_task(self._answer(call, called.method(owner, *arguments)))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, call: messages.Call, answer: Coroutine[Any, Any, Any]) -> None:
        if self._is_lost:
            return answer.close()  # nobody would give back what it takes
        try:
            value = await answer
            reply: messages.Message = messages.Answered(call.number, messages.packed(value))
        except (APIError, BadAdapter, ConversationTooLarge) as error:
            reply = messages.AskFailed(call.number, error)
        except Exception as error:
            log.error("A front end has asked for something that failed: %s", call.method, exc_info=error)
            told = InternalError("The server failed on this request. Its log says why.")
            reply = messages.AskFailed(call.number, told)
        self.send(reply)

    # -- requests -----------------------------------------------------------------------------------------------------

    @offered
    def submit(self, sent: messages.Submit) -> None:
        """Take a request, whose prompts the front end encodes."""
        request = sent.request()
        self._encoding[request.request_id], self.unrecorded[request.request_id] = request, None
        self._origins[request.request_id] = request.origin
        self.not_begun.add(request.request_id)
        try:
            self._engine.open(request, self._deliver, sent.submitted_ns)
        except APIError as error:  # its account ends where it was received, as if its submission had raised this
            self._end_encoding(request.request_id)
            times = RequestTimes(received=request.received_ns)
            self._deliver([Failed(request.request_id, error, Usage(0, 0, 0), times, EngineAccount())])

    @offered
    def encoding_started(self, request_id: str, at_ns: int) -> None:
        """Note that a thread of the front end has begun to encode the prompts of a request."""
        self.not_begun.discard(request_id)
        if (request := self._encoding.get(request_id)) is not None:
            self._engine.encoding_started(TokenizeStarted(request, at_ns))

    @offered
    def encoded(
        self,
        request_id: str,
        token_ids: list[list[int]],
        second_starts: list[int | None],
        bad_words: list[list[int]],
        closing_ids: list[int],
        at_ns: int | None,
    ) -> None:
        """Take the token ids of the prompts of a request, as in the engine's `Tokenized`."""
        if (request := self._end_encoding(request_id)) is not None:
            self._engine.encoded(Tokenized(request, token_ids, second_starts, bad_words, closing_ids, at_ns=at_ns))

    @offered
    def not_encoded(self, request_id: str, error: APIError) -> None:
        """End a request whose prompts cannot be encoded."""
        if (request := self._end_encoding(request_id)) is not None:
            self._engine.not_encoded(TokenizeFailed(request, error))

    def _end_encoding(self, request_id: str) -> Request | None:
        """Return the request if it was being encoded, which is over."""
        self.not_begun.discard(request_id)
        return self._encoding.pop(request_id, None)

    @offered
    def abort(self, request_id: str) -> None:
        """End a request whose client has left."""
        self._engine.abort(request_id)

    def _deliver(self, events: list[Event]) -> None:
        """Send the events of a step, in one message. The engine thread calls this."""
        ended = [event for event in events if isinstance(event, TERMINAL)]
        for event in ended:
            if event.request_id in self.unrecorded:
                self.unrecorded[event.request_id] = event
        if not self._is_lost:
            self._link.send(messages.framed(messages.Events.of(events)))
        else:
            self._record_lost(ended)

    @offered
    def record(self, sent: messages.Recorded) -> None:
        """Take the record of an ended request, which gets its account here."""
        self._origins.pop(sent.values.engine_id, None)
        terminal = self.unrecorded.pop(sent.values.engine_id, None)
        self._telemetry.record(sent.record(EngineAccount() if terminal is None else terminal.account))
        self._count_ended(sent.values.outcome)

    def _count_ended(self, outcome: Outcome) -> None:
        if self.is_ending:
            self.num_finished += outcome is Outcome.FINISHED
            self.num_cut_off += outcome is not Outcome.FINISHED

    # -- the front end itself -----------------------------------------------------------------------------------------

    @offered
    def up(self) -> None:
        self.is_up = True
        self._on_up()

    @offered
    def connection_ended(self, address: str) -> None:
        if self._addresses[address] > 0:
            self.num_connections -= 1
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]
            self.shared.connections.release(address)

    @offered
    def access_refused(self, reason: AccessRefusal) -> None:
        self._telemetry.count_refused_access(reason)

    @offered
    def loop_lags(self, lags_seconds: list[float]) -> None:
        """Observe how late the event loop of the front end has woken up a sleeping task, several times."""
        for seconds in lags_seconds:
            self._telemetry.observe_event_loop_lag(seconds)

    @offered
    def log_counts(self, more: list[tuple[str, str, int]]) -> None:
        """Add the numbers of log messages since the last call, by level and result."""
        if self.shared.log_limit is not None:
            self.shared.log_limit.add({(level, result): number for level, result, number in more})

    # -- questions: work of milliseconds is done in a worker thread ----------------------------------------------------

    @offered
    async def take_room(self, client: str, num_bytes: int) -> int:
        """Take a share of the limit of waiting bytes for work on a body, and return its number."""
        self._engine.take_room(client, num_bytes)
        number = next(self._room_numbers)
        self._rooms[number] = (client, num_bytes)
        return number

    @offered
    def give_room_back(self, number: int) -> None:
        if (room := self._rooms.pop(number, None)) is not None:
            self._engine.give_room_back(*room)

    @offered
    async def read(self, what: str, value: str | int | None, named: dict[str, str | int | bool | None]) -> Any:
        """Return the page of metrics, accounts of recent requests, or samples and costs of the live page."""
        telemetry = self._telemetry
        reads: dict[str, Callable[..., Any]] = {
            "render": telemetry.render,
            "list": telemetry.recent.list,
            "get": telemetry.recent.get,
            "open": telemetry.recent.open,
            "after": telemetry.live.after,
            "costs": telemetry.live.costs,
        }
        given = () if value is None else (value,)
        return await asyncio.to_thread(reads[what], *given, **named)

    @offered
    async def report(self) -> ReplicaReport:
        """Return the report for routers. Front ends that are started from now on know of it from the beginning."""
        is_first = not self._engine.is_reporting
        report = await asyncio.to_thread(self._engine.report)
        if is_first:
            self.shared.tell(messages.State.of(self._engine))
        return report

    @offered
    async def load_adapter(self, name: str, path: str) -> ServedAdapter:
        adapter = await asyncio.to_thread(self._engine.load_adapter, name, Path(path))
        self.shared.tell(messages.State.of(self._engine))
        return adapter

    @offered
    async def unload_adapter(self, name: str) -> ServedAdapter:
        adapter = self._engine.unload_adapter(name)
        self.shared.tell(messages.State.of(self._engine))
        return adapter

    # -- its end ------------------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        """Give back the front end's limits, abort its requests, and record them as failed."""
        self._is_lost = True
        left = dict(self.unrecorded)
        for request_id, terminal in left.items():
            if terminal is None:
                self._engine.abort(request_id)
        for request in self._encoding.values():
            self._engine.encoded(Tokenized(request, []))
        self._record_lost([terminal for terminal in left.values() if terminal is not None])
        for room in self._rooms.values():
            self._engine.give_room_back(*room)
        for address in self._addresses.elements():
            self.shared.connections.release(address)
        for kept in (self._encoding, self.not_begun, self._rooms, self._addresses):
            kept.clear()
        self.is_up = False
        self.ended.set_result(len(left))

    def _record_lost(self, ended: Sequence[Terminal]) -> None:
        """Record requests whose front end is gone, once each: two threads may have the same one."""
        for terminal in ended:
            if self.unrecorded.pop(terminal.request_id, None) is None:
                continue
            self._count_ended(Outcome.FAILED)
            self._telemetry.record(
                RequestRecord(
                    **self._origins.pop(terminal.request_id)._asdict(),
                    trace=TraceContext.from_headers(None, None),
                    times=terminal.times.ended(),
                    outcome=Outcome.FAILED,
                    http_method="POST",
                    http_status=None,
                    response_id=terminal.request_id,
                    engine_id=terminal.request_id,
                    error_type=InternalError.__name__,
                    prompt_tokens=terminal.usage.prompt_tokens,
                    cached_tokens=terminal.usage.cached_tokens,
                    completion_tokens=terminal.usage.completion_tokens,
                    account=terminal.account,
                )
            )


STORE = tuple(
    offered(getattr(ResponseDatabase, name), lambda front_end: front_end.shared.responses)
    for name in ("put", "get", "conversation", "replace", "delete")
)
offered(Connections.count, lambda front_end: front_end.shared.connections)
