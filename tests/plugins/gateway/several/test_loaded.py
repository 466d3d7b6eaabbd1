"""The load of a model: what becomes of its process if it fails or is cancelled. The processes are doubles."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette

from oaiserve.config import Config, EngineOptions, ServerOptions
from oaiserve.errors import StartupError
from oaiserve.plugins.gateway.several import loaded
from oaiserve.plugins.gateway.several.loaded import _num_bytes, load
from oaiserve.run import load_behind
from tests.world.loop import World

FRONT = Starlette()


class Process:
    pid = 0
    is_alive = True

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


def test_model_with_replicas_has_an_engine_process_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(launches: list[Callable[[], Any]], *_: Any, **__: Any) -> Any:
        for launch in launches:
            launch()
        raise StartupError("This is a double.")

    monkeypatch.setattr("oaiserve.process.remote_engine.RemoteEngine", engine)
    monkeypatch.setattr("oaiserve.process.child.ChildProcess", lambda start, *_: start)
    config = Config("demo", ServerOptions(replicas=2), EngineOptions(device="cpu", cpu_threads=4))
    started: list[Any] = []
    with pytest.raises(StartupError, match="a double"):
        load_behind(config, FRONT, started.append)
    names = [start.replica for start in started]
    assert names == [f"{config.model_name} replica 0", f"{config.model_name} replica 1"]
    assert [start.options.cpu_threads for start in started] == [2, 2]


def test_memory_is_that_of_all_processes_that_have_not_ended() -> None:
    processes = [Process(), Process(), Process()]
    processes[0].is_alive = False
    processes[1].pid = processes[2].pid = os.getpid()
    both = _num_bytes([*processes])
    assert both > 1.5 * _num_bytes([*processes[:2]]) > 0
    with pytest.raises(ProcessLookupError):
        _num_bytes([*processes[:1]])


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
