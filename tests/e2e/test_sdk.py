"""Tests the server with the official OpenAI SDK and the demo model."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import openai
import pytest

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": QUESTION, "temperature": 0, "max_tokens": 16}
SCHEMAS: dict[str, dict[str, Any]] = {  # of tools; the chat template of the model knows none
    "get_time": {
        "type": "object",
        "properties": {"zone": {"enum": ["utc", "cet"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
    "open_port": {
        "type": "object",
        "properties": {"port": {"type": "integer", "minimum": 1, "maximum": 99}},
        "additionalProperties": False,
    },
}
NAMED = {"type": "function", "function": {"name": "get_time"}}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}


def test_a_streamed_chat_has_the_same_text_and_usage_as_a_whole_one(sdk: openai.OpenAI) -> None:
    sdk.chat.completions.create(**CHAT)  # so that both find the same in the prefix cache
    whole = sdk.chat.completions.create(**CHAT)
    *chunks, last = sdk.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert len([text for text in texts if text]) > 3  # it is really streamed
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (last.choices, last.usage) == ([], whole.usage)


def test_a_streamed_completion_has_the_same_text_and_usage_as_a_whole_one(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(**COMPLETION)
    *chunks, last = sdk.completions.create(**COMPLETION, stream=True, stream_options={"include_usage": True})
    assert whole.choices[0].text.startswith(" Paris")
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert (last.choices, last.usage) == ([], whole.usage)


def test_the_tokens_of_chat_logprobs_join_to_the_text_and_are_streamed_as_they_are(sdk: openai.OpenAI) -> None:
    (choice,) = sdk.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3).choices
    shown = choice.logprobs.content
    assert choice.finish_reason == "stop"  # by a token that has no entry
    assert "".join(token.token for token in shown) == choice.message.content
    assert bytes(byte for token in shown for byte in token.bytes).decode() == choice.message.content
    for token in shown:
        best = token.top_logprobs[0]
        assert (token.token, token.logprob) == (best.token, best.logprob)  # greedy
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1 + 1e-6
    chunks = sdk.chat.completions.create(**CHAT, logprobs=True, stream=True)
    streamed = [row for chunk in chunks if chunk.choices[0].logprobs for row in chunk.choices[0].logprobs.content]
    assert [row.token for row in streamed] == [token.token for token in shown]


@pytest.mark.parametrize(
    ("tool_choice", "temperature", "reason"), [("required", 1.5, "tool_calls"), (NAMED, 0, "stop")]
)
def test_forced_calls_follow_their_schemas_and_are_streamed_as_they_are(
    sdk: openai.OpenAI, tool_choice: Any, temperature: float, reason: str
) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
    asked = CHAT | {"tools": tools, "tool_choice": tool_choice, "temperature": temperature, "max_tokens": 300}
    asked |= {"n": 2, "seed": 1, "parallel_tool_calls": False}  # one call, which ends whatever is drawn
    whole = sdk.chat.completions.create(**asked)
    for choice in whole.choices:
        assert (choice.message.content, choice.finish_reason) == (None, reason)
        for call in choice.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    with sdk.chat.completions.stream(**asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion()
    assert events.count("tool_calls.function.arguments.delta") > events.count("tool_calls.function.arguments.done")
    for choice, other in zip(whole.choices, streamed.choices, strict=True):
        assert other.finish_reason == choice.finish_reason
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert [(call.function.name, call.function.arguments) for call in other.message.tool_calls] == calls
