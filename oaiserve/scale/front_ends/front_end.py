"""`FrontEnd` is a front end for the engine process: its open requests, its connections, and its questions.

All of this happens on the event loop of the engine process, except for `_deliver`, which the engine thread calls. When
the process of the front end has ended, its limits are given back, and its requests are aborted and recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, Event, Failed, Request, Terminal, Usage
from oaiserve.engine.tokenize import Tokenized, TokenizeFailed, TokenizeStarted
from oaiserve.errors import APIError, InternalError
from oaiserve.facts.record import EngineAccount, Outcome, Profile, ProfileRecording, RequestRecord
from oaiserve.facts.times import RequestTimes
from oaiserve.facts.trace import TraceContext
from oaiserve.files.adapters import BadAdapter
from oaiserve.http.connections import Connections
from oaiserve.routes.responses.store import ConversationTooLarge, ResponseStore
from oaiserve.scale.front_ends import messages
from oaiserve.scale.front_ends.link import Link
from oaiserve.telemetry import Telemetry
from oaiserve.telemetry.log_limit import LogLimit

log = logging.getLogger(__name__)

UNKNOWN = "unknown"  # stands for the facts of a request that were lost with its front end


@dataclass(frozen=True, slots=True)
class Shared:
    """The components of the engine process for all front ends."""

    engine: Engine
    telemetry: Telemetry
    responses: ResponseStore
    connections: Connections
    log_limit: LogLimit | None
    tell: Callable[[messages.Message], None]  # sends all front ends a message


class FrontEnd:
    """One front end, from the start of its process to its end."""

    def __init__(self, link: Link, shared: Shared, on_up: Callable[[], None] = lambda: None) -> None:
        self._link = link
        self._shared = shared
        self._engine, self._telemetry = shared.engine, shared.telemetry
        self._on_up = on_up
        self._encoding: dict[str, Request] = {}  # whose prompts it encodes
        self._not_begun: set[str] = set()  # of these, those that no thread of it has taken yet
        self._unrecorded: dict[str, Terminal | None] = {}  # by request id, until the record comes: how they have ended
        self._rooms: dict[int, tuple[str, int]] = {}  # that work on bodies has, by question: client, bytes
        self._addresses: Counter[str] = Counter()  # of its connections
        self._num_connections = 0
        self._profiles: dict[int, Future[Profile]] = {}
        self._recordings: dict[int, ProfileRecording] = {}
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

    @property
    def num_connections(self) -> int:
        return self._num_connections

    @property
    def num_open(self) -> int:
        """Return the number of requests without a record."""
        return len(self._unrecorded)

    @property
    def num_encoding(self) -> int:
        """Return the number of requests whose encoding the front end has not begun."""
        return len(self._not_begun)

    def connected(self, address: str) -> None:
        """Note an admitted connection of the front end."""
        self._addresses[address] += 1
        self._num_connections += 1

    def _disconnected(self, address: str) -> None:
        self._num_connections -= 1
        self._addresses[address] -= 1
        if not self._addresses[address]:
            del self._addresses[address]

    def _take(self, body: bytes) -> None:
        message = messages.of_front_end(body)
        self.num_silent = 0
        match message:
            case messages.Submit():
                self._submit(message)
            case messages.EncodingStarted():
                self._encoding_started(message)
            case messages.Encoded():
                self._encoded(message)
            case messages.NotEncoded():
                if (request := self._end_encoding(message.request_id)) is not None:
                    self._engine.not_encoded(TokenizeFailed(request, message.error))
            case messages.AbortRequest():
                self._engine.abort(message.request_id)
            case messages.Recorded():
                self._recorded(message)
            case messages.RoomBack():
                if (room := self._rooms.pop(message.room, None)) is not None:
                    self._engine.give_room_back(*room)
            case messages.ConnectionEnded():
                if self._addresses[message.address] > 0:
                    self._disconnected(message.address)
                    self._shared.connections.release(message.address)
            case messages.ConnectionRefused():
                self._shared.connections.count(message.refusal)
            case messages.AccessRefused():
                self._telemetry.count_refused_access(message.reason)
            case messages.LoopLag():
                for seconds in message.seconds:
                    self._telemetry.observe_event_loop_lag(seconds)
            case messages.LogCounts():
                if self._shared.log_limit is not None:
                    self._shared.log_limit.add({(level, result): number for level, result, number in message.more})
            case messages.StopProfile():
                if (asked := self._profiles.get(message.profile)) is not None:
                    self._engine.end_profile(asked)
            case messages.Up():
                self.is_up = True
                self._on_up()
            case messages.Ask():
                task = asyncio.get_running_loop().create_task(self._answer(message))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _submit(self, message: messages.Submit) -> None:
        request = message.request()
        self._encoding[request.request_id], self._unrecorded[request.request_id] = request, None
        self._not_begun.add(request.request_id)
        try:
            self._engine.open(request, self._deliver, message.submitted_ns)
        except APIError as error:  # its account ends where it was received, as if its submission had raised this
            self._end_encoding(request.request_id)
            times = RequestTimes(received=request.received_ns)
            self._deliver([Failed(request.request_id, error, Usage(0, 0, 0), times, EngineAccount())])

    def _encoding_started(self, message: messages.EncodingStarted) -> None:
        self._not_begun.discard(message.request_id)
        if (request := self._encoding.get(message.request_id)) is not None:
            self._engine.encoding_started(TokenizeStarted(request, message.at_ns))

    def _encoded(self, message: messages.Encoded) -> None:
        if (request := self._end_encoding(message.request_id)) is not None:
            ids, starts, words = message.token_ids, message.second_starts, message.bad_words
            self._engine.encoded(Tokenized(request, ids, starts, words, at_ns=message.at_ns))

    def _end_encoding(self, request_id: str) -> Request | None:
        """Return the request if it was being encoded, which is over."""
        self._not_begun.discard(request_id)
        return self._encoding.pop(request_id, None)

    def _deliver(self, events: list[Event]) -> None:
        """Send the events of a step, in one message. The engine thread calls this."""
        ended = [event for event in events if isinstance(event, TERMINAL)]
        for event in ended:
            if event.request_id in self._unrecorded:
                self._unrecorded[event.request_id] = event
        if not self._is_lost:
            self._link.send(messages.framed(messages.Events.of(events)))
        else:
            self._record_lost(ended)

    def _recorded(self, message: messages.Recorded) -> None:
        terminal = self._unrecorded.pop(message.values.response_id, None)
        self._telemetry.record(message.record(EngineAccount() if terminal is None else terminal.account))
        self._count_ended(message.values.outcome)

    def _count_ended(self, outcome: Outcome) -> None:
        if self.is_ending:
            self.num_finished += outcome is Outcome.FINISHED
            self.num_cut_off += outcome is not Outcome.FINISHED

    # -- its end ------------------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        """Give back the front end's limits, abort its requests, and record them as failed."""
        self._is_lost = True
        left = dict(self._unrecorded)
        for request_id, terminal in left.items():
            if terminal is None:
                self._engine.abort(request_id)
        for request in self._encoding.values():
            self._engine.encoded(Tokenized(request, []))
        self._record_lost([terminal for terminal in left.values() if terminal is not None])
        for room in self._rooms.values():
            self._engine.give_room_back(*room)
        for address in self._addresses.elements():
            self._shared.connections.release(address)
        for asked in self._profiles.values():
            self._engine.end_profile(asked)
        for kept in (self._encoding, self._not_begun, self._rooms, self._addresses, self._recordings):
            kept.clear()
        self.is_up = False
        self.ended.set_result(len(left))

    def _record_lost(self, ended: Sequence[Terminal]) -> None:
        """Record requests whose front end is gone, once each: two threads may have the same one."""
        for terminal in ended:
            if self._unrecorded.pop(terminal.request_id, None) is None:
                continue
            self._count_ended(Outcome.FAILED)
            self._telemetry.record(
                RequestRecord(
                    request_id=terminal.request_id,
                    trace=TraceContext.from_headers(None, None),
                    times=terminal.times.ended(),
                    outcome=Outcome.FAILED,
                    operation=UNKNOWN,
                    http_method="POST",
                    http_route=UNKNOWN,
                    http_status=None,
                    model=UNKNOWN,
                    response_id=terminal.request_id,
                    error_type=InternalError.__name__,
                    prompt_tokens=terminal.usage.prompt_tokens,
                    cached_tokens=terminal.usage.cached_tokens,
                    completion_tokens=terminal.usage.completion_tokens,
                    account=terminal.account,
                )
            )

    # -- questions ----------------------------------------------------------------------------------------------------

    async def _answer(self, ask: messages.Ask[Any]) -> None:
        if self._is_lost:
            return  # nobody would give it back
        try:
            reply: messages.Message = messages.answer(ask.number, await self._value(ask))
        except (APIError, BadAdapter, ConversationTooLarge) as error:
            reply = messages.AskFailed(ask.number, error)
        except Exception as error:
            log.error("A front end has asked for something that failed: %s", type(ask).__name__, exc_info=error)
            reply = messages.AskFailed(
                ask.number, InternalError("The server failed on this request. Its log says why.")
            )
        self.send(reply)

    async def _value(self, ask: messages.Ask[Any]) -> Any:
        """Return the answer to a question. Work of milliseconds is done in a worker thread."""
        telemetry, store, engine = self._telemetry, self._shared.responses, self._engine
        match ask:
            case messages.TakeRoom():
                engine.take_room(ask.client, ask.num_bytes)
                self._rooms[ask.number] = (ask.client, ask.num_bytes)
                return None
            case messages.RenderMetrics():
                return await asyncio.to_thread(telemetry.render, ask.accept)
            case messages.ListRecent():
                entries = partial(
                    telemetry.recent.list,
                    slowest=ask.slowest,
                    outcome=ask.outcome,
                    id_prefix=ask.id_prefix,
                    limit=ask.limit,
                )
                return await asyncio.to_thread(entries)
            case messages.GetRecent():
                return await asyncio.to_thread(telemetry.recent.get, ask.request_id)
            case messages.LiveAfter():
                return telemetry.live.after(ask.sample)
            case messages.MakeReport():
                is_first = not engine.is_reporting
                report = await asyncio.to_thread(engine.report)
                if is_first:  # front ends that are started from now on know it from the beginning
                    self._shared.tell(messages.Reporting())
                return report
            case messages.PutResponse():
                return await store.put(ask.owner, ask.stored)
            case messages.GetResponse():
                return await store.get(ask.owner, ask.response_id)
            case messages.GetConversation():
                return await store.conversation(ask.owner, ask.response_id, ask.most_bytes)
            case messages.DeleteResponse():
                return await store.delete(ask.owner, ask.response_id)
            case messages.LoadAdapter():
                adapter = await asyncio.to_thread(engine.load_adapter, ask.name, Path(ask.path))
                self._shared.tell(messages.Adapters(list(engine.adapters.served)))
                return adapter
            case messages.UnloadAdapter():
                adapter = engine.unload_adapter(ask.name)
                self._shared.tell(messages.Adapters(list(engine.adapters.served)))
                return adapter
            case messages.MakeProfile():
                return await self._make_profile(ask)
            case messages.SaveProfile():
                await asyncio.to_thread(self._recordings.pop(ask.profile).save, Path(ask.path))
                return None
        raise NotImplementedError(type(ask).__name__)

    async def _make_profile(self, ask: messages.MakeProfile) -> tuple[int, int]:
        """Return the number of steps and the duration. The recording is kept until it is saved, or the next is made."""
        asked = self._profiles[ask.number] = self._engine.profile(ask.num_steps, ask.timeout_seconds)
        try:
            made = await asyncio.wrap_future(asked)
        finally:
            del self._profiles[ask.number]
        self._recordings = {ask.number: made.recording}
        return made.num_steps, made.duration_ns
