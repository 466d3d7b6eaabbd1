"""The load of a model: what becomes of its process if it fails or is cancelled. The processes are doubles."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette

from oaiserve.config import Config
from oaiserve.errors import StartupError
from oaiserve.plugins.gateway.several import loaded
from oaiserve.plugins.gateway.several.loaded import load
from tests.world.loop import World

FRONT = Starlette()


class Process:
    pid = 0

    def __init__(self) -> None:
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True


class Engine:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def drain(self) -> None:
        self.calls.append("drain")

    def stop(self) -> None:
        self.calls.append("stop")


def loads_by(monkeypatch: pytest.MonkeyPatch, load_behind: Callable[..., Any]) -> None:
    monkeypatch.setattr(loaded, "load_behind", load_behind)


async def test_error_of_a_library_is_a_failed_load(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load_behind(*_: Any) -> Any:
        raise ValueError("no such tensor")

    loads_by(monkeypatch, load_behind)
    with pytest.raises(StartupError, match="ValueError: no such tensor"):
        await load(Config("a"), FRONT, world)
    assert "The model a cannot be loaded" in caplog.text


async def test_cancelled_load_kills_its_process_and_stops_an_engine_that_is_there_already(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process()
    engine = Engine()

    def load_behind(config: Config, front: Starlette, launched: Callable[[Process], None]) -> Any:
        launched(process)
        return Starlette(), engine

    loads_by(monkeypatch, load_behind)
    loading = asyncio.create_task(load(Config("a"), FRONT, world))
    await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert process.is_killed
    assert engine.calls == ["stop"]


async def test_model_whose_plugin_fails_to_start_leaves_no_engine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        raise RuntimeError("no port is free")
        yield

    engine = Engine()
    loads_by(monkeypatch, lambda *_: (Starlette(lifespan=lifespan), engine))
    with pytest.raises(StartupError, match="RuntimeError: no port is free"):
        await load(Config("a"), FRONT, world)
    assert engine.calls[-1] == "stop"


async def test_model_that_ends_leaves_its_lifespan(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        events.append("begin")
        yield
        events.append("end")

    engine = Engine()
    loads_by(monkeypatch, lambda *_: (Starlette(lifespan=lifespan), engine))
    model = await load(Config("a"), FRONT, world)
    assert (events, model.has_ended.is_set()) == (["begin"], False)
    await model.end()
    assert (events, model.has_ended.is_set(), engine.calls) == (["begin", "end"], True, ["drain"])
