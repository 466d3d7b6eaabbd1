"""The texts of requests in spans, with OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from oaiserve.config import Config
from oaiserve.engine.request import ChatPrompt, FinishReason, Prompt, Request, TextPrompt, TokenChunk, TokenPrompt
from oaiserve.engine.types.media import MediaFile
from oaiserve.errors import StartupError
from oaiserve.facts.record import EngineAccount, Origin
from oaiserve.plugins.inspector import plugin
from oaiserve.plugins.inspector.options import InspectorOptions
from oaiserve.plugins.inspector.span_texts import (
    INPUT,
    MAX_ATTRIBUTE,
    MAX_TEXT,
    OUTPUT,
    SYSTEM,
    TOOLS,
    VARIABLE,
    SpanTexts,
)
from oaiserve.telemetry.logs import log_request
from oaiserve.telemetry.recent import RecentRequests
from tests.records import record_at
from tests.telemetry.exported import json_log, spans_of

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at":"sky"}'}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image"}]},
    {"role": "assistant", "content": "", "reasoning": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
]
PROMPT = ChatPrompt(MESSAGES, tools=[TOOL], media=(MediaFile("image", b"12345"),))


def attributes(prompt: Prompt, operation: str = "chat") -> dict[str, Any]:
    texts = SpanTexts(Request("r", (prompt,), origin=Origin(operation=operation)))
    texts.take(TokenChunk("r", 0, "The sky", [1], None))
    texts.take(TokenChunk("r", 0, " is blue.", [2], None, FinishReason.STOP))
    return {name: json.loads(text) for name, text in texts.attributes().items()}


def test_messages_calls_results_and_tools_have_the_form_of_the_conventions() -> None:
    found = attributes(PROMPT)
    assert found[INPUT] == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "What is it?"}, {"type": "image"}]},
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "I look."},
                {"type": "text", "content": ""},
                {"type": "tool_call", "id": "call_1", "name": "look", "arguments": '{"at":"sky"}'},
            ],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": "blue"}]},
    ]
    answer = {"role": "assistant", "parts": [{"type": "text", "content": "The sky is blue."}], "finish_reason": "stop"}
    assert found[OUTPUT] == [answer]
    assert found[TOOLS] == [{"type": "function", **TOOL["function"]}]
    assert SYSTEM not in found


@pytest.mark.parametrize("operation", ["messages", "responses"])
def test_instructions_of_apis_that_have_some_are_no_messages(operation: str) -> None:
    found = attributes(PROMPT, operation)
    assert found[SYSTEM] == [{"type": "text", "content": "Be brief."}]
    assert found[INPUT][0]["role"] == "user"


def test_the_text_of_a_completion_is_a_message_and_token_ids_are_none() -> None:
    assert attributes(TextPrompt("Once"))[INPUT] == [{"role": "user", "parts": [{"type": "text", "content": "Once"}]}]
    assert INPUT not in attributes(TokenPrompt([1, 2]))


def test_long_texts_and_long_conversations_are_cut() -> None:
    long = [{"role": "user", "content": f"{number} " + MAX_TEXT * "x"} for number in range(20)]
    texts = SpanTexts(Request("r", (ChatPrompt(long),)))
    encoded = texts.attributes()[INPUT]
    shown = json.loads(encoded)
    assert len(encoded) <= MAX_ATTRIBUTE
    assert shown[-1]["parts"][0]["content"].startswith("19 xxx")
    assert shown[-1]["parts"][0]["content"].endswith("x … 3 characters are left out")
    assert 1 < len(shown) < 20


def test_only_the_span_of_the_operation_has_texts_and_no_log_or_list_of_requests_keeps_them() -> None:
    account = EngineAccount(span_texts=lambda: {INPUT: "a secret"})
    record = replace(record_at(0, 1), account=account)
    server, inner, *phases = spans_of(record)
    assert inner.attributes[INPUT] == "a secret"
    assert all(INPUT not in span.attributes for span in (server, *phases))
    recent = RecentRequests(1, lambda: 0)
    recent.add(record)
    assert "a secret" not in repr(recent.get(record.request_id))
    assert recent._ring[0].record.account.span_texts is None
    with json_log() as log:
        log_request(record)
    assert "a secret" not in log.getvalue()


@pytest.mark.parametrize(
    ("value", "has_streams"),
    [(None, False), ("", False), ("NO_CONTENT", False), ("false", False), ("SPAN_ONLY", True), ("true", True)],
)
def test_only_the_variable_turns_texts_on(
    value: str | None, has_streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert plugin.inner.streams is not None
    assert (plugin.inner.streams(Config("demo")) is not None) == has_streams
    assert plugin.inner.streams(Config("demo", of_plugins=(InspectorOptions(inspect=1),))) is not None


@pytest.mark.parametrize("value", ["EVENT_ONLY", "yes"])
def test_a_value_that_the_server_cannot_follow_ends_the_start(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert plugin.check is not None
    with pytest.raises(StartupError, match=f"{VARIABLE} is '{value}', but must be SPAN_ONLY"):
        plugin.check(Config("demo"))
