"""GET /v1/responses as a WebSocket: responses one after the other, or side by side in lanes, on one connection.

Each `response.create` is a request to POST /v1/responses of the same server, or of a gateway, with the headers of the
handshake. So keys, limits, accounts, metrics and errors are those of any request.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from oaiserve.config import Config
from oaiserve.errors import APIError, InvalidRequest, MethodNotAllowed, Overloaded
from oaiserve.http.connections import CONNECTION, UPGRADE
from oaiserve.http.shared_limit import SharedLimit
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
from oaiserve.plugins.responses.socket_lanes import Lanes
from oaiserve.plugins.responses.socket_messages import error_event
from oaiserve.routes.intake.receive import HeldBytes
from oaiserve.routes.intake.turns import client_left
from oaiserve.routes.serving import MEDIA_BODY_BYTES, MOST_RECEIVED_BYTES

PING_SECONDS = 20.0
MOST_SILENT_PINGS = 3  # A client that answers none of these is gone.
MOST_UNREAD_BYTES = 64 * 1024  # of frames; beyond that, the connection is not read
FRAMES_AT_ONCE = 64  # before other connections have a turn


def socket_route(path: str, config: Config) -> Route:
    """Return the route of sockets. All of them together may hold as many unread bytes as bodies may."""
    received = SharedLimit(MOST_RECEIVED_BYTES)
    limit_bytes = config.server.body_limit or MEDIA_BODY_BYTES

    async def connect(request: Request) -> Socket:
        upgrade = request.scope.get("extensions", {}).get(UPGRADE)
        if upgrade is None or upgrade["protocol"] != "websocket":
            raise MethodNotAllowed(f"GET is not allowed on {path}, which takes POST, or a WebSocket.")
        key = request.headers.get("sec-websocket-key", "")
        version = request.headers.get("sec-websocket-version", "")
        if not key or version != VERSION:
            raise InvalidRequest(f"A WebSocket needs the header Sec-WebSocket-Key, and the version {VERSION}.")
        return Socket(key, HeldBytes(received, request.state.client), limit_bytes)

    return Route(path, connect, methods=["GET"])


class Socket:
    """One connection, as an ASGI response to its handshake."""

    def __init__(self, key: str, held: HeldBytes, limit_bytes: int) -> None:
        self._key = key
        self._held = held
        self._limit_bytes = limit_bytes
        self._incoming = bytearray()
        self._has_data = asyncio.Event()
        self._frames = Reader()
        self._message = bytearray()
        self._num_silent = 0  # pings since the client's last sign of life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._connection: dict[str, Any] = scope["extensions"][UPGRADE]
        self._lanes = Lanes(scope, self._held, self._emit)
        self._connection["take"](self._take_data, self._lanes.drain)
        accept = accept_value(self._key).encode()
        headers = [(b"upgrade", b"websocket"), (b"connection", b"Upgrade"), (b"sec-websocket-accept", accept)]
        await send({"type": "http.response.start", "status": 101, "headers": headers})
        with self._held:
            await self._serve(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _serve(self, receive: Receive) -> None:
        """Serve until the client leaves or breaks the protocol, or until the server ends."""
        reading = asyncio.create_task(self._read())
        waiting: set[asyncio.Task[Any]] = {
            reading,
            asyncio.create_task(client_left(receive)),
            asyncio.create_task(self._ping()),
            asyncio.create_task(self._lanes.drained.wait()),
        }
        last = close_frame(CloseCode.GOING_AWAY, "the server is shutting down")
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            self._lanes.leave()
            if reading.done():
                last = reading.result()
        except asyncio.CancelledError:  # The time for a shutdown is over.
            self._lanes.cancel()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, *self._lanes.tasks, return_exceptions=True)
            self._connection["write"](last)

    # -- from the client ----------------------------------------------------------------------------------------------

    def _take_data(self, data: bytes) -> None:
        self._incoming += data
        if len(self._incoming) > MOST_UNREAD_BYTES:
            self._connection["pause"]()
        self._has_data.set()

    async def _read(self) -> bytes:
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
                    await self._take_frame(event)
                    num_frames += 1
                    if num_frames % FRAMES_AT_ONCE == 0:
                        await asyncio.sleep(0)
                self._connection["resume"]()
        except Broken as broken:
            return close_frame(broken.code, broken.reason)

    async def _take_frame(self, event: Event) -> None:
        if event.opcode is Opcode.PING:
            await self._write(frame(Opcode.PONG, event.data))
        if event.opcode not in (Opcode.TEXT, Opcode.BINARY):
            return
        num_bytes = len(self._message) + len(event.data)
        if num_bytes > self._limit_bytes:
            raise Broken(CloseCode.TOO_LARGE, f"a message has at most {self._limit_bytes} bytes")
        try:
            self._held.take(len(event.data))
        except Overloaded:
            raise Broken(CloseCode.TRY_AGAIN_LATER, "the server is receiving too much already") from None
        self._message += event.data
        if not event.is_last:
            return
        message = bytes(self._message)
        self._message = bytearray()
        try:
            await self._lanes.take(message)
        except APIError as error:
            await self._emit(error_event(error))
        finally:
            self._held.give_back(len(message))

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
