"""Real files, served by the command line with default settings: the answers are right, and they end."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import LiveServer, serve_process

QUESTION = "What is the capital of France? Answer in one sentence."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CITIES = ("Paris", "Rome", "Berlin", "Madrid", "Vienna")


Conversation = Callable[[LiveServer], list[tuple[str, str]]]  # returns the names and the arguments of its calls


@pytest.fixture(scope="module")
def coder(qwen_15b: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve_process(
        str(qwen_15b), tmp_path_factory.mktemp("coder") / "log", "--served-model-name", "coder"
    ) as server:
        yield server


@pytest.mark.parametrize(
    ("model", "family", "text"),
    [("qwen_05b", "qwen2", " Paris"), ("gemma_270m", "gemma3", " the")],
)
def test_a_file_is_served_with_default_settings(
    model: str, family: str, text: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = request.getfixturevalue(model)
    with serve_process(str(path), tmp_path / "log") as server:
        answer = server.sdk().completions.create(
            model=str(path), prompt="The capital of France is", max_tokens=1, temperature=0
        )
        (start,) = [line["start"] for line in server.log() if "start" in line]
    assert answer.choices[0].text == text
    assert f"({family}), GGUF Q4_K_M" in start["Model"]
    assert "native code, bfloat16" in start["Runs on"]


def test_a_chat_ends_with_its_turn(coder: LiveServer) -> None:
    answer = coder.sdk().chat.completions.create(
        model="coder", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=60
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (
            "Ann is 30, Bea is 25. Extract the people as JSON.",
            [{"name": "Ann", "age": 30}, {"name": "Bea", "age": 25}],
        ),
        (
            "I have a cat named Tom and a dog named Rex. List my pets as JSON.",
            [{"kind": "cat", "name": "Tom"}, {"kind": "dog", "name": "Rex"}],
        ),
    ],
)
def test_lists_under_a_schema_have_their_items(coder: LiveServer, task: str, expected: list[dict[str, Any]]) -> None:
    """Where no blank may come before a list, the model ends it before its first item."""
    types = {name: {"type": "integer" if name == "age" else "string"} for name in expected[0]}
    item = {"type": "object", "properties": types, "required": list(types), "additionalProperties": False}
    schema = {"type": "object", "properties": {"all": {"type": "array", "items": item}}, "required": ["all"]}
    assert under_schema(coder, task, schema) == {"all": expected}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("HTTP status of a page that is missing, and of success?", {"missing": "404", "success": "200"}),
        ("The scores are 3, 5 and 8; give them as text.", {"scores": ["3", "5", "8"]}),
    ],
)
def test_strings_have_the_numbers_that_the_model_would_write(coder: LiveServer, task: str, expected: Any) -> None:
    """Where a blank or a bracket may be drawn alone, as before a number, "errors" follows."""
    text = {"type": "string"}
    types = {
        name: text if isinstance(value, str) else {"type": "array", "items": text} for name, value in expected.items()
    }
    schema = {"type": "object", "properties": types, "required": list(types), "additionalProperties": False}
    assert under_schema(coder, task, schema) == expected


def under_schema(coder: LiveServer, task: str, schema: dict[str, Any]) -> Any:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = coder.sdk().chat.completions.create(
        model="coder",
        messages=[{"role": "user", "content": task}],
        temperature=0,
        max_tokens=120,
        response_format=shape,
    )
    return json.loads(answer.choices[0].message.content or "")


def test_a_json_object_has_the_names_that_were_requested(coder: LiveServer) -> None:
    """Where no line may begin after the brace, the model writes "/code"."""
    task = "Write a Python function that reverses a string. Answer as JSON with keys 'code' and 'explanation'."
    answer = coder.sdk().chat.completions.create(
        model="coder",
        messages=[{"role": "user", "content": task}],
        temperature=0,
        max_tokens=160,
        response_format={"type": "json_object"},
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"code", "explanation"}


def test_code_in_the_middle_ends_where_the_text_does(coder: LiveServer) -> None:
    before = "def add(a, b):\n    return "
    after = "\n\n\nprint(add(1, 2))\n"
    settings: Any = {"model": "coder", "temperature": 0, "max_tokens": 40}
    answer = coder.sdk().completions.create(prompt=before, suffix=after, **settings)
    assert answer.choices[0].text == "a + b"
    assert answer.choices[0].finish_reason == "stop"
    prompt = f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"
    whole = coder.sdk().completions.create(prompt=prompt, **settings)
    assert whole.choices[0].text == answer.choices[0].text
    assert whole.usage.prompt_tokens_details.cached_tokens == 16, "their tokens are the same"


@pytest.mark.parametrize(
    ("before", "after", "filled"),
    [
        ("def fibonacci(n):\n    ", "\n\nprint(fibonacci(10))  # 55\n", "fibonacci(n-1) + fibonacci(n-2)"),
        ("function add(a, b) {\n  ", "\n}\nconsole.log(add(1, 2));\n", "return a + b;"),
        ('def is_even(n):\n    """<|fim_middle|>"""\n    return ', "\n\nassert is_even(4)\n", "n % 2 == 0"),
    ],
)
def test_a_gap_is_filled_and_ends(coder: LiveServer, before: str, after: str, filled: str) -> None:
    answer = coder.sdk().completions.create(model="coder", prompt=before, suffix=after, temperature=0, max_tokens=80)
    assert answer.choices[0].text.endswith(filled)
    assert answer.choices[0].finish_reason == "stop"


def by_chat(server: LiveServer) -> list[tuple[str, str]]:
    client = server.sdk()
    messages = []
    results = []
    tools: Any = [WEATHER]
    for city in CITIES:
        messages.append({"role": "user", "content": question(city)})
        settings: Any = {"model": "coder", "tools": tools, "temperature": 0, "max_tokens": 80}
        choice: Any = choices("auto", "required")[city]
        called = client.chat.completions.create(messages=messages, tool_choice=choice, **settings).choices[0].message
        (call,) = called.tool_calls or ()
        messages.append(called.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result(city)})
        messages.append({"role": "assistant", "content": told(city)})
        results.append((call.function.name, call.function.arguments))
    return results


def by_responses(server: LiveServer) -> list[tuple[str, str]]:
    client = server.sdk()
    items = []
    results = []
    tools: Any = [{"type": "function", **WEATHER["function"]}]
    settings: Any = {"model": "coder", "tools": tools, "temperature": 0, "max_output_tokens": 80, "store": False}
    for city in CITIES:
        items.append({"role": "user", "content": question(city)})
        choice: Any = choices("auto", "required")[city]
        (call,) = [
            one
            for one in client.responses.create(input=items, tool_choice=choice, **settings).output
            if one.type == "function_call"
        ]
        items.append(call.model_dump(exclude_none=True))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result(city)})
        items.append({"role": "assistant", "content": told(city)})
        results.append((call.name, call.arguments))
    return results


def by_messages(server: LiveServer) -> list[tuple[str, str]]:
    messages = []
    results = []
    function = WEATHER["function"]
    tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    with server.http() as http:

        def ask() -> list[dict[str, Any]]:
            body = {"model": "coder", "tools": [tool], "temperature": 0, "max_tokens": 80, "messages": messages}
            body["tool_choice"] = {"type": choices("auto", "any")[city]}
            answer = http.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            messages.append({"role": "assistant", "content": answer.json()["content"]})
            return answer.json()["content"]

        for city in CITIES:
            messages.append({"role": "user", "content": question(city)})
            (call,) = [block for block in ask() if block["type"] == "tool_use"]
            block = {"type": "tool_result", "tool_use_id": call["id"], "content": result(city)}
            messages.append({"role": "user", "content": [block]})
            messages.append({"role": "assistant", "content": told(city)})
            results.append((call["name"], json.dumps(call["input"])))
    return results


def question(city: str) -> str:
    return f"What is the weather in {city} now? Use the tool."


def result(city: str) -> str:
    return json.dumps({"city": city, "celsius": 10 + CITIES.index(city), "sky": "clear"})


def choices(first: str, later: str) -> dict[str, str]:
    """Return how the tool is chosen in each turn. A model of this size invents the weather once it knows the form."""
    return dict.fromkeys(CITIES, later) | {CITIES[0]: first}


def told(city: str) -> str:
    """Return the end of a turn, which the model does not write: it would call the tool again."""
    return f"It is {10 + CITIES.index(city)} °C in {city}, and the sky is clear."


@pytest.mark.parametrize(
    "converse",
    [
        by_chat,
        pytest.param(by_responses, marks=pytest.mark.plugin("responses")),
        pytest.param(by_messages, marks=pytest.mark.plugin("messages")),
    ],
)
def test_a_conversation_of_five_turns_calls_its_tool_in_each(converse: Conversation, coder: LiveServer) -> None:
    calls = [(name, json.loads(arguments)) for name, arguments in converse(coder)]
    assert calls == [("get_weather", {"city": city}) for city in CITIES]
