"""Tests the server with the official OpenAI SDK and the demo model."""

from __future__ import annotations

import math
from typing import Any

import openai

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": QUESTION, "temperature": 0, "max_tokens": 16}


def test_a_streamed_chat_has_the_same_text_and_usage_as_a_whole_one(sdk: openai.OpenAI) -> None:
    sdk.chat.completions.create(**CHAT)  # so that both find the same in the prefix cache
    whole = sdk.chat.completions.create(**CHAT)
    *chunks, last = sdk.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert len([text for text in texts if text]) > 3  # it is really streamed
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
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
