"""What tests of /v1/messages ask, and how they read its streams."""

import json
from typing import Any

from tests.routes.asking import HI, MESSAGES, PARAMETERS, answered
from tests.serving import Served

COUNT = f"{MESSAGES}/count_tokens"
TIME = {"name": "get_time", "description": "The time.", "input_schema": PARAMETERS}
STOP = {"name": "stop", "type": "custom", "input_schema": {"type": "object", "properties": {}}}
TOOLS = [TIME, STOP]
USE = {"type": "tool_use", "name": "get_time", "input": {"zone": "utc"}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def tool(name: str) -> dict[str, str]:
    return {"type": "tool", "name": name}


def ask(served: Served, **body: Any) -> dict[str, Any]:
    return answered(served.post(MESSAGES, **{"model": "org/demo", "messages": HI, "max_tokens": 64, **body}))


def streamed(served: Served, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, except pings."""
    response = served.post(MESSAGES, **{"model": "org/demo", "messages": HI, "max_tokens": 64, "stream": True, **body})
    assert response.status_code == 200, response.text
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    named = [block.split("\n") for block in blocks]
    events = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name for name, _ in named] == [f"event: {event['type']}" for event in events]
    return [event for event in events if event["type"] != "ping"]
