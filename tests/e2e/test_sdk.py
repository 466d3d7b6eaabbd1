"""Tests the server with the official OpenAI SDK and the demo model."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest

from tests.e2e.conftest import API_KEY, LiveServer

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": QUESTION, "temperature": 0, "max_tokens": 16}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}


def test_chat_knows_the_capital_of_france(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(**CHAT)
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens


def test_a_completion_knows_the_capital_of_france(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(**COMPLETION)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 6


def test_a_streamed_chat_has_the_same_text_and_usage_as_a_whole_one(sdk: openai.OpenAI) -> None:
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
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert (last.choices, last.usage) == ([], whole.usage)


def test_the_async_client_gets_the_same_answers_side_by_side(live: LiveServer, sdk: openai.OpenAI) -> None:
    async def ask_both() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=API_KEY, max_retries=0) as client:

            async def streamed() -> str:
                stream = await client.chat.completions.create(**CHAT, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            whole, text = await asyncio.gather(client.chat.completions.create(**CHAT), streamed())
            return whole.choices[0].message.content, text

    expected = sdk.chat.completions.create(**CHAT).choices[0].message.content
    assert asyncio.run(ask_both()) == (expected, expected)


def test_two_choices_differ_and_their_seed_reproduces_them(sdk: openai.OpenAI) -> None:
    sampled = CHAT | {"temperature": 1.5, "n": 2, "seed": 11}
    first, again = (sdk.chat.completions.create(**sampled) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert [choice.message.content for choice in again.choices] == texts


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


def test_the_tokens_of_completion_logprobs_join_to_the_text(sdk: openai.OpenAI) -> None:
    (choice,) = sdk.completions.create(**COMPLETION, logprobs=2).choices
    rows = choice.logprobs
    assert "".join(rows.tokens) == choice.text
    for token, offset, logprob, top in zip(
        rows.tokens, rows.text_offset, rows.token_logprobs, rows.top_logprobs, strict=True
    ):
        assert choice.text[offset : offset + len(token)] == token
        assert logprob == top[token] == max(top.values())  # greedy


def test_the_stream_helper_assembles_three_choices(sdk: openai.OpenAI) -> None:
    # The helper raises an error for an answer that ends by length, so these end at a space.
    sampled = CHAT | {"n": 3, "seed": 3, "temperature": 1.0, "max_tokens": 64, "stop": " "}
    sampled["extra_body"] = {"min_tokens": 5}
    texts = ["", "", ""]
    with sdk.chat.completions.stream(**sampled) as stream:
        for event in stream:
            if event.type == "chunk":
                for choice in event.chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == texts
    whole = sdk.chat.completions.create(**sampled)
    assert [choice.message.content for choice in whole.choices] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(sdk: openai.OpenAI, stream: bool) -> None:
    answer = sdk.chat.completions.create(**CHAT, stop=[" Par", "never"], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
    assert text == "The capital of France is"
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", " Par")
