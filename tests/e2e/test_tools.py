"""Tests calls of tools with the official OpenAI SDK and the demo model, whose chat template knows no tools."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

ZONES = ("utc", "cet")
TIME: dict[str, Any] = {
    "name": "get_time",
    "description": "The time in a zone.",
    "parameters": {
        "type": "object",
        "properties": {"zone": {"enum": list(ZONES)}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}
PORT: dict[str, Any] = {
    "name": "open_port",
    "parameters": {"type": "object", "properties": {"port": {"type": "integer", "minimum": 1, "maximum": 99}}},
}
QUESTION: list[Any] = [{"role": "user", "content": "What time is it in UTC?"}]
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": QUESTION,
    "tools": [{"type": "function", "function": TIME}, {"type": "function", "function": PORT}],
    "max_tokens": 300,
    "seed": 1,
}
NAMED = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "cet"}}\n</tool_call>'


def check_arguments(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "get_time":
        assert given in [{"zone": zone} for zone in ZONES]
    else:
        assert name == "open_port"
        assert given == {} or (given.keys() == {"port"} and 1 <= given["port"] <= 99)


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_forced_calls_follow_their_schemas_and_are_streamed_as_they_are(
    sdk: openai.OpenAI, tool_choice: Any, temperature: float
) -> None:
    asked = {**CHAT, "tool_choice": tool_choice, "temperature": temperature, "n": 2}
    whole = sdk.chat.completions.create(**asked)
    for choice in whole.choices:
        assert (choice.message.content, choice.finish_reason) == (
            None,
            "stop" if tool_choice is NAMED else "tool_calls",
        )
        for call in choice.message.tool_calls:
            check_arguments(call.function.name, call.function.arguments)
    with sdk.chat.completions.stream(**asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion()
    assert events.count("tool_calls.function.arguments.delta") > events.count("tool_calls.function.arguments.done")
    for choice, other in zip(whole.choices, streamed.choices, strict=True):
        assert other.finish_reason == choice.finish_reason
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert [(call.function.name, call.function.arguments) for call in other.message.tool_calls] == calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, None, ['{"zone": "cet"}']),
        (f"I look.\n{CALL}\n{CALL}", "I look.\n", ['{"zone": "cet"}'] * 2),
        (CALL.replace("get_time", "unknown"), CALL.replace("get_time", "unknown"), []),
        (CALL.replace('"cet"', ""), CALL.replace('"cet"', ""), []),
    ],
)
def test_what_the_model_writes_is_read(sdk: openai.OpenAI, text: str, content: str | None, calls: list[str]) -> None:
    extra = {"structured_outputs": {"choice": [text]}}
    (choice,) = sdk.chat.completions.create(**CHAT, extra_body=extra).choices
    assert choice.message.content == content
    assert [call.function.arguments for call in choice.message.tool_calls or []] == calls
    assert choice.finish_reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_beside_tools_an_answer_is_json_or_calls(sdk: openai.OpenAI, temperature: float) -> None:
    schema = {"type": "object", "properties": {"hour": {"enum": [1, 2]}}, "required": ["hour"]}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "time", "schema": schema}}, "n": 4}
    asked |= {"max_tokens": 60, "temperature": temperature}
    for choice in sdk.chat.completions.create(**CHAT | asked).choices:
        if choice.finish_reason == "stop":
            assert json.loads(choice.message.content) in [{"hour": 1}, {"hour": 2}]
        elif choice.finish_reason == "tool_calls":
            assert choice.message.content is None
            assert all(json.loads(call.function.arguments).__class__ is dict for call in choice.message.tool_calls)


def test_a_call_and_its_result_are_in_the_next_prompt(sdk: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "utc"}'}}
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:34"},
    ]
    short = {**CHAT, "max_tokens": 1}
    usages = [sdk.chat.completions.create(**short | {"messages": history[:n]}).usage for n in (1, 2, 3)]
    lengths = [usage.prompt_tokens for usage in usages]
    assert lengths[0] < lengths[1] < lengths[2]
    without = sdk.chat.completions.create(**{**short, "tools": openai.omit}).usage
    assert without.prompt_tokens < lengths[0]


def test_a_schema_that_cannot_be_obeyed_is_refused_before_a_stream_begins(sdk: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}
    with pytest.raises(openai.BadRequestError, match="in the parameters of 'f'") as caught:
        sdk.chat.completions.create(**{**CHAT, "tools": [tool], "tool_choice": "required"}, stream=True)
    assert caught.value.param == "tools"
