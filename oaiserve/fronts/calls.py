"""Passes requests from a front process to the main process as ASGI messages. Everything here runs on event loops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oaiserve.fronts import messages
from oaiserve.fronts.messages import Call, CallEnded, Cancel, Cut, OfCall, Received, Sent, Taken, ToCall
from oaiserve.http.connections import CONNECTION, UPGRADE

log = logging.getLogger(__name__)

_COPIED = ("http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server")
_LEFT: Message = {"type": "http.disconnect"}

Pass = Callable[[object], None]  # sends a message to the other process


class PassedCalls:
    """An ASGI app that passes its requests to the main process, which answers them."""

    def __init__(self, pass_on: Pass) -> None:
        self._pass_on = pass_on
        self._numbers = count()
        self._inboxes: dict[int, asyncio.Queue[ToCall]] = {}

    def received(self, message: ToCall) -> None:
        if (inbox := self._inboxes.get(message.number)) is not None:
            inbox.put_nowait(message)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = next(self._numbers)
        inbox = self._inboxes[number] = asyncio.Queue()
        upgrade = scope["extensions"].get(UPGRADE, {}).get("protocol", "")
        self._pass_on(Call(number=number, upgrade=upgrade, **{name: scope[name] for name in _COPIED}))
        reading: list[asyncio.Task[None]] = []
        is_cancelled = False
        try:
            while True:
                try:
                    match await inbox.get():
                        case messages.Receive():
                            reading = [asyncio.create_task(self._read(number, receive))]
                        case Sent() as part:
                            await send(_message_of(part, scope))
                            self._pass_on(Taken(number))
                        case Cut():
                            scope["extensions"][CONNECTION]["cut"]()
                        case CallEnded(is_broken=is_broken):
                            if is_broken:
                                raise RuntimeError("The main process has failed to answer a request.")
                            return
                except asyncio.CancelledError:  # The server is shutting down. The route reports that to the client.
                    if is_cancelled:
                        raise
                    is_cancelled = True
                    self._pass_on(Cancel(number))
        finally:
            del self._inboxes[number]
            for task in reading:
                task.cancel()

    async def _read(self, number: int, receive: Receive) -> None:
        message = await receive()
        has_left = message["type"] == "http.disconnect"
        self._pass_on(Received(number, message.get("body", b""), message.get("more_body", False), has_left))


def _message_of(part: Sent, scope: Scope) -> Message:
    if not part.status:
        return {"type": "http.response.body", "body": part.body, "more_body": part.more_body}
    headers = part.headers
    if scope["extensions"][CONNECTION]["awaits_body"]():
        headers.append((b"connection", b"close"))  # Otherwise, the rest of the body would have to be read.
    return {"type": "http.response.start", "status": part.status, "headers": headers}


class AnsweredCalls:
    """The requests that a front process has passed on. An ASGI app answers them."""

    def __init__(self, app: ASGIApp, pass_on: Pass, charge: Callable[[bytes, int], int]) -> None:
        """`charge` is the function of that name in the `CONNECTION` extension."""
        self._app = app
        self._pass_on = pass_on
        self._charge = charge
        self._calls: dict[int, _Call] = {}

    def received(self, message: OfCall) -> None:
        if isinstance(message, Call):
            call = self._calls[message.number] = _Call(message.number, self._pass_on)
            call.task = asyncio.create_task(self._answer(call, message))
        elif (known := self._calls.get(message.number)) is not None:
            known.received(message)

    def end(self) -> None:
        """Treat all clients as disconnected, because the front process has ended."""
        for call in self._calls.values():
            call.leave()

    async def _answer(self, call: _Call, begun: Call) -> None:
        number = call.number
        connection = {
            "cut": lambda: self._pass_on(Cut(number)),
            "awaits_body": lambda: False,  # The front process checks this itself.
            "charge": self._charge,
        }
        scope: dict[str, Any] = {name: getattr(begun, name) for name in _COPIED}
        extensions: dict[str, Any] = {CONNECTION: connection}
        if begun.upgrade:
            extensions[UPGRADE] = {"protocol": begun.upgrade}
        scope |= {"type": "http", "root_path": "", "extensions": extensions, "state": {}}
        is_broken = True
        try:
            await self._app(scope, call.receive, call.send)
            is_broken = False
        except Exception:
            log.exception("A request could not be answered")
        finally:
            del self._calls[number]
            self._pass_on(CallEnded(number, is_broken))


class _Call:
    """A request that is being answered."""

    def __init__(self, number: int, pass_on: Pass) -> None:
        self.number = number
        self.task: asyncio.Task[None]
        self._pass_on = pass_on
        self._is_asked = False  # The next part of the body has been requested.
        self._has_left = False
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._taken: asyncio.Future[None] | None = None

    async def receive(self) -> Message:
        if not (self._is_asked or self._has_left):
            self._is_asked = True
            self._pass_on(messages.Receive(self.number))
        message = await self._inbox.get()
        if message is _LEFT:
            self._inbox.put_nowait(message)  # for the next caller
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer, and wait until the client has room for the next one."""
        if self._has_left:
            return
        body = bytes(message.get("body", b""))
        headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
        self._taken = asyncio.get_running_loop().create_future()
        self._pass_on(Sent(self.number, message.get("status", 0), headers, body, message.get("more_body", False)))
        await self._taken

    def received(self, message: Received | Taken | Cancel) -> None:
        match message:
            case Received(has_left=True):
                self.leave()
            case Received(_, body, more_body):
                self._is_asked = False
                self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": more_body})
            case Taken():
                self._sent()
            case Cancel():
                self.task.cancel()

    def leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._inbox.put_nowait(_LEFT)
            self._sent()

    def _sent(self) -> None:
        if self._taken is not None:
            with suppress(asyncio.InvalidStateError):
                self._taken.set_result(None)
