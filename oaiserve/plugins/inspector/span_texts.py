"""Adds the texts of a request to its span if OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT enables it. The
attributes are `gen_ai.input.messages` and others from OpenTelemetry's conventions for GenAI."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from oaiserve.engine.request import ChatPrompt, Event, Prompt, Request, TextPrompt, TokenChunk
from oaiserve.errors import StartupError
from oaiserve.wire.prefix_keys import SYSTEM_ROLES

VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
MAX_TEXT = 8192  # characters per text; the rest is left out
MAX_ATTRIBUTE = 65_536  # characters per attribute; the earliest messages are left out

INPUT = "gen_ai.input.messages"
OUTPUT = "gen_ai.output.messages"
SYSTEM = "gen_ai.system_instructions"
TOOLS = "gen_ai.tool.definitions"
# In these APIs, system instructions are separate from the messages of the conversation.
_WITH_INSTRUCTIONS = ("messages", "responses")
_ON = ("true", "span_only", "span_and_event")
_OFF = ("", "false", "no_content")

Json = dict[str, Any]


def captures(environ: Mapping[str, str]) -> bool:
    """Return whether spans contain texts. Raises StartupError for a value that this server does not support."""
    value = environ.get(VARIABLE, "")
    if value.strip().lower() in _ON:
        return True
    if value.strip().lower() in _OFF:
        return False
    raise StartupError(
        f"{VARIABLE} is '{value}', but must be SPAN_ONLY, SPAN_AND_EVENT or true, for texts in spans, or NO_CONTENT or "
        "false. This server sends no events with texts."
    )


class SpanTexts:
    """The texts of one request, which become attributes when its span is created."""

    def __init__(self, request: Request) -> None:
        self._prompts = [_without_media(prompt) for prompt in request.prompts]
        self._operation = request.origin.operation
        self._answers: dict[int, list[str]] = {}  # pieces of text, keyed by choice
        self._finish_reasons: dict[int, str] = {}

    def take(self, event: Event) -> None:
        if isinstance(event, TokenChunk):
            self._answers.setdefault(event.index, []).append(event.text)
            if event.finish_reason is not None:
                self._finish_reasons[event.index] = event.finish_reason

    def attributes(self) -> dict[str, str]:
        """Return the attributes that are not empty, as JSON."""
        messages: list[Json] = []
        tools: list[Json] = []
        for prompt in self._prompts:
            if isinstance(prompt, ChatPrompt):
                messages += [_message(message) for message in prompt.messages]
                tools += [_tool(tool) for tool in prompt.tools or prompt.told_tools]
            elif isinstance(prompt, TextPrompt):
                messages.append({"role": "user", "parts": [_text(prompt.text)]})
        instructions: list[Json] = []
        while self._operation in _WITH_INSTRUCTIONS and messages and messages[0]["role"] in SYSTEM_ROLES:
            instructions += messages.pop(0)["parts"]
        answers = [
            {
                "role": "assistant",
                "parts": [_text("".join(parts))],
                "finish_reason": self._finish_reasons.get(index, "error"),
            }
            for index, parts in sorted(self._answers.items())
        ]
        lists = {SYSTEM: instructions, INPUT: messages, OUTPUT: answers, TOOLS: tools}
        return {name: _encoded(entries) for name, entries in lists.items() if entries}


def _without_media(prompt: Prompt) -> Prompt:
    return replace(prompt, media=()) if isinstance(prompt, ChatPrompt) else prompt


def _message(message: Mapping[str, Any]) -> Json:
    role = str(message.get("role", "user"))
    content = message.get("content")
    texts: Iterable[Any] = [{"text": content}] if isinstance(content, str) else content or ()
    parts = [*_parts(texts)]
    if role == "tool":
        response = "".join(part.get("content", "") for part in parts)
        return {
            "role": role,
            "parts": [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": response}],
        }
    if reasoning := message.get("reasoning"):
        parts.insert(0, {"type": "reasoning", "content": _cut(str(reasoning))})
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        arguments = function.get("arguments")
        arguments = _cut(arguments) if isinstance(arguments, str) else arguments
        parts.append({"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": arguments})
    return {"role": role, "parts": parts}


def _parts(contents: Iterable[Mapping[str, Any]]) -> Iterator[Json]:
    for part in contents:
        if "text" in part:
            yield _text(str(part["text"]))
        else:
            yield {"type": part.get("type", "image")}  # Only the type is shown, not the content.


def _text(text: str) -> Json:
    return {"type": "text", "content": _cut(text)}


def _cut(text: str) -> str:
    rest = len(text) - MAX_TEXT
    return text if rest <= 0 else f"{text[:MAX_TEXT]} … {rest} characters are left out"


def _tool(tool: Mapping[str, Any]) -> Json:
    return {"type": "function", **tool.get("function", tool)}


def _encoded(entries: Sequence[Json]) -> str:
    """Return entries as a JSON array. If it would be too long, the earliest entries are left out."""
    kept: list[str] = []
    length = 0
    for entry in reversed(entries):
        text = msgspec.json.encode(entry, enc_hook=repr).decode()
        length += len(text) + 1
        if kept and length > MAX_ATTRIBUTE:
            break
        kept.append(text)
    return f"[{','.join(reversed(kept))}]"
