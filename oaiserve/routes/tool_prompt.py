"""Tools, calls and their results in the messages for a chat template.

A template with tools gets them as they are. For any other, they become text: a system message with the tools, calls in
the dialect of the answer's parser, and results as a turn of the user.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from oaiserve.engine.request import ChatPrompt
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.dialects.families import HERMES, CallFamily

Message = dict[str, Any]
_EXAMPLE = ("name-of-the-function", '{"name-of-an-argument": "its value"}')


def prompt_with_tools(
    messages: Iterable[Message], shown: Sequence[Mapping[str, Any]], dialect: Dialect, **more: Any
) -> ChatPrompt:
    """Return the prompt of checked messages, in which the tools `shown` are described. `more` are its other fields."""
    tools = shown if dialect.template_takes_tools else ()
    return ChatPrompt(with_tools(messages, shown, dialect), tools=tools, **more)


def with_tools(messages: Iterable[Message], shown: Sequence[Mapping[str, Any]], dialect: Dialect) -> list[Message]:
    """Return the messages for the template of this dialect, with the tools in them unless it takes tools itself."""
    family = dialect.calls or HERMES
    if dialect.template_takes_tools:
        return [_with_short_ids(message) for message in messages] if family.short_ids else list(messages)
    result: list[Message] = []
    results_so_far = False  # the last message has results of calls, and takes further ones
    for message in messages:
        if message["role"] in ("tool", "function"):
            text = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
            if results_so_far:
                result[-1]["content"] += f"\n{text}"
            else:
                result.append({"role": "user", "content": text})
            results_so_far = True
            continue
        results_so_far = False
        calls = message.pop("tool_calls", None)
        if calls:
            texts = [_text(message["content"]), family.written(map(_name_and_arguments, calls))]
            message["content"] = "\n".join(filter(None, texts))
        result.append(message)
    return _introduced(result, _introduction(shown, family), dialect) if shown else result


def _with_short_ids(message: Message) -> Message:
    """Return a message with the ids of its calls as Mistral's templates want them: nine letters or digits."""
    shortened = dict(message)
    if "tool_call_id" in message:
        shortened["tool_call_id"] = _short_id(message["tool_call_id"])
    if "tool_calls" in message:
        shortened["tool_calls"] = [{**call, "id": _short_id(call.get("id", ""))} for call in message["tool_calls"]]
    return shortened


def _short_id(call_id: str) -> str:
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def _introduction(shown: Sequence[Mapping[str, Any]], family: CallFamily) -> str:
    tools = "\n".join(msgspec.json.encode(tool["function"]).decode() for tool in shown)
    return (
        f"You may call functions. Each of these lines describes one:\n{tools}\n\n"
        f"To call a function, write this, with a JSON object of its arguments:\n{family.written([_EXAMPLE])}"
    )


def _introduced(messages: list[Message], introduction: str, dialect: Dialect) -> list[Message]:
    """Return the messages with a text in front, in a system message if the template has one."""
    host = "system" if dialect.template_takes_system else "user"
    roles = ("system", "developer") if host == "system" else (host,)
    if messages and messages[0]["role"] in roles:
        first = {**messages[0], "content": f"{introduction}\n\n{_text(messages[0]['content'])}"}
        return [first, *messages[1:]]
    return [{"role": host, "content": introduction}, *messages]


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call["function"]
    return function["name"], function["arguments"] or "{}"


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
