"""What tests of /v1/responses ask, and how they read its streams."""

import json
from typing import Any

import httpx

from tests.routes.asking import CHATML, PARAMETERS, RESPONSES, answered
from tests.serving import Served

WITH_CALLS = {"template": CHATML}
TIME = {"type": "function", "name": "get_time", "description": "The time.", "parameters": PARAMETERS, "strict": True}
STOP = {"type": "function", "name": "stop"}
TOOLS = [TIME, STOP]
LOGPROBS = ["message.output_text.logprobs"]


def ask(served: Served, **body: Any) -> dict[str, Any]:
    return answered(served.post(RESPONSES, **{"input": "Hi", **body}))


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, and check what holds for each of them."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1].pop("sequence_number") == number
    return events


def streamed(served: Served, **body: Any) -> list[dict[str, Any]]:
    return events_of(served.post(RESPONSES, **{"input": "Hi", "stream": True, **body}))
