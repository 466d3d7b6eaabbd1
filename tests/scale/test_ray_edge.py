"""Between Ray's HTTP server and the app: leaving is told as leaving, and ids are sent once."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from oaiserve.scale.on_ray.edge import Edge, Message, Receive, Send

Scope = MutableMapping[str, Any]


def scope_with(*headers: tuple[bytes, bytes]) -> Scope:
    return {"type": "http", "headers": list(headers)}


async def never() -> Message:
    return await asyncio.get_running_loop().create_future()


class App:
    """Answers when its client leaves, and keeps what it has seen."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.has_begun.set()
        try:
            self.seen.append((await receive())["type"])
            self.seen.append((await receive())["type"])
            await self.may_end.wait()
            self.seen.append("ended")
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise


async def ignore(message: Message) -> None:
    pass


def test_a_request_that_ray_cancels_is_one_whose_client_left() -> None:
    async def run() -> list[str]:
        app = App()
        request = asyncio.create_task(Edge(app)(scope_with(), never, ignore))
        await app.has_begun.wait()
        request.cancel()
        await asyncio.sleep(0)
        request.cancel()  # even twice
        with pytest.raises(asyncio.CancelledError):
            await request
        app.may_end.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return app.seen

    assert asyncio.run(run()) == ["http.disconnect", "http.disconnect", "ended"]


def test_an_error_of_the_app_reaches_ray() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(Edge(fails)(scope_with(), never, ignore))


@pytest.mark.parametrize(("own", "kept"), [(b"abc", []), (b"req-1", [(b"x-request-id", b"req-1")])])
def test_the_id_that_ray_adds_is_not_there_twice(own: bytes, kept: list[tuple[bytes, bytes]]) -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "headers": [(b"a", b"b"), (b"x-request-id", own)]})

    async def keep(message: Message) -> None:
        sent.append(message)

    asyncio.run(Edge(app)(scope_with((b"x-request-id", b"abc")), never, keep))
    assert sent[0]["headers"] == [(b"a", b"b"), *kept]
