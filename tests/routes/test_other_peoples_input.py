"""Input that clients pass on and did not write, as it was reported, and more of each kind: foreign histories, cut calls
and odd tools. What is asked for strictly is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.routes.adaptations import HEADER
from tests.published import checked
from tests.routes.asking import CHAT, HI, REQUIRED, RESPONSES, ROUTES, tool
from tests.routes.doubles import FakeTelemetry
from tests.routes.test_generated_histories import OBJECTS
from tests.serving import Served, run_server
from tools.attack.histories import EncodingEngine, encoding_engine
from tools.attack.history_bodies import SCHEMAS

Body = dict[str, Any]


@pytest.fixture(scope="module")
def reader() -> Iterator[Served]:
    """A server that renders, encodes and compiles, with a template that iterates over arguments."""
    engine = encoding_engine(OBJECTS)
    telemetry = FakeTelemetry()
    with (
        run_server(create_app(Config("demo", ServerOptions(drain_timeout_seconds=5)), engine, telemetry)) as url,
        checked(httpx.Client(base_url=url, timeout=60)) as http,
    ):
        yield Served(url, engine, telemetry, http)


def read(reader: Served, path: str, body: Body) -> tuple[str, str]:
    """Return the prompt of a request, and the header with what was adapted."""
    response = reader.http.post(path, json={"model": "demo", **body})
    assert response.status_code == 200, response.text
    assert isinstance(reader.engine, EncodingEngine)
    return reader.engine.prompt, response.headers.get(HEADER, "")


def asks(path: str, *history: Body, **fields: Any) -> Body:
    """Return a body that has this history, and then a question."""
    field, most = ("input", "max_output_tokens") if path == RESPONSES else ("messages", "max_tokens")
    return {field: [*history, {"role": "user", "content": "And now?"}], most: 16, **fields}


def called(path: str, arguments: Any) -> list[Body]:
    """Return a call with these arguments, as an API has it, and its result."""
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments}
        return [call, {"type": "function_call_output", "call_id": "c1", "output": "rainbow"}]
    function = {"name": "look", "arguments": arguments}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    return [call, {"role": "tool", "tool_call_id": "c1", "content": "rainbow"}]


GOOD = ['{"city": "Paris"}', "{}", '{"a": {"b": [1, null, true]}}', ' {"city": "Paris"}\n']
BROKEN = [
    *('{"city": "Par', '{"text": "', '{"city": "Paris"', '{"a": [1, ', "{", "null", "[]", '"x"', "1", "true", "none"),
    *("{'city': 'Paris'}", '{"a": 1,}', '{"a": 1}{"b": 2}', '```json\n{"a": 1}\n```', 'look(city="Paris")'),
    *('"{\\"city\\": \\"Paris\\"}"', '{"a": NaN}', '{"a": "\\ud83d"}', "[" * 3000, '{"a":' * 3000, "\0", "[1, 2]"),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("arguments", [*GOOD, *BROKEN, ""], ids=lambda text: ascii(text[:24]))
def test_history_with_any_arguments_is_read(reader: Served, path: str, arguments: str) -> None:
    prompt, adapted = read(reader, path, asks(path, {"role": "user", "content": "Hi"}, *called(path, arguments)))
    assert "rainbow" in prompt
    assert "<tool_call>look" in prompt
    assert bool(adapted) == (arguments in BROKEN)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("half", [r"\ud83d", r"\ud83d\ud83d", r"\ude00", r"\ud83d and more"], ids=str)
def test_half_an_emoji_in_a_history_is_replaced(reader: Served, path: str, half: str) -> None:
    whole = r"\ud83d\ude00"
    history = {"role": "user", "content": "zebra CUT WHOLE"}
    body = json.dumps({"model": "demo", **asks(path, history)}).replace("CUT", half).replace("WHOLE", whole)
    response = reader.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    assert isinstance(reader.engine, EncodingEngine)
    assert "zebra \ufffd" in reader.engine.prompt
    assert "\U0001f600" in reader.engine.prompt
    assert response.headers[HEADER] == "the body: halves of surrogate pairs are read as U+FFFD"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/responses/input_tokens", "input"),
        ("/v1/conversations", "items"),
        ("/v1/conversations/ID/items", "items"),
        ("/tokenize", "messages"),
    ],
)
def test_half_an_emoji_is_replaced_wherever_a_history_is_read(reader: Served, path: str, field: str) -> None:
    name = reader.http.post("/v1/conversations", json={}).json()["id"] if "ID" in path else ""
    body = json.dumps({"model": "demo", field: [{"role": "user", "content": "zebra \ud83d"}]})
    response = reader.http.post(path.replace("ID", name), content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "the body: halves of surrogate pairs are read as U+FFFD"


HOSTED: dict[str, Body] = {
    "local shell": {"type": "local_shell_call_output", "id": "s1", "output": "zebra"},
    "shell": {
        "type": "shell_call_output",
        "call_id": "s1",
        "output": [{"stdout": "zebra", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    "patch": {"type": "apply_patch_call_output", "call_id": "s1", "status": "failed", "output": "zebra"},
    "MCP error": {"type": "mcp_call", "id": "m1", "server_label": "s", "name": "f", "arguments": "", "error": "zebra"},
    "future": {"type": "hologram_output", "id": "h1", "content": [{"type": "hologram", "text": "zebra"}]},
    "program": {"type": "program_output", "id": "p1", "call_id": "p0", "result": "zebra", "status": "completed"},
    "custom": {"type": "custom_tool_call_output", "call_id": "nobody", "output": "zebra"},
}


@pytest.mark.plugin("responses")
@pytest.mark.parametrize("kind", HOSTED)
def test_output_of_any_item_is_read(reader: Served, kind: str) -> None:
    assert "zebra" in read(reader, RESPONSES, asks(RESPONSES, HOSTED[kind]))[0]


SILENT: dict[str, Body] = {
    "shell call": {"type": "shell_call", "call_id": "s1", "action": {"commands": ["ls"]}},
    "patch": {
        "type": "apply_patch_call",
        "call_id": "s1",
        "status": "completed",
        "operation": {"type": "delete_file", "path": "a"},
    },
    "screenshot": {
        "type": "computer_call_output",
        "call_id": "s1",
        "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"},
    },
    "future": {"type": "hologram", "id": "h1"},
}


@pytest.mark.plugin("responses")
@pytest.mark.parametrize("kind", SILENT)
def test_item_without_text_ends_no_session(reader: Served, kind: str) -> None:
    prompt, _ = read(reader, RESPONSES, asks(RESPONSES, {"role": "user", "content": "zebra"}, SILENT[kind]))
    assert "zebra" in prompt
    assert "base64" not in prompt


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
@pytest.mark.parametrize("path", ROUTES)
def test_forced_call_of_any_tool_that_is_not_strict_is_accepted(reader: Served, path: str, schema: Body) -> None:
    read(reader, path, asks(path, tools=[tool(path, "look", schema)], tool_choice=REQUIRED[path]))


LOOKAHEAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=b)"}}}
REFUSED: list[tuple[str, Body, str]] = [
    (CHAT, {"messages": HI, "reasoning_effort": ""}, "effort"),
    (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": HI, "stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    *((path, asks(path, tools=[tool(path, "look", LOOKAHEAD, strict=True)]), "tools") for path in ROUTES),
]


@pytest.mark.parametrize(("path", "body", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_asked_for_strictly_is_refused_by_name(reader: Served, path: str, body: Body, named: str) -> None:
    response = reader.http.post(path, json={"model": "demo", **body})
    assert response.status_code == 400, response.text
    assert named in response.text
