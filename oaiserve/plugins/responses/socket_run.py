"""`SocketRun`: one response on a socket, as a request to the server's own route, and what steers it.

It reads the events of the stream only as far as steering and later responses need them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Scope

from oaiserve.errors import APIError, InternalError, Unavailable
from oaiserve.http.connections import CONNECTION
from oaiserve.http.fair_turns import CpuTime, Work
from oaiserve.plugins.responses.socket_messages import (
    Create,
    as_list,
    body_of,
    error_event,
    items_of,
    joined,
    own_items,
    steer_failed,
)
from oaiserve.routes import adaptations
from oaiserve.routes.intake.bodies import Bodies

logger = logging.getLogger(__name__)

Emit = Callable[[bytes], Awaitable[None]]
Result = TypeVar("Result")

_DROPPED_HEADERS = frozenset(
    (
        *(b"connection", b"upgrade", b"content-length", b"content-encoding", b"content-type", b"transfer-encoding"),
        *(b"expect", b"x-request-id", b"accept-encoding"),
    )
)
_SHOWN_HEADERS = ("x-request-id", adaptations.HEADER, "x-oaiserve-read-again")  # shown in the first event of a response
_CALLS = ("function_call", "custom_tool_call")
_TERMINAL = frozenset((b"response.completed", b"response.incomplete", b"response.failed"))
_encode = msgspec.json.encode


class _Response(msgspec.Struct):
    id: str = ""
    store: bool = True
    output: msgspec.Raw = msgspec.Raw(b"[]")


class _Event(msgspec.Struct):
    type: str = ""
    sequence_number: int = 0
    response: msgspec.Raw = msgspec.Raw(b"{}")
    item: msgspec.Raw = msgspec.Raw(b"{}")
    delta: str = ""


class _Item(msgspec.Struct):
    type: str = "message"
    id: str = ""
    call_id: str = ""


_event = msgspec.json.Decoder(_Event)
_response = msgspec.json.Decoder(_Response)
_item = msgspec.json.Decoder(_Item)


class Turn(NamedTuple):
    """A response that the socket keeps, because the server doesn't: it was not to be stored, or was steered."""

    previous: bytes  # the id of the stored response before `items` in JSON
    items: bytes  # the items of its input and its output, a copy


class SocketRun:
    """A response from its request to its last event. `emit` sends an event's JSON to the client, and `count` is called
    when it holds more bytes."""

    def __init__(
        self,
        scope: Scope,
        bodies: Bodies,
        create: Create,
        before: Turn | None,
        steered: bytes,
        emit: Emit,
        count: Callable[[], None],
    ) -> None:
        """`create` is the client's request. `before` is the previous response, if the socket keeps it, and `steered`
        the items of input that was accepted for the response after that one."""
        self._outer = scope
        self._bodies = bodies
        self._emit = emit
        self._count = count
        self.before = before
        self._steered = steered
        self.create = create
        self._cpu = CpuTime()  # CPU time of the work on its message
        self._previous = b"null"  # the stored response that it continues, in JSON
        self._shown = b"", b""  # the previous response as the server states it, and as the client did
        self.id = ""
        self.steers: list[tuple[str, bytes]] = []  # ids of accepted inputs, and their items
        self.is_over = False  # Its last event was sent, or is certain.
        self.has_failed = False
        self.turn: Turn | None = None  # the facts to keep of the response
        self.open_calls: list[str] = []  # calls in its output, which the client has to make
        self._left = asyncio.Event()
        self._is_cut = False
        self._body: bytes | None = None
        self._status = 0
        self._headers = Headers()
        self._parts: list[bytes] = []
        self._response = b"{}"  # the last state that the server has sent
        self._output: bytes | None = None  # the items of the output, if the socket has to keep them
        self._items: list[bytes] = []  # complete items of the output
        self._open: list[bytes] = []  # events of the open item: its first one and the deltas of its text
        self._num_output_bytes = 0  # bytes of the two
        self._num_events = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it holds, without those of the response before it."""
        request = self.create.num_bytes + len(self._steered) + len(self._body or b"")
        return request + len(self._response) + self._num_output_bytes + sum(len(items) for _, items in self.steers)

    async def play(self) -> None:
        """Make the response, and send its events, or the error in their place."""
        error: APIError | None = None
        try:
            await self._make()
        except APIError as caught:
            error = caught.without_frames()
        except Exception:
            logger.exception("A response on a socket failed with an unexpected error")
            error = InternalError("The server failed on this response.")
        self.is_over = True
        if error is not None:
            self.has_failed = True
            await self._emit(error_event(error))

    async def _make(self) -> None:
        """Make the response, and send its events. Raises APIError if there is none, or if it has no end."""
        earlier = self._steered if self.before is None else joined((self.before.items, self._steered))
        previous = b"" if self.before is None else self.before.previous
        if self.create.items is not None and self.before is None:  # It follows a steered response, which is stored.
            previous = _encode(self.create.previous_response_id)
        sent = await self._read(body_of(self.create, previous, earlier))
        self._body, self._previous = sent
        num_bytes = len(sent.body)
        del sent
        if self.before is not None:
            name = b'"previous_response_id":'
            self._shown = name + previous, name + _encode(self.create.previous_response_id)
        del earlier, previous
        await self._outer["app"](self._scope(num_bytes), self._receive, self._send)
        if self._is_cut:
            await self._end_steered()
        elif self._status != 200:
            await self._report_error()
        elif not self._is_stream:  # A compaction is never streamed.
            await self._take_event(b"response.completed", self._whole(b"".join(self._parts)))
        elif not self.is_over:
            raise Unavailable("The server has ended the response early. Please try again.")
        if self._output is not None:
            with suppress(APIError):  # Then a later response gets the error that its previous one is not there.
                own = await self._read(own_items(self.create))
                before = b"" if self.before is None else self.before.items
                self.turn = Turn(self._previous, joined((before, self._steered, own, self._output)))

    async def _read(self, work: Work[Result]) -> Result:
        client = self._outer["state"]["client"]
        return await self._bodies.read(work, client=client, num_bytes=self.create.num_bytes, cpu=self._cpu)

    def leave(self) -> None:
        """Abort the response: its client has left."""
        self._left.set()

    async def steer(self, steer_id: str, items: bytes) -> None:
        """Take input for the response after this one, and end this one as soon as it is at a safe place."""
        self.steers.append((steer_id, items))
        steer = {"id": steer_id, "previous_response_id": self.id}
        await self._emit_event("response.steer.accepted", steer=steer)
        written = [*self._items, *(_event.decode(event).item for event in self._open[:1])]
        if not self.is_over and not self._is_cut and not any(_item.decode(item).type in _CALLS for item in written):
            self._is_cut = True
            self._left.set()

    async def report_pending(self) -> None:
        """Tell the client that accepted input waits for the results of its calls."""
        stubs = [{"type": "function_call_output", "call_id": call_id} for call_id in self.open_calls]
        for steer_id, _ in self.steers:
            steer = {"id": steer_id, "previous_response_id": self.id}
            reason = "waiting_for_required_input"
            await self._emit_event("response.steer.pending", steer=steer, reason=reason, required_input=stubs)

    async def give_steers_back(self) -> None:
        """Give accepted input back to the client: no response can follow this one, which has failed."""
        reason = "successor_creation_failed", "The response before it has failed."
        for steer_id, items in self.steers:
            await self._emit(steer_failed(*reason, self.id, as_list(items), steer_id))

    def _scope(self, num_bytes: int) -> Scope:
        outer = self._outer
        headers = [
            (name, value)
            for name, value in outer["headers"]
            if name not in _DROPPED_HEADERS and not name.startswith(b"sec-websocket-")
        ]
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % num_bytes)]
        connection = {**outer["extensions"][CONNECTION], "awaits_body": lambda: False, "charge": self._charge}
        same = ("asgi", "http_version", "server", "client", "scheme", "root_path", "path", "raw_path", "query_string")
        return {
            **{name: outer[name] for name in same if name in outer},
            "type": "http",
            "method": "POST",
            "headers": headers,
            "state": {},
            "extensions": {CONNECTION: connection},
        }

    def _charge(self, client: bytes, cpu_ns: float) -> int:
        """Charge the client for a refused request, and for the work on its message."""
        delay_ns: int = self._outer["extensions"][CONNECTION]["charge"](client, cpu_ns + self._cpu.ns)
        return delay_ns

    async def _receive(self) -> Message:
        if self._body is not None:
            body = self._body
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = Headers(raw=list(message.get("headers", ())))
            return
        if self._is_cut:
            return
        self._parts.append(message.get("body", b""))
        if not self._is_stream or not self._parts[-1].endswith(b"\n\n"):
            return
        blocks = b"".join(self._parts).split(b"\n\n")
        self._parts = []
        for block in blocks:
            if block.startswith(b"event: ") and not self._is_cut:
                kind, _, data = block.removeprefix(b"event: ").partition(b"\ndata: ")
                await self._take_event(kind, data)

    @property
    def _is_stream(self) -> bool:
        return self._status == 200 and self._headers.get("content-type", "").startswith("text/event-stream")

    async def _take_event(self, kind: bytes, data: bytes) -> None:
        self._num_events += 1
        if kind.endswith(b".delta"):
            if self._open:
                self._open.append(data)
                self._num_output_bytes += len(data)
        elif kind == b"response.output_item.added":
            self._open = [data]
            self._num_output_bytes += len(data)
        elif kind == b"response.output_item.done":
            self._items.append(bytes(_event.decode(data).item))
            self._open = []
            self._num_output_bytes = sum(map(len, self._items))
        elif kind == b"error":  # a gateway's, which ends the stream
            self.is_over = True
            self.has_failed = True
        elif kind in _TERMINAL or kind in (b"response.created", b"response.in_progress", b"response.queued"):
            data = data.replace(*self._shown, 1) if self._shown[0] else data
            self._response = bytes(_event.decode(data).response)
            if not self.id:
                self.id = _response.decode(self._response).id
                shown = {name: value for name in _SHOWN_HEADERS if (value := self._headers.get(name)) is not None}
                data = data[:-1] + b',"headers":%b}' % _encode(shown)
            if kind in _TERMINAL:
                self._end(kind)
        if not kind.endswith(b".delta"):
            self._count()
        await self._emit(data)

    def _end(self, kind: bytes) -> None:
        response = _response.decode(self._response)
        self.is_over = True
        self.has_failed = kind == b"response.failed"
        items = msgspec.json.decode(response.output, type=list[_Item])
        self.open_calls = [item.call_id for item in items if item.type in _CALLS]
        if not self.has_failed and not response.store:
            self._output = items_of(response.output)

    async def _end_steered(self) -> None:
        """Close the open item, and the response, with what was written so far."""
        if self._open:
            item = self._cut_item()
            self._items.append(_encode(item))
            await self._emit_event("response.output_item.done", output_index=len(self._items) - 1, item=item)
        response: dict[str, Any] = msgspec.json.decode(self._response, type=dict[str, msgspec.Raw])
        self._output = joined(self._items)
        output = as_list(self._output)
        response.update(status="incomplete", incomplete_details={"reason": "steered"}, output=output, completed_at=None)
        self.is_over = True
        await self._emit_event("response.incomplete", response=response)

    def _cut_item(self) -> dict[str, Any]:
        """Return the open item with its text so far: a message, or reasoning."""
        first, *deltas = self._open
        item = msgspec.json.decode(_event.decode(first).item, type=dict[str, Any])
        text = "".join(_event.decode(delta).delta for delta in deltas)
        if item["type"] == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": text}
        else:
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {**item, "status": "incomplete", "content": [part]}

    async def _report_error(self) -> None:
        body = b"".join(self._parts)
        try:
            error = msgspec.json.decode(body, type=dict[str, Any])["error"]
        except (msgspec.MsgspecError, KeyError):  # a proxy's answer
            error = {"type": "server_error", "message": f"The server answered with the status {self._status}."}
        if retry_after := self._headers.get("retry-after"):
            error["headers"] = {"retry-after": retry_after}
        await self._emit(_encode({"type": "error", "status": self._status, "error": error}))

    def _whole(self, response: bytes) -> bytes:
        return _encode({"type": "response.completed", "sequence_number": 0, "response": msgspec.Raw(response)})

    async def _emit_event(self, kind: str, **fields: Any) -> None:
        await self._emit(_encode({"type": kind, "sequence_number": self._num_events, **fields}))
        self._num_events += 1
