"""A small model that gets arguments wrong when it is free to, and right where its tools are strict: on all routes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.e2e.live import LiveServer, serve_process

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z]+, [A-Z]{2}$"},
        "unit": {"type": "string", "enum": ["celsius_c", "fahrenheit_f"]},
        "days": {"type": "integer", "minimum": 3, "maximum": 5},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
PROMPTS = ("What is the weather in Paris?", "Weather in Rome in fahrenheit for 2 days?", "Weather in Oslo, please.")
ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def server(qwen_05b: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log_file = tmp_path_factory.mktemp("strict") / "log"
    with serve_process(str(qwen_05b), log_file, "--served-model-name", "coder") as server:
        yield server


def body_of(route: str, prompt: str, *, strict: bool) -> dict[str, Any]:
    about = {"name": "get_weather", "description": "Weather of a city.", "strict": strict}
    message = [{"role": "user", "content": prompt}]
    if route == "/v1/responses":
        tools: Any = [{"type": "function", **about, "parameters": SCHEMA}]
        return {"input": prompt, "max_output_tokens": 200, "tools": tools}
    if route == "/v1/messages":
        return {"model": "coder", "messages": message, "max_tokens": 200, "tools": [{**about, "input_schema": SCHEMA}]}
    tools = [{"type": "function", "function": {**about, "parameters": SCHEMA}}]
    return {"messages": message, "max_tokens": 200, "tools": tools}


def arguments_in(route: str, answer: Any) -> list[Any]:
    """Return the arguments of the calls in a whole answer."""
    if route == "/v1/responses":
        return [json.loads(item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    if route == "/v1/messages":
        return [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    return [json.loads(call["function"]["arguments"]) for call in calls]


def arguments_streamed(route: str, events: list[Any]) -> list[Any]:
    if route == "/v1/responses":
        return arguments_in(route, events[-1]["response"])
    if route == "/v1/messages":
        pieces = [event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", {})]
    else:
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        pieces = [call.get("arguments", "") for call in calls]
    return [json.loads("".join(pieces))] if pieces else []


def asked(server: LiveServer, route: str, *, strict: bool, stream: bool) -> list[Any]:
    results: list[Any] = []
    for prompt in PROMPTS:
        body = {**body_of(route, prompt, strict=strict), "temperature": 0, "stream": stream}
        response = server.post(route, **body)
        assert response.status_code == 200, response.text
        if stream:
            lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
            results += arguments_streamed(route, [json.loads(line) for line in lines])
        else:
            results += arguments_in(route, response.json())
    return results


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
def test_arguments_of_a_strict_tool_obey_its_schema(server: LiveServer, route: str, *, stream: bool) -> None:
    result = asked(server, route, strict=True, stream=stream)
    assert len(result) == len(PROMPTS)
    for arguments in result:
        jsonschema.validate(arguments, SCHEMA)


def test_the_same_model_disobeys_where_the_tool_is_not_strict(server: LiveServer) -> None:
    result = asked(server, ROUTES[0], strict=False, stream=False)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    assert any(not validator.is_valid(arguments) for arguments in result)
