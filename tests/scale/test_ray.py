"""What replicas under Ray are made of, as far as it needs no Ray: settings, and the edge of the app."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send

from oaiserve.config import Bytes, OptionError
from oaiserve.facts.report import ReplicaReport, Report
from oaiserve.scale.on_ray.edge import Edge
from oaiserve.scale.on_ray.settings import config_of

NAME = "10.0.0.5:8000"


def test_texts_and_typed_values_give_the_same_settings() -> None:
    typed: dict[str, Any] = {
        "model": "demo",
        "max_running": 8,
        "prefix_cache": False,
        "kv_cache_memory": "1GiB",
        "chat_template": "chat.jinja",
        "api_key": ["a", "b"],
        "queue_timeout_seconds": 1.5,
        "generation_config": False,
    }
    texts = {name.replace("_", "-"): value if isinstance(value, list) else str(value) for name, value in typed.items()}
    config = config_of(typed)
    assert config == config_of(texts)
    assert (config.model, config.engine.max_running, config.engine.prefix_cache) == ("demo", 8, False)
    assert config.engine.kv_cache_memory == Bytes("1GiB")
    assert config.engine.chat_template == Path("chat.jinja")
    assert config.server.api_key == ("a", "b")
    assert not config.engine.generation_config
    assert config_of({"model": "demo", "api-key": "secret"}).server.api_key == ("secret",)
    assert not config_of({"model": "demo"}).server.is_private


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "'model' is missing"),
        ({"model": "demo", "port": 80}, "'port' is not a setting of a replica"),
        ({"model": "demo", "max_runing": 4}, "Did you mean --max-running?"),
        ({"model": "demo", "max_running": "many"}, 'unable to convert "many" into int'),
        ({"model": "demo", "max_running": 0}, "--max-running is 0"),
        ({"model": "demo", "policy": "best"}, 'Choose from: "fair"'),
    ],
)
def test_wrong_settings_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("?", r"\?")):
        config_of(args)


def test_a_report_arrives_as_it_was_sent() -> None:
    report = ReplicaReport(NAME, "abc", 7, 2.5, 120.0, array("Q", [1, 2**64 - 1]))
    sent = msgspec.msgpack.encode(Report.of(report, is_ready=True, is_hung=False, models=()))
    assert msgspec.msgpack.decode(sent, type=Report).of_replica(NAME) == report


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


async def test_a_request_that_ray_cancels_is_one_whose_client_left() -> None:
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
    assert app.seen == ["http.disconnect", "http.disconnect", "ended"]


async def test_an_error_of_the_app_reaches_ray() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await Edge(fails)(scope_with(), never, ignore)


@pytest.mark.parametrize(("own", "kept"), [(b"abc", []), (b"req-1", [(b"x-request-id", b"req-1")])])
async def test_the_id_that_ray_adds_is_not_there_twice(own: bytes, kept: list[tuple[bytes, bytes]]) -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "headers": [(b"a", b"b"), (b"x-request-id", own)]})

    async def keep(message: Message) -> None:
        sent.append(message)

    await Edge(app)(scope_with((b"x-request-id", b"abc")), never, keep)
    assert sent[0]["headers"] == [(b"a", b"b"), *kept]
