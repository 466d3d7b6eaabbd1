"""Two models whose engine processes are killed, in a world: a stream goes on, and the other model goes on meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from oaiserve.app import create_app
from oaiserve.config import Config, EngineOptions
from oaiserve.plugin_loading import own_plugins
from oaiserve.plugins.gateway.options import ModelsOptions
from oaiserve.plugins.gateway.several.app import create_front
from oaiserve.plugins.gateway.several.loaded import LoadedModel
from oaiserve.plugins.gateway.several.settings import models_of
from oaiserve.runtime import Runtime
from tests.plugins.gateway.doubles import OPTIONS
from tests.process.worlds import Processes
from tests.routes.doubles import FakeTelemetry
from tests.world.serving import Place, PlacedServer

BODY = {"prompt": "abcd", "max_tokens": 40, "temperature": 1, "seed": 7, "stream": True, "ignore_eos": True}


@contextmanager
def two_models(place: Place) -> Iterator[tuple[httpx.Client, dict[str, Processes]]]:
    """Serve the models a and b, and yield a client and their engine processes."""
    processes = {name: Processes(place.world, kv_blocks=200, max_running=8) for name in "ab"}
    engines = {name: each.front() for name, each in processes.items()}
    plugins = [plugin for plugin in own_plugins() if not plugin.inner.is_in_front]

    async def load(config: Config, front: Starlette, runtime: Runtime) -> LoadedModel:
        engine = engines[config.model_name]
        telemetry: Any = FakeTelemetry(place.world)
        app = create_app(config, engine, telemetry, plugins=plugins, front=front, runtime=runtime)
        loaded = LoadedModel(app, engine, lambda: 1)
        await loaded.begin()
        return loaded

    config = Config("models", OPTIONS, EngineOptions(block_size=4), of_plugins=(ModelsOptions(),))
    configs = models_of(["a=demo", "b=demo"], {}, config)
    app, front, _ = create_front(config, configs, runtime=place.world, load_model=load)
    with PlacedServer(place, app, config.server, on_drain=front.drain) as server, place.plain(server.url) as http:
        yield http, processes


def text_of(http: httpx.Client, model: str, after_parts: Callable[[int], object] = lambda number: None) -> str:
    """Return the text of a streamed answer. `after_parts` is called with the number of parts after each of them."""
    texts: list[str] = []
    with http.stream("POST", "/v1/completions", json={**BODY, "model": model}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                after_parts(len(texts))
    return "".join(texts)


@pytest.mark.parametrize("end", ["die", "hang"])
def test_stream_goes_on_with_the_same_bytes_when_the_process_of_its_model_ends(place: Place, end: str) -> None:
    with two_models(place) as (http, processes):
        undisturbed = {model: text_of(http, model) for model in "ab"}

        def end_at(number: int) -> None:
            if number == 5:
                getattr(processes["a"].now, end)()
                assert text_of(http, "b") == undisturbed["b"], "the other model goes on meanwhile"

        assert text_of(http, "a", end_at) == undisturbed["a"]
        assert {model: len(each.all) for model, each in processes.items()} == {"a": 2, "b": 1}
