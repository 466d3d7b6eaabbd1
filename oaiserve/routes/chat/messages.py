"""The messages of /v1/chat/completions and /tokenize, as the prompt that they make.

Other servers' messages are read as well as possible, with a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from oaiserve.engine.request import ChatPrompt
from oaiserve.routes.adaptations import Note
from oaiserve.routes.chat.contents import ContentReader, thoughts_in
from oaiserve.routes.chat.foreign import text_of
from oaiserve.routes.chat.history import Placed, calls_of, prompt_of
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.intake.body_types import ChatBody, TokenizeBody
from oaiserve.routes.intake.invalid import converted, invalid
from oaiserve.routes.intake.last_turn import first_asked
from oaiserve.routes.intake.media import MediaReader
from oaiserve.routes.intake.object_types import Message

_KNOWN = {*Message.__struct_fields__}


def build_prompt(
    body: ChatBody | TokenizeBody,
    messages: Sequence[Mapping[str, Any]],
    dialect: Dialect,
    shown: Sequence[Mapping[str, Any]],
    media: MediaReader,
    note: Note,
) -> ChatPrompt:
    if not messages:
        raise invalid("messages", "must hold at least one message")
    continue_final = bool(body.continue_final_message)
    if continue_final and body.add_generation_prompt:
        raise invalid("continue_final_message", "must not be true together with 'add_generation_prompt'")
    placed = _messages(messages, ContentReader(media, note, "messages"), note)
    return prompt_of(
        placed,
        shown,
        dialect,
        media,
        note,
        add_generation_prompt=not continue_final and body.add_generation_prompt is not False,
        continue_final_message=continue_final,
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs or {},
    )


def _readable(message: Mapping[str, Any], where: str, note: Note) -> Mapping[str, Any]:
    """Return a message whose fields have the types of `Message`, even if other servers' messages have different
    ones."""
    changed: dict[str, Any] = {}
    names = ("content", "tool_call_id") if message.get("role") in ("tool", "function") else ()
    for name in names:
        if isinstance(value := message.get(name), int | float):
            changed[name] = msgspec.json.encode(value).decode()
            note(f"{where}.{name}", "is read as a text in JSON")
    for name in ("reasoning", "reasoning_content"):
        if isinstance(value := message.get(name), dict | list):
            changed[name] = text_of(value)
            note(f"{where}.{name}", "is read by its text")
    calls = message.get("tool_calls")
    if isinstance(calls, list) and None in calls:
        changed["tool_calls"] = [call for call in calls if call is not None]
        note(f"{where}.tool_calls", "null is left out")
    return {**message, **changed}


def _messages(raw_messages: Sequence[Mapping[str, Any]], reader: ContentReader, note: Note) -> list[Placed]:
    raw_messages = [_readable(each, f"messages[{number}]", note) for number, each in enumerate(raw_messages)]
    messages = [converted(Message, each, f"messages[{number}]") for number, each in enumerate(raw_messages)]
    first_question = first_asked([message.role for message in messages])
    placed: list[Placed] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.function_call is None:
            older = []
        else:
            older = [{"type": "function", "function": message.function_call}]
        calls = calls_of([*(message.tool_calls or []), *older], where, note)
        if calls and message.role != "assistant":
            note(where, "calls in a message that is not the assistant's are left out")
            calls = []
        if message.reasoning is None:
            reasoning = message.reasoning_content
        else:
            reasoning = message.reasoning
        if message.role == "assistant":
            reasoning = reasoning or thoughts_in(message.content) or reasoning
            if message.content is None and not (calls or reasoning) and message.refusal is None:
                note(where, "a message without anything is left out")
                continue
        role = "tool" if message.role == "function" else message.role
        content: Any = message.refusal or ""
        if message.content is not None or role != "assistant":
            is_asked = role in ("system", "developer") or (role == "user" and number >= first_question)
            content = reader.read(message.content, f"{where}.content", role, is_asked=is_asked)
        known: dict[str, Any] = {"role": role, "content": content, "name": message.name, "tool_calls": calls or None}
        if role == "tool":
            known["tool_call_id"] = message.tool_call_id
        if role == "assistant":
            known["reasoning"] = reasoning
        more = reader.more_fields(raw_messages[number], _KNOWN, where)
        if not isinstance(more.get("thinking", ""), str):  # Templates take this for reasoning.
            del more["thinking"]
            note(f"{where}.thinking", "is no text, and left out")
        placed.append((where, {name: value for name, value in (known | more).items() if value is not None}))
    if not placed:
        raise invalid("messages", "must hold at least one message with a content")
    return placed
