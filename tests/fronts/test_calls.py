"""Requests that a front process passes on: their bodies, answers and ends are those of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from oaiserve.fronts.calls import AnsweredCalls, PassedCalls
from oaiserve.fronts.messages import FromFront, ToFront
from oaiserve.http.connections import CONNECTION
from oaiserve.process.plain_data import decoder, encode


class Client:
    """A client of a front process, whose requests `app` answers in another one."""

    def __init__(self, app: Any, *parts: bytes) -> None:
        loop = asyncio.get_running_loop()

        def to_main(message: object) -> None:
            loop.call_soon(lambda: self.main.received(decoder(FromFront)(encode(message))))

        def to_front(message: object) -> None:
            loop.call_soon(lambda: front.received(decoder(ToFront)(encode(message))))

        front = PassedCalls(to_main)
        self.main = AnsweredCalls(app, to_front, lambda client, cpu_ns: 0)
        self.has_left = asyncio.Event()
        self.is_cut = self.awaits_body = False
        self.sent: list[Message] = []
        self._parts = [*parts]
        self.reads: Callable[[], Any] = lambda: asyncio.sleep(0)
        connection = {"cut": lambda: setattr(self, "is_cut", True), "awaits_body": lambda: self.awaits_body}
        scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/a",
        }
        scope |= {"raw_path": b"/a", "query_string": b"b=c", "headers": [(b"x", b"y")], "client": ("10.0.0.1", 5)}
        scope |= {"server": ("here", 80), "extensions": {CONNECTION: connection}}
        self.task = asyncio.create_task(front(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reads()
        self.sent.append(message)


def start(status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"k", b"v")]}


def part(body: bytes, *, more_body: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


async def test_the_main_process_sees_the_request_and_the_client_its_answer(world: Any) -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append({name: scope[name] for name in ("method", "path", "query_string", "client", "state")})
        while (message := await receive())["more_body"]:
            seen.append(message["body"])
        seen.append(message["body"])
        await send(start())
        await send(part(b"one"))
        await send(part(b"two", more_body=False))

    client = Client(app, b"first", b"second")
    await client.task
    assert seen[0] == {"method": "POST", "path": "/a", "query_string": b"b=c", "client": ("10.0.0.1", 5), "state": {}}
    assert seen[1:] == [b"first", b"second"]
    assert client.sent == [start(), part(b"one"), part(b"two", more_body=False)]


async def test_an_answer_waits_for_a_slow_client(world: Any) -> None:
    num_sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_sent
        await send(start())
        for _ in range(5):
            await send(part(b"x"))
            num_sent += 1

    client = Client(app)
    may_read = asyncio.Semaphore(3)
    client.reads = may_read.acquire
    await asyncio.sleep(1)
    assert num_sent == 2
    for _ in range(5):
        may_read.release()
    await client.task
    assert num_sent == 5


async def test_a_client_that_leaves_is_seen_and_gets_no_more(world: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        assert (await receive())["type"] == "http.disconnect"
        assert (await receive())["type"] == "http.disconnect"
        await send(part(b"nobody reads this"))

    client = Client(app)
    await asyncio.sleep(1)
    client.has_left.set()
    await client.task
    assert client.sent == [start()]


async def test_an_answer_that_the_shutdown_cancels_still_says_so(world: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await send(start(503))
            await send(part(b"shutting down", more_body=False))

    client = Client(app)
    await asyncio.sleep(1)
    client.task.cancel()
    await client.task
    assert [message.get("status") for message in client.sent] == [503, None]


async def test_an_answer_that_fails_ends_the_connection(world: Any, caplog: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        raise ValueError("broken")

    client = Client(app)
    with pytest.raises(RuntimeError):
        await client.task
    assert "broken" in caplog.text


async def test_a_route_can_cut_the_connection_and_an_unread_body_closes_it(world: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(400))
        scope["extensions"][CONNECTION]["cut"]()

    client = Client(app, b"unread")
    client.awaits_body = True
    await client.task
    assert client.is_cut
    assert client.sent[0]["headers"] == [(b"k", b"v"), (b"connection", b"close")]


async def test_when_the_front_process_ends_its_requests_end(world: Any) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((await receive())["type"])
        await send(start())
        seen.append("ended")

    client = Client(app)
    await asyncio.sleep(1)
    client.main.end()
    await asyncio.sleep(1)
    assert seen == ["http.disconnect", "ended"]
    client.task.cancel()
    await asyncio.sleep(0)
    client.task.cancel()
