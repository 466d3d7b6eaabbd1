"""`Lanes`: the responses on one socket, one after the other in each lane, and the input that steers them."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict, deque
from contextlib import suppress
from secrets import token_hex
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

from oaiserve.errors import InvalidRequest, Overloaded, Unavailable
from oaiserve.plugins.responses.socket_messages import Fields, field_of, items_of, steer_failed
from oaiserve.plugins.responses.socket_run import Emit, SocketRun, Turn
from oaiserve.routes.intake.receive import HeldBytes
from oaiserve.routes.intake.turns import MOST_LOOP_BYTES

MOST_CREATES = 16  # responses of one socket that run or wait
MOST_KEPT = 4  # responses that a socket keeps because the server doesn't
MOST_STEER_BYTES = 2**20
MOST_STEERS = 8  # inputs that wait for the end of one response
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _SteerMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message of the user for a running response."""

    role: str
    content: str | list[Any]
    type: str = "message"


class _Unsteerable(Exception):
    """Input can't steer a response. `code` is one of OpenAI's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Lanes:
    """`emit` sends an event's JSON to the client. `held` counts the bytes of requests that wait or run."""

    def __init__(self, scope: Scope, held: HeldBytes, emit: Emit) -> None:
        self._scope = scope
        self._held = held
        self._emit = emit
        # Requests that wait, with their bytes, by lane. A lane is there while it runs.
        self._lanes: dict[str | None, deque[tuple[Fields, int]]] = {}
        self.tasks: set[asyncio.Task[None]] = set()  # of lanes
        self._runs: dict[str | None, SocketRun] = {}  # by lane
        self._ended: deque[str] = deque(maxlen=MOST_CREATES)  # ids of the last responses that are over
        self._kept: OrderedDict[str, Turn] = OrderedDict()
        self._pending: OrderedDict[str, list[msgspec.Raw]] = OrderedDict()  # accepted input by the response before it
        self._is_draining = False
        self._has_left = False  # the client
        self.drained = asyncio.Event()  # The server shuts down, and no response is running.

    async def take(self, message: bytes) -> None:
        """Take a message of the client. Raises APIError."""
        try:
            if len(message) > MOST_LOOP_BYTES:
                fields = await run_in_threadpool(_decode_fields, message)
            else:
                fields = _decode_fields(message)
            kind = msgspec.json.decode(fields.get("type", b"null"), type=str)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise InvalidRequest(f"A message must be a JSON object with a 'type': {error}.", param="type") from None
        if kind == "response.create":
            self._create(fields, len(message))
        elif kind == "response.steer":
            await self._steer(fields, len(message))
        else:
            text = f"The type of an event must be 'response.create' or 'response.steer', got {kind[:100]!r}."
            raise InvalidRequest(text, param="type")

    def drain(self) -> None:
        """Take no more requests, and let those that are there end."""
        self._is_draining = True
        if not self._lanes:
            self.drained.set()

    def leave(self) -> None:
        """Abort all responses: the client has left."""
        self._has_left = True
        for lane in self._lanes.values():
            lane.clear()
        for run in self._runs.values():
            run.leave()

    def cancel(self) -> None:
        """End all responses as failed: the time for a shutdown is over."""
        for lane in self._lanes.values():
            lane.clear()
        for task in self.tasks:
            task.cancel()

    def _create(self, fields: Fields, num_bytes: int) -> None:
        stream_id = field_of(fields, "stream_id", str)
        if stream_id is not None and _STREAM_ID.fullmatch(stream_id) is None:
            text = "Invalid 'stream_id': must be 1 to 256 letters, digits, '_', '-' or '.'."
            raise InvalidRequest(text, param="stream_id")
        field_of(fields, "previous_response_id", str)  # an error now, and not when its turn comes
        if bytes(fields.get("background") or b"") == b"true":
            raise InvalidRequest("Invalid 'background': is not supported on a WebSocket.", param="background")
        if self._is_draining:
            raise Unavailable("The server is shutting down. Please try again.")
        if len(self._lanes) + sum(map(len, self._lanes.values())) >= MOST_CREATES:
            raise Overloaded(f"At most {MOST_CREATES} responses may run or wait on one socket.", retry_after_seconds=1)
        self._held.take(num_bytes)  # until the response has ended
        if stream_id in self._lanes:
            self._lanes[stream_id].append((fields, num_bytes))
            return
        self._lanes[stream_id] = deque(((fields, num_bytes),))
        task = asyncio.create_task(self._run_lane(stream_id))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _steer(self, fields: Fields, num_bytes: int) -> None:
        response_id = field_of(fields, "previous_response_id", str) or ""
        run = next((run for run in self._runs.values() if response_id and run.id == response_id), None)
        try:
            if num_bytes > MOST_STEER_BYTES:
                raise _Unsteerable("invalid_input", f"Input that steers has at most {MOST_STEER_BYTES} bytes.")
            items = self._items_to_steer(run, response_id, fields)
        except _Unsteerable as error:
            given = {"previous_response_id": response_id, "input": fields.get("input", msgspec.Raw(b"null"))}
            await self._emit(steer_failed(error.code, error.message, given))
        else:
            assert run is not None
            await run.steer(f"steer_{token_hex(16)}", items)

    def _items_to_steer(self, run: SocketRun | None, response_id: str, fields: Fields) -> list[msgspec.Raw]:
        """Return the input for a running response. Raises _Unsteerable."""
        if not response_id:
            raise _Unsteerable("invalid_input", "'previous_response_id' is missing: the id of the running response.")
        if run is None and response_id not in self._ended:
            raise _Unsteerable("response_not_found", "No response with this id runs on this socket.")
        if run is None or run.is_over:
            raise _Unsteerable("response_already_completed", "The response has ended already.")
        if bytes(run.fields.get("conversation") or b"null") != b"null":
            raise _Unsteerable("steering_not_supported", "A response of a conversation can't be steered.")
        if len(run.steers) >= MOST_STEERS:
            text = f"At most {MOST_STEERS} inputs may wait for one response."
            raise _Unsteerable("too_many_pending_steers", text)
        if unknown := fields.keys() - {"type", "previous_response_id", "input"}:
            raise _Unsteerable("invalid_input", f"'response.steer' takes no {min(unknown)[:100]!r}.")
        try:
            items = items_of(fields)
            roles = {msgspec.json.decode(item, type=_SteerMessage).role for item in items}
        except (msgspec.MsgspecError, InvalidRequest) as error:
            raise _Unsteerable("invalid_input", f"Invalid 'input': {error}") from None
        if roles != {"user"}:
            raise _Unsteerable("invalid_input", "Invalid 'input': must hold a text, or messages of the user.")
        return items

    async def _run_lane(self, stream_id: str | None) -> None:
        """Make the responses of a lane, one after the other."""
        waiting = self._lanes[stream_id]
        suffix = b"" if stream_id is None else b',"stream_id":%b}' % msgspec.json.encode(stream_id)

        async def emit(data: bytes) -> None:
            await self._emit(data[:-1] + suffix if suffix else data)

        try:
            while waiting:
                fields: Fields | None
                fields, num_bytes = waiting.popleft()
                while fields is not None and not self._has_left:
                    fields = await self._run(stream_id, fields, emit)
                self._held.give_back(num_bytes)
        finally:
            del self._lanes[stream_id]
            self._runs.pop(stream_id, None)
            if self._is_draining and not self._lanes:
                self.drained.set()

    async def _run(self, stream_id: str | None, fields: Fields, emit: Emit) -> Fields | None:
        """Make a response, and return the request for the one that follows it because it was steered."""
        previous = field_of(fields, "previous_response_id", str) or ""
        steered = self._pending.pop(previous, [])
        run = SocketRun(self._scope, fields, self._kept.get(previous), steered, emit)
        self._runs[stream_id] = run
        await run.play()
        if not run.id:
            if steered:  # The next request that continues the response gets this input.
                self._pend(previous, steered)
            return None
        self._ended.append(run.id)
        if run.turn is not None:
            self._keep(run.id, run.turn)
        if not run.steers:
            return None
        if run.has_failed:
            await run.give_steers_back()
            return None
        items = [item for _, each in run.steers for item in each]
        if run.open_calls:
            self._pend(run.id, items)
            await run.report_pending()
            return None
        after = msgspec.Raw(msgspec.json.encode(run.id))
        return {**fields, "input": msgspec.Raw(msgspec.json.encode(items)), "previous_response_id": after}

    def _pend(self, response_id: str, items: list[msgspec.Raw]) -> None:
        self._pending[response_id] = items
        if len(self._pending) > MOST_KEPT:
            self._pending.popitem(last=False)

    def _keep(self, response_id: str, turn: Turn) -> None:
        """Keep a turn for the responses that follow it, in place of the oldest ones."""
        with suppress(Overloaded):  # Then a later response gets the error that its previous one is not there.
            self._held.take(turn.num_bytes)
            self._kept[response_id] = turn
        while len(self._kept) > MOST_KEPT:
            _, oldest = self._kept.popitem(last=False)
            self._held.give_back(oldest.num_bytes)
