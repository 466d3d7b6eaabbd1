"""GET /v1/responses as a WebSocket: responses one after the other, or side by side in lanes, on one connection.

Each `response.create` is a request to POST /v1/responses of the same server, or of a gateway, with the headers of the
handshake. So keys, limits, accounts, metrics and errors are those of any request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from oaiserve.errors import APIError, BodyTooLarge, InvalidRequest, MethodNotAllowed, Overloaded
from oaiserve.http.connections import CONNECTION, UPGRADE
from oaiserve.http.fair_turns import CpuTime
from oaiserve.http.refusals import REFUSAL_NS
from oaiserve.plugins.responses.socket_frames import (
    VERSION,
    Broken,
    CloseCode,
    Event,
    Opcode,
    Reader,
    accept_value,
    close_frame,
    frame,
)
from oaiserve.plugins.responses.socket_lanes import Lanes, Unsteerable
from oaiserve.plugins.responses.socket_messages import error_event
from oaiserve.routes.door.middleware import charge, is_refusal
from oaiserve.routes.intake.bodies import Bodies
from oaiserve.routes.intake.receive import HeldBytes, check_size
from oaiserve.routes.intake.turns import client_left

PING_SECONDS = 20.0
MOST_SILENT_PINGS = 3  # A client that answers none of these is gone.
MOST_UNREAD_BYTES = 64 * 1024  # limit of unread frames; above it, reading pauses
FRAMES_AT_ONCE = 64  # frames to read before other connections get a turn
FRAME_NS = 20_000  # CPU time to read a frame, and to answer it if it is a ping
SKIPPED_BYTE_NS = 1.0  # additional CPU time to unmask a byte of a message that is too large
FRAME_BYTES = 1024  # Only smaller parts of a message are charged: its bytes are free, like those of a request's body.


def socket_route(path: str) -> Route:
    """Return the route of sockets."""

    async def connect(request: Request) -> Socket:
        upgrade = request.scope.get("extensions", {}).get(UPGRADE)
        if upgrade is None or upgrade["protocol"] != "websocket":
            raise MethodNotAllowed(f"GET is not allowed on {path}, which takes POST, or a WebSocket.")
        if "take" not in upgrade:
            raise MethodNotAllowed(f"With --front-processes, this server takes no WebSocket. Use POST {path}.")
        key = request.headers.get("sec-websocket-key", "")
        version = request.headers.get("sec-websocket-version", "")
        if not key or version != VERSION:
            raise InvalidRequest(f"A WebSocket needs the header Sec-WebSocket-Key, and the version {VERSION}.")
        return Socket(key, request.app.state.bodies, request.app.state.runtime.token_hex)

    return Route(path, connect, methods=["GET"])


class Charge:
    """Charges a client for what the socket itself refuses, and for frames that are no part of a request.

    The account is that of refusals over HTTP. A socket is not read until it is paid off, for at most 2 s.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._frames_ns = 0  # CPU time of frames that was not charged yet
        self._delay_ns = 0

    def add_frame(self, num_skipped: int = 0) -> None:
        self._frames_ns += FRAME_NS + int(SKIPPED_BYTE_NS * num_skipped)
        if self._frames_ns >= REFUSAL_NS:
            self._delay_ns += charge(self._scope, self._frames_ns - REFUSAL_NS)
            self._frames_ns = 0

    def add_refusal(self, cpu_ns: int) -> None:
        self._delay_ns += charge(self._scope, cpu_ns)

    async def pay_off(self) -> None:
        delay_ns = self._delay_ns
        self._delay_ns = 0
        if delay_ns:
            await asyncio.sleep(delay_ns / 1e9)


class Socket:
    """One connection, as an ASGI response to its handshake."""

    def __init__(self, key: str, bodies: Bodies, token_hex: Callable[[int], str]) -> None:
        self._key = key
        self._bodies = bodies
        self._token_hex = token_hex
        self._incoming = bytearray()
        self._has_data = asyncio.Event()
        self._frames = Reader()
        self._is_skipping = False  # the rest of a message that is too large
        self._num_silent = 0  # pings since the client's last sign of life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._connection: dict[str, Any] = scope["extensions"][UPGRADE]
        self._charge = Charge(scope)
        with HeldBytes(self._bodies.received, scope["state"]["client"]) as held:
            lanes = Lanes(scope, self._bodies, self._token_hex, held, self._emit)
            self._connection["take"](self._take_data, lanes.drain)
            accept = accept_value(self._key).encode()
            headers = [(b"upgrade", b"websocket"), (b"connection", b"Upgrade"), (b"sec-websocket-accept", accept)]
            await send({"type": "http.response.start", "status": 101, "headers": headers})
            await self._serve(lanes, receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _serve(self, lanes: Lanes, receive: Receive) -> None:
        """Serve until the client leaves or breaks the protocol, or until the server ends."""
        reading = asyncio.create_task(self._read(lanes))
        waiting: set[asyncio.Task[Any]] = {
            reading,
            asyncio.create_task(client_left(receive)),
            asyncio.create_task(self._ping()),
            asyncio.create_task(lanes.drained.wait()),
        }
        last = close_frame(CloseCode.GOING_AWAY, "the server is shutting down")
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            lanes.leave()
            if reading.done():
                last = reading.result()
        except asyncio.CancelledError:  # The time for a shutdown is over.
            lanes.cancel()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, *lanes.tasks, return_exceptions=True)
            lanes.close()
            self._incoming = bytearray()
            self._frames = Reader()
            self._connection["write"](last)

    # -- from the client ----------------------------------------------------------------------------------------------

    def _take_data(self, data: bytes) -> None:
        self._incoming += data
        if len(self._incoming) > MOST_UNREAD_BYTES:
            self._connection["pause"]()
        self._has_data.set()

    async def _read(self, lanes: Lanes) -> bytes:
        """Read until the client closes the socket, and return the frame that answers it."""
        num_frames = 0
        try:
            while True:
                await self._has_data.wait()
                self._has_data.clear()
                self._num_silent = 0
                self._frames.push(self._incoming)
                self._incoming = bytearray()
                while (event := self._frames.next()) is not None:
                    if event.opcode is Opcode.CLOSE:
                        return close_frame(CloseCode.NORMAL)
                    await self._take_frame(event, lanes)
                    await self._charge.pay_off()
                    num_frames += 1
                    if num_frames % FRAMES_AT_ONCE == 0:
                        await asyncio.sleep(0)
                self._connection["resume"]()
        except Broken as broken:
            return close_frame(broken.code, broken.reason)

    async def _take_frame(self, event: Event, lanes: Lanes) -> None:
        if event.opcode is Opcode.PING:
            await self._write(frame(Opcode.PONG, event.data))
        if event.opcode not in (Opcode.TEXT, Opcode.BINARY):
            self._charge.add_frame()
            return
        if self._is_skipping:
            self._charge.add_frame(len(event.data))
            self._is_skipping = not event.is_last
            return
        try:
            check_size(len(lanes.message) + len(event.data), self._bodies.limit_bytes)
        except BodyTooLarge as error:
            lanes.drop_message()
            self._is_skipping = not event.is_last
            await self._refuse(error, 0)
            return
        if not event.is_last and len(event.data) < FRAME_BYTES:
            self._charge.add_frame()
        if event.data:
            try:
                lanes.check_room(len(event.data))
            except Overloaded:
                raise Broken(CloseCode.TRY_AGAIN_LATER, "the server is receiving too much already") from None
            lanes.message += event.data
        if event.is_last:
            await self._take_message(lanes)

    async def _take_message(self, lanes: Lanes) -> None:
        cpu = CpuTime()
        try:
            await lanes.take(cpu)
        except Unsteerable as refused:
            self._charge.add_refusal(cpu.ns)
            await self._charge.pay_off()
            await self._emit(refused.event)
        except APIError as error:
            await self._refuse(error.without_frames(), cpu.ns)

    async def _refuse(self, error: APIError, cpu_ns: int) -> None:
        self._charge.add_refusal(cpu_ns)
        if is_refusal(error.status):  # As over HTTP, an error that is no fault of the client's comes at once.
            await self._charge.pay_off()
        await self._emit(error_event(error))

    # -- to the client ------------------------------------------------------------------------------------------------

    async def _emit(self, data: bytes) -> None:
        await self._write(frame(Opcode.TEXT, data))

    async def _write(self, data: bytes) -> None:
        self._connection["write"](data)
        await self._connection["drain"]()

    async def _ping(self) -> None:
        """Send pings, so that proxies keep the connection open, until the client gives no sign of life."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            if self._num_silent == MOST_SILENT_PINGS:
                break
            self._num_silent += 1
            await self._write(frame(Opcode.PING, b""))
        self._scope["extensions"][CONNECTION]["cut"]()
