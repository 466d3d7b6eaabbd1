"""A server with a small real model in this process, and an agent that asks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from oaiserve.app import create_app, server_telemetry
from oaiserve.config import Config, EngineOptions, ServerOptions
from oaiserve.engine.engine import Engine
from oaiserve.plugin_loading import own_plugins
from oaiserve.plugins import runs
from oaiserve.runtime import Runtime
from tests.waiting import wait_until

OPTIONS = EngineOptions(device="cpu", compile=False, kv_blocks=256)
QUESTION = {"role": "user", "content": "Which files are there, and how large are they?"}
LONG = {"role": "user", "content": 20 * QUESTION["content"]}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call", "type": "function", "function": {"name": "ls", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "call", "content": "a.txt 12 bytes"}


def app_of(model: Path, server: ServerOptions, runtime: Runtime) -> Starlette:
    config = Config(str(model), server, OPTIONS)
    engine = Engine.from_pretrained(config.model, OPTIONS, runtime=runtime)
    plugins = [runs.plugin({}, runtime) if part.name == "runs" else part for part in own_plugins()]
    telemetry = server_telemetry(config, engine, None, None, plugins, runtime=runtime)
    return create_app(config, engine, telemetry, plugins=plugins, runtime=runtime)


def chat(client: httpx.Client, request_id: str, *messages: dict[str, Any], **headers: str) -> None:
    body = {"model": "small", "max_tokens": 4, "messages": messages}
    sent = {"x-request-id": request_id} | {name.replace("_", "-"): value for name, value in headers.items()}
    response = client.post("/v1/chat/completions", json=body, headers=sent)
    assert response.status_code == 200, response.text
    wait_until(lambda: client.get(f"/debug/requests?id={request_id}").json()["requests"])
