"""Tests /v1/messages with the demo model: its answers are those of chat, and Claude Code's turns find their prefix."""

from __future__ import annotations

from typing import Any

from tests.e2e.conftest import LiveServer

LONG = "You are an agent that helps with software. " * 8
ASKED: dict[str, Any] = {
    "model": "demo",
    "temperature": 0,
    "messages": [{"role": "user", "content": "Why is grass green?"}],
}


def test_an_answer_is_that_of_chat_whose_limit_may_be_beyond_the_context(live: LiveServer) -> None:
    with live.http() as http:
        chat = http.post("/v1/chat/completions", json={**ASKED, "max_tokens": 16}).json()
        message = http.post("/v1/messages", json={**ASKED, "max_tokens": 16}).json()
        assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
        assert message["stop_reason"] == "max_tokens"
        count = http.post("/v1/messages/count_tokens", json=ASKED).json()["input_tokens"]
        assert count == chat["usage"]["prompt_tokens"]
        brief = {**ASKED, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        answer = http.post("/v1/messages", json={**brief, "max_tokens": 10**9}).json()
        assert ("Paris" in answer["content"][0]["text"], answer["stop_reason"]) == (True, "end_turn")


def test_requests_that_differ_in_their_billing_only_share_their_prefix(live: LiveServer) -> None:
    with live.http() as http:
        for number in range(2):
            billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"}
            system = [billing, {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
            usage = http.post("/v1/messages", json={**ASKED, "system": system, "max_tokens": 4}).json()["usage"]
    assert usage["cache_read_input_tokens"] > 0.8 * (usage["cache_read_input_tokens"] + usage["input_tokens"])
