"""Requests of the tests of Ollama's API, and how they read its streams."""

import json
from typing import Any

import httpx

from tests.routes.asking import HI, answered
from tests.serving import Served

CHAT = "/api/chat"
GENERATE = "/api/generate"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": HI}, GENERATE: {"prompt": "Hi"}}


def ask(served: Served, path: str = CHAT, **body: Any) -> Any:
    """Return a whole answer without its time and its durations, which differ each time."""
    answer = answered(served.post(path, **{"model": "org/demo", "stream": False, **BODIES[path], **body}))
    return checked(answer)


def checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Check the durations of a complete answer, and return the rest of it."""
    assert answer.pop("created_at").endswith("Z")
    names = [f"{name}_duration" for name in ("load", "prompt_eval", "eval", "total")]
    load, prompt_eval, evaluated, total = (answer.pop(name) for name in names)
    assert load == 0
    assert total >= prompt_eval + evaluated
    return answer


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert len(response.text.splitlines()) == response.text.count("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def streamed(served: Served, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    """Return the lines of a stream, the last of which is complete, without the time."""
    *lines, last = lines_of(served.post(path, **{"model": "org/demo", **BODIES[path], **body}))
    assert {line.pop("created_at") for line in lines} <= {last["created_at"]}
    assert not any(line.pop("done") for line in lines)
    return [*lines, checked(last)]


def gathered(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole answer that a client makes of a stream."""
    whole = dict(lines[-1])
    if "response" in whole:
        whole["response"] = "".join(line["response"] for line in lines)
        parts = [line["thinking"] for line in lines if "thinking" in line]
        return {**whole, **({"thinking": "".join(parts)} if parts else {})}
    messages = [line["message"] for line in lines]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(each["content"] for each in messages)}
    if thoughts := "".join(each.get("thinking", "") for each in messages):
        message["thinking"] = thoughts
    if calls := [call for each in messages for call in each.get("tool_calls", [])]:
        message["tool_calls"] = calls
    return {**whole, "message": message}
