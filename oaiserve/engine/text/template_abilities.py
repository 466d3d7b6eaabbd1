"""`Abilities`: which parts of a conversation a chat template shows, and in which forms, tested with samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from oaiserve.engine.text.jinja_template import Message
from oaiserve.engine.text.plain_tools import ODD_SCHEMA

_TEXT = "A text beside calls."
_VALUE = "A sampled value."
_RESULT = "A sampled result of "
_NAME = "sample_tool"
_KEY = "sample_key"
_USER_TEXT = "Hello."
_RULE = "A sampled rule."


@dataclass(frozen=True, slots=True)
class Abilities:
    system: bool = True
    late_systems: bool = True  # accepts several system messages, anywhere
    tools: bool = True
    tools_in_message: bool = False  # shows tools as text in the system message, instead of from the variable
    needs_descriptions: bool = False  # Tools must have descriptions.
    needs_described_parameters: bool = False
    needs_plain_tools: bool = False  # fails at schemas that contain more than types and properties
    calls: bool = True
    joins_arguments: bool = False  # expects the arguments of calls as text
    takes_one_call: bool = False  # accepts one call per message, and no text next to it
    loses_text: bool = False  # drops the text of messages with calls
    results: bool = True
    embeds_results: bool = False  # shows results in the message with the calls
    wants_turns: bool = False  # User and assistant must alternate, and the user must come first.
    needs_user: bool = False  # rejects conversations without a user message


class Sample(Protocol):
    def __call__(self, messages: list[Message], **variables: object) -> str:
        """Return the rendered messages, or "" if the template rejects them."""


def abilities_of(sample: Sample, content: Callable[[str], Any], source: str) -> Abilities:
    """Test the template with this source. `content` returns a text in the form of content that the template takes."""
    hello: Message = {"role": "user", "content": content(_USER_TEXT)}

    def with_tool(messages: list[Message], *, described: bool = True, described_parameter: bool = True) -> str:
        parameter = {"type": "string"}
        if described_parameter:
            parameter["description"] = "A key."
        schema = {"type": "object", "properties": {_KEY: parameter}, "required": [_KEY]}
        function: dict[str, Any] = {"name": _NAME}
        if described:
            function["description"] = "A sample."
        function["parameters"] = schema
        return sample(messages, tools=[{"type": "function", "function": function}])

    def turn(arguments: Sequence[object], text: str = "", **fields: object) -> list[Message]:
        ids = [f"sample12{number}" for number in range(len(arguments))]
        calls = [
            {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": each}}
            for call_id, each in zip(ids, arguments, strict=True)
        ]
        results: list[Message] = [
            {"role": "tool", "tool_call_id": call_id, "name": _NAME, "content": content(_RESULT + call_id)}
            for call_id in ids
        ]
        return [hello, {"role": "assistant", "content": content(text), "tool_calls": calls, **fields}, *results]

    takes_tools = _NAME in with_tool([hello])
    odd = [
        {"type": "function", "function": {"name": _NAME, "description": "A sample.", "parameters": schema}}
        for schema in (ODD_SCHEMA, {"type": "object"})
    ]
    in_message: Message = {"role": "system", "content": content(_RULE), "tools": _NAME}
    takes_message = not takes_tools and _NAME in sample([in_message, hello])

    arguments = {_KEY: _VALUE}
    as_object, as_text = (with_tool(turn([each])) for each in (arguments, json.dumps(arguments)))
    shows_object = _VALUE in as_object and f"{{'{_KEY}': '{_VALUE}" not in as_object
    joins_arguments = not shows_object and _VALUE in as_text
    takes_calls = shows_object or joins_arguments
    takes_results = _RESULT in (as_text if joins_arguments else as_object)
    responses = [{"name": _NAME, "response": f"{_RESULT}sample120"}]
    embedded = with_tool(turn([arguments], tool_responses=responses)[:2])

    alone: list[Message] = [{"role": role, "content": content(_RULE)} for role in ("system", "assistant")]

    def loses(num_calls: int, text: str = "") -> bool:
        """Return whether the template loses calls unless each has its own message."""
        values = [f"{_VALUE} {number}" for number in range(num_calls)]
        objects = [{_KEY: value} for value in values]
        messages = turn([json.dumps(each) for each in objects] if joins_arguments else objects, text)
        whole, apart = (with_tool(each) for each in (messages, one_call_each(messages)))
        return not all(value in whole for value in values) and all(value in apart for value in values)

    takes_one_call = takes_calls and (loses(2) or loses(1, _TEXT))
    beside = turn([json.dumps(arguments) if joins_arguments else arguments], _TEXT)
    return Abilities(
        system=_RULE in sample([{"role": "system", "content": content(_RULE)}, hello]),
        tools=takes_tools or takes_message,
        tools_in_message=takes_message,
        needs_descriptions=takes_tools and _NAME not in with_tool([hello], described=False),
        needs_described_parameters=takes_tools and _NAME not in with_tool([hello], described_parameter=False),
        needs_plain_tools=takes_tools and not all(_NAME in sample([hello], tools=[tool]) for tool in odd),
        calls=takes_calls,
        joins_arguments=joins_arguments,
        takes_one_call=takes_one_call,
        loses_text=takes_calls and _TEXT not in with_tool(one_call_each(beside) if takes_one_call else beside),
        results=takes_results and (takes_tools or takes_message or takes_calls),
        embeds_results="tool_responses" in source and embedded != as_object and _RESULT in embedded,
        wants_turns=not sample([hello, hello]) and _USER_TEXT in sample([hello]),
        needs_user=_USER_TEXT in sample([hello]) and not all(with_tool([each]) for each in alone),
    )


def in_turns(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which user and assistant alternate. Messages of the same role are joined, and a user's text is
    joined to a tool result before it. If an assistant's message comes first, an empty user message is put before it.
    Empty messages of the assistant are dropped, except for the last message."""
    result: list[Message] = []
    contents: list[list[Any]] = []  # contents of each resulting message
    for message in messages:
        role = message.get("role")
        last = result[-1] if result else {"role": "system"}
        is_empty = not message.get("content") and not message.get("tool_calls")
        if role == "assistant" and is_empty and message is not messages[-1]:
            continue
        joins = role == last["role"] in ("user", "assistant") or (role, last["role"]) == ("user", "tool")
        if role == "assistant" and last["role"] == "system":
            result.append({"role": "user", "content": ""})
            contents.append([""])
        if joins and not last.get("tool_calls"):
            for name, value in message.items():
                last.setdefault(name, value)
            contents[-1].append(message.get("content", ""))
        else:
            result.append({**message})
            contents.append([message.get("content", "")])
    for message, content in zip(result, contents, strict=True):
        if len(content) > 1:
            message["content"] = _joined(content)
    return result


def _joined(contents: Sequence[Any]) -> Any:
    """Return several contents as one: a text, or parts if any of them has parts."""
    texts = [*takewhile(lambda each: isinstance(each, str), contents)]
    text = "\n\n".join(filter(None, texts))
    if len(texts) == len(contents):
        return text
    parts = [{"type": "text", "text": text}] if texts else []
    for each in contents[len(texts) :]:
        parts += [{"type": "text", "text": each}] if isinstance(each, str) else each
    return parts


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return messages with one call each, followed by its result. Text next to calls becomes a message of its own."""
    result: list[Message] = []
    placed: set[int] = set()
    for at, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not calls:
            if at not in placed:
                result.append(message)
            continue
        rest = {key: value for key, value in message.items() if key not in ("tool_calls", "content")}
        if message.get("content"):
            result.append({"role": message["role"], "content": message["content"]})
        results: dict[object, list[int]] = {}  # keyed by the call's id
        for one in takewhile(lambda one: messages[one]["role"] == "tool", range(at + 1, len(messages))):
            results.setdefault(messages[one].get("tool_call_id"), []).append(one)
        for call in calls:
            result.append({**rest, "tool_calls": [call]})
            rest = {"role": message["role"]}  # Only the first message gets the reasoning.
            own = results.pop(call.get("id"), ())
            result += (messages[one] for one in own)
            placed.update(own)
    return result
