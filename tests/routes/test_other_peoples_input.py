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
from tests.histories.bodies import SCHEMAS
from tests.published import checked
from tests.routes.asking import BODIES, CHAT, COMPLETIONS, HI, MESSAGES, REQUIRED, RESPONSES, ROUTES, submitted, tool
from tests.routes.doubles import FakeTelemetry
from tests.routes.test_generated_histories import OBJECTS
from tests.serving import Serve, Served, run_server
from tools.attack.in_process import EncodingEngine, encoding_engine

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
    *("{'city': 'Paris'}", '{"a": 1,}', '{"a": 1}{"b": 2}', '```json\n{"a": 1}\n```', 'look(city="Paris")', ""),
    *('"{\\"city\\": \\"Paris\\"}"', '{"a": NaN}', '{"a": "\\ud83d"}', "[" * 3000, '{"a":' * 3000, "\0", "[1, 2]"),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("arguments", [*GOOD, *BROKEN], ids=lambda text: ascii(text[:24]))
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


HALF_IN_A_TOOL = {"description": "Weather \ud83d", "parameters": {"type": "object", "properties": {}}}
HALVES: dict[str, tuple[str, Body]] = {
    "a tool's description": (
        CHAT,
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "w", **HALF_IN_A_TOOL}}]},
    ),
    "a tool's name": (RESPONSES, {"input": "Hi", "tools": [{"type": "function", "name": "w\ud83d", "parameters": {}}]}),
    "a tool of Messages": (
        MESSAGES,
        {
            **BODIES[MESSAGES],
            "model": "demo",
            "tools": [{"name": "w", "description": "\ud83d", "input_schema": {"type": "object"}}],
        },
    ),
    "a prompt": (COMPLETIONS, {"prompt": "def f(): # \ud83d"}),
}


@pytest.mark.parametrize(("path", "body"), HALVES.values(), ids=HALVES)
def test_half_an_emoji_is_replaced_in_tools_and_prompts_too(reader: Served, path: str, body: Body) -> None:
    response = reader.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    assert "the body: halves of surrogate pairs are read as U+FFFD" in response.headers[HEADER]


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


ASKED = {"role": "user", "content": "Hi"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "seen"}


def of_chat(*calls: Any, **fields: Any) -> Body:
    return asks(CHAT, {"role": "assistant", "content": "", "tool_calls": [*calls], **fields})


def of_user(path: str, content: Any) -> Body:
    return asks(path, {"role": "user", "content": content}, {"role": "assistant", "content": "Yes."})


def of_result(content: Any) -> Body:
    used = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}
    return asks(MESSAGES, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]})


# Whatever is read although the API that it is sent to would refuse it, and the note on it.
LENIENT: list[tuple[str, Body, str]] = [
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, "messages[0].content[0]: has no type"),
    (CHAT, {"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]: has no type"),
    (CHAT, of_user(CHAT, {"type": "text", "text": "Hi"}), "messages[0].content: is one part"),
    (CHAT, of_user(CHAT, [{"type": "input_text", "text": "Hi"}]), "messages[0].content[0]: input_text is read as text"),
    (CHAT, of_chat({"id": "c", "type": "function", "name": "look"}), "messages[0].tool_calls[0]: has no function"),
    (CHAT, of_chat({"id": "c", "function": {"name": "look"}}), "messages[0].tool_calls[0]: has no type"),
    (CHAT, of_chat({"id": "c", "type": "function", "function": {"name": "look"}}), "a call are empty"),
    (
        CHAT,
        of_chat({"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}),
        "messages[0].tool_calls[0].function.arguments: is no text",
    ),
    (
        CHAT,
        of_chat({"id": "c", "type": "custom", "custom": {"name": "look"}}),
        "messages[0].tool_calls[0].custom.input: is missing",
    ),
    (CHAT, of_chat(thinking=5, content="Yes."), "messages[0].thinking: is no text"),
    (RESPONSES, {"input": [ASKED, {"role": "assistant"}, ASKED]}, "input[1].content: is missing"),
    (
        RESPONSES,
        asks(RESPONSES, {"role": "assistant", "content": "Yes.", "tool_calls": ["look"]}),
        "input[0].tool_calls[0]: is no call",
    ),
    (RESPONSES, of_user(RESPONSES, ["Hi"]), "input[0].content[0]: has no type"),
    (RESPONSES, of_user(RESPONSES, [{"text": "Hi"}]), "input[0].content[0]: has no type"),
    (RESPONSES, of_user(RESPONSES, {"type": "input_text", "text": "Hi"}), "input[0].content: is one part"),
    (RESPONSES, of_user(RESPONSES, [{"type": "text", "text": "Hi"}]), "input[0].content[0]: text is read as text"),
    *(
        (RESPONSES, asks(RESPONSES, {"type": "function_call", **fields}, RESULT), note)
        for fields, note in (
            ({"name": "look", "arguments": "{}"}, "input[0].call_id: is missing"),
            ({"call_id": "c", "arguments": "{}"}, "input[0].name: is missing"),
            ({"call_id": "c", "name": "look"}, "input[0].arguments: is missing"),
            ({"call_id": "c", "name": "look", "arguments": {}}, "input[0].arguments: is no text"),
            ({"call_id": "c", "name": "look", "arguments": ""}, "a call are empty"),
        )
    ),
    (RESPONSES, asks(RESPONSES, {**RESULT, "call_id": None}), "input[0].call_id: is missing"),
    (RESPONSES, asks(RESPONSES, {**RESULT, "output": {"a": 1}}), "input[0].output: is read as a text in JSON"),
    (RESPONSES, asks(RESPONSES, {"type": "custom_tool_call", "call_id": "c", "name": "run"}), "input[0].input: is mis"),
    (MESSAGES, {"messages": [ASKED, {"role": "assistant"}, ASKED]}, "messages[1].content: is missing"),
    (
        MESSAGES,
        asks(MESSAGES, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}),
        "messages[0].content[0].input: is missing",
    ),
    (
        MESSAGES,
        asks(MESSAGES, {"role": "user", "content": [{"type": "made_up", "text": "Hi"}]}, *HI),
        "messages[0].content[0]: content of another type is shown by its text",
    ),
    (MESSAGES, of_result(["seen"]), "messages[1].content[0].content[0]: has no type"),
    (MESSAGES, of_result([{"text": "seen"}]), "messages[1].content[0].content[0]: has no type"),
    (MESSAGES, of_result({"type": "text", "text": "seen"}), "messages[1].content[0].content: is one part"),
    (MESSAGES, {"messages": HI, "system": [{"text": "Be kind."}]}, "system[0]: has no type"),
    (MESSAGES, {"output_config": {"format": {"schema": {"type": "object"}}}}, "output_config.format: has no type"),
]


@pytest.mark.parametrize(("path", "body", "note"), LENIENT, ids=lambda value: value if isinstance(value, str) else "")
def test_leniency_is_always_named(serve: Serve, path: str, body: dict[str, Any], note: str) -> None:
    response = serve(template=OBJECTS).post(path, **{**BODIES[path], **body})
    assert response.status_code == 200, response.text
    assert note in response.headers[HEADER]


NAMED: dict[str, Body] = {
    CHAT: {"type": "file", "file": {"file_id": "ID"}},
    MESSAGES: {"type": "document", "source": {"type": "file", "file_id": "ID"}},
    RESPONSES: {"type": "input_file", "file_id": "ID"},
}


@pytest.mark.plugin("batches")
@pytest.mark.parametrize("path", ROUTES)
def test_a_text_file_is_read_by_its_id(served: Served, path: str) -> None:
    upload = {"file": ("notes.txt", b"The code is 4711."), "purpose": (None, "user_data")}
    file_id = served.http.post("/v1/files", files=upload).json()["id"]
    part = json.loads(json.dumps(NAMED[path]).replace("ID", file_id))
    body = {**BODIES[path], **asks(path, {"role": "user", "content": [part]})}
    response = served.post(path, **body)
    assert response.status_code == 200, response.text
    assert "The code is 4711." in str(submitted(served)[1].messages)


@pytest.mark.parametrize("path", ROUTES)
def test_a_file_that_does_not_exist_is_named(served: Served, path: str) -> None:
    response = served.post(path, **{**BODIES[path], **asks(path, {"role": "user", "content": [NAMED[path]]})})
    assert response.status_code == 400
    assert "there is no file 'ID'" in response.json()["error"]["message"]
