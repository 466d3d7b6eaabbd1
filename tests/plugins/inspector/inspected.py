"""Servers in this process with a small real model, with and without the inspector."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from oaiserve.app import create_app, server_telemetry
from oaiserve.config import Config, EngineOptions, ServerOptions
from oaiserve.engine.engine import Engine
from oaiserve.plugin_loading import own_plugins, ways_of
from oaiserve.plugins.inspector.options import InspectorOptions
from tests.waiting import wait_until
from tests.world.serving import Place

TEXTS = ("content", "text", "arguments", "partial_json", "token", "logprob", "bytes", "token_ids")
OPTIONS = EngineOptions(device="cpu", compile=False, kv_blocks=256)


@contextmanager
def served(
    place: Place, model: Path, *, inspect: int, server: ServerOptions | None = None, **engine_options: Any
) -> Iterator[httpx.Client]:
    """Serve a model, and give a client of the server. `engine_options` are fields of EngineOptions."""
    options = replace(OPTIONS, **engine_options)
    config = Config(
        str(model),
        server or ServerOptions(served_model_name=("small",)),
        options,
        of_plugins=(InspectorOptions(inspect=inspect),),
    )
    plugins = own_plugins()
    world = place.world
    engine = Engine.from_pretrained(config.model, options, ways=partial(ways_of, plugins), runtime=world)
    telemetry = server_telemetry(config, engine, None, None, plugins, runtime=world)
    app = create_app(config, engine, telemetry, plugins=plugins, runtime=world)
    with place.running(app) as url, place.plain(url) as client:
        yield client


def content_of(response: httpx.Response) -> Any:
    """Return the content of an answer without its ids and times.

    The texts of a stream's events are joined: while the event loop is busy, tokens gather and come in one event.
    """
    text = re.sub(r"(_|-)[0-9a-f]{32}", r"\1ID", response.text)
    text = re.sub(r'"(created|created_at|completed_at)":[0-9.]+', r'"\1":0', text)
    if not response.headers["content-type"].startswith("text/event-stream"):
        return text
    data = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {"))
    parts = defaultdict(list)
    for event in map(json.loads, data):
        for path, value in _leaves(event):
            parts[path].append(value)
    # Ids and the like are in each event, texts in pieces.
    return {path: "".join(map(str, values)) if path[-1] in TEXTS else {*values} for path, values in parts.items()}


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each value of an event with its path, in which a choice is known by its index."""
    if isinstance(value, dict):
        number = value.get("index", "")
        for name, each in value.items():
            yield from _leaves(each, (*path, number, name))
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each, path)
    else:
        yield path, value


def tokens_of(client: httpx.Client, request_id: str, **query: Any) -> dict[str, Any]:
    """Return the tokens of a request, when its account is written, which says with which prompt it was compared."""
    wait_until(lambda: "outcome" in client.get(f"/debug/requests/{request_id}").json())
    response = client.get(f"/debug/requests/{request_id}/tokens", params=query)
    assert response.status_code == 200, response.text
    return response.json()
