"""Prompts for chat templates that cannot show everything in a conversation.

A chat template gets the parts that it can show: tools, calls and results. The others become text: a system message with
the tools, calls in the dialect of the answer's parser, and results as a turn of the user.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from oaiserve.engine.request import ChatPrompt
from oaiserve.routes.chat.tools import model_name
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.dialects.family import CallFamily, Message
from oaiserve.routes.dialects.hermes import HERMES
from oaiserve.routes.intake.outlines import TOLD_RESULT
from oaiserve.wire.prefix_keys import SYSTEM_ROLES, without_billing

_EXAMPLE = ("name-of-the-function", '{"name-of-an-argument": "its value"}')


def _without_billing(messages: Iterable[Message]) -> Iterator[Message]:
    for message in messages:
        if message["role"] not in SYSTEM_ROLES:
            yield message
        elif (content := without_billing(message["content"])) or not message["content"]:
            yield {**message, "content": content}


def prompt_with_tools(
    messages: Iterable[Message], shown: Sequence[Mapping[str, Any]], dialect: Dialect, **more: Any
) -> ChatPrompt:
    """Return the prompt of checked messages, with a description of the tools `shown`. `more` are its other fields."""
    family = dialect.calls or HERMES
    abilities = dialect.abilities
    history = [_with_model_names(message) for message in _without_billing(messages)]
    history = history if family.history is None else list(family.history(history))
    result: list[Message] = []
    for is_result, messages in groupby(history, lambda one: one["role"] == "tool" and not abilities.results):
        if is_result:
            texts = [_joined(TOLD_RESULT, one["content"], "\n</tool_response>") for one in messages]
            between = [each for text in texts for each in ("\n", text)]
            result.append({"role": "user", "content": _joined(*between[1:])})
            continue
        for message in messages:
            if not abilities.calls and (calls := message.pop("tool_calls", None)):
                functions = (call["function"] for call in calls)
                written = (family.in_text or family.written)(
                    (one["name"], one["arguments"] or "{}") for one in functions
                )
                message["content"] = "\n".join(filter(None, (text_of(message["content"]), written)))
            result.append(message)
    if abilities.tools:
        return ChatPrompt(result, tools=shown, **more)
    return ChatPrompt(_introduced(result, shown, family) if shown else result, told_tools=shown, **more)


def _with_model_names(message: Message) -> Message:
    changed = dict(message)
    if message["role"] == "tool" and isinstance(name := message.get("name"), str):
        changed["name"] = model_name(name)
    if calls := message.get("tool_calls"):
        functions = ({**call["function"], "name": model_name(call["function"]["name"])} for call in calls)
        changed["tool_calls"] = [{**call, "function": one} for call, one in zip(calls, functions, strict=True)]
    return changed


def _introduced(messages: list[Message], shown: Sequence[Mapping[str, Any]], family: CallFamily) -> list[Message]:
    tools = "\n".join(msgspec.json.encode(tool["function"]).decode() for tool in shown)
    introduction = (
        f"You may call functions. Each of these lines describes one:\n{tools}\n\n"
        f"To call a function, write this, with a JSON object of its arguments:\n{family.written([_EXAMPLE])}"
    )
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        first = {**messages[0], "content": _joined(f"{introduction}\n\n", messages[0]["content"])}
        return [first, *messages[1:]]
    return [{"role": "system", "content": introduction}, *messages]


def text_of(content: str | Sequence[Mapping[str, str]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)


def _joined(*contents: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """Return the contents joined: as one text, or as parts if some of them aren't text."""
    plain = [
        text_of(one) if all("text" in part for part in one) else one for one in contents if not isinstance(one, str)
    ]
    if all(isinstance(one, str) for one in plain):
        return "".join(map(text_of, contents))
    lists = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents)
    return [part for each in lists for part in each]
