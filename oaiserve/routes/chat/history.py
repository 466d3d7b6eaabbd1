"""Repairs the calls and results of a history that other servers, cut answers or clients have damaged.

Templates and models expect each call to have a name, an id and an object of arguments, and the results of calls to
follow them in order. Everything else is put into this form, with a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from oaiserve.engine.request import ChatPrompt
from oaiserve.engine.text.plain_tools import plain_tool
from oaiserve.engine.text.template_abilities import Abilities
from oaiserve.routes.adaptations import Note
from oaiserve.routes.chat.call_arguments import object_text
from oaiserve.routes.chat.template_gaps import prompt_with_tools
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.dialects.raw_call import INPUT
from oaiserve.routes.intake.media import MediaReader

Message = dict[str, Any]
Placed = tuple[str, Message]  # a message, and its place in the request
UNKNOWN = "unknown_tool"
IS_JSON = "is no text, and read as JSON"
NO_RESULT = "There is no result: the call was interrupted."
ORPHAN = "The result of a tool:\n"
BEFORE_SUMMARY = "This is a summary of the conversation so far:"


@dataclass(slots=True)
class _Call:
    where: str
    call: dict[str, Any]
    given_id: str | None
    result: Message | None = None


@dataclass(slots=True)
class _Group:
    """A message of the assistant with its calls, and the messages up to the next one."""

    message: Message | None
    calls: list[_Call] = field(default_factory=list)
    later: list[Placed] = field(default_factory=list)


def calls_of(raw_calls: Iterable[object], where: str, note: Note) -> list[dict[str, Any]]:
    """Return the calls of the chat message at `where`: of functions, or of tools whose input is a text."""
    calls = []
    for number, call in enumerate(raw_calls):
        place = f"{where}.tool_calls[{number}]"
        if not isinstance(call, dict):
            note(place, "is no call, and left out")
            continue
        custom = call.get("custom")
        function = call.get("function")
        if isinstance(custom, dict):
            if custom.get("input") is None:
                note(f"{place}.custom.input", "is missing, and read as empty")
            function = {"name": custom.get("name"), "arguments": {INPUT: custom.get("input") or ""}}
        elif not isinstance(function, dict):
            note(place, "has no function, and is read as one")
            function = call
        elif isinstance(function.get("arguments"), dict | list):
            note(f"{place}.function.arguments", IS_JSON)
        if "type" not in call:
            note(place, "has no type, and is read as a call")
        calls.append({"id": call.get("id"), "function": function})
    return calls


def prompt_of(
    placed: Sequence[Placed],
    shown: Sequence[Mapping[str, Any]],
    dialect: Dialect,
    media: MediaReader,
    note: Note,
    **more: Any,
) -> ChatPrompt:
    """Return the prompt of checked messages, with a description of the tools `shown`. `more` are its other fields."""
    messages = repaired(placed, note, is_answered=more.get("add_generation_prompt", True))
    _note_changes(messages, dialect.abilities, note, more.get("param", "messages"))
    if dialect.abilities.needs_plain_tools and any(plain_tool(tool) != tool for tool in shown):
        note("tools", "schemas are shown in a plainer form, as the chat template fails at others")
    prompt = prompt_with_tools(messages, shown, dialect, **more)
    return replace(prompt, media=media.taken(prompt.messages, note))


def repaired(placed: Iterable[Placed], note: Note, *, is_answered: bool) -> list[Message]:
    """Return messages in which each call is followed by its result. If the last message `is_answered`, its calls have
    results, too."""
    groups = [_Group(None)]
    num_calls = 0
    for where, message in placed:
        if message["role"] != "assistant":
            groups[-1].later.append((where, message))
            continue
        ids: set[str] = set()
        groups.append(_Group(message))
        for call in message.get("tool_calls", ()):
            groups[-1].calls.append(_call(where, call, f"call_{num_calls}", ids, note))
            num_calls += 1
    _match(groups, note)
    result: list[Message] = []
    for group in groups:
        if group.message is not None:
            calls = [each.call for each in group.calls]
            result.append({**group.message, "tool_calls": calls} if calls else group.message)
        for each in group.calls:
            if each.result is not None:
                result.append({**each.result, "tool_call_id": each.call["id"]})
            elif is_answered or group is not groups[-1]:
                note(each.where, "a call has no result")
                result.append({"role": "tool", "content": NO_RESULT, "tool_call_id": each.call["id"]})
        result += (message for _, message in group.later)
    return result


def _call(where: str, call: Mapping[str, Any], new_id: str, ids: set[str], note: Note) -> _Call:
    """Return a call with a name, an object of arguments, and an id that is not in `ids`."""
    function = call["function"]
    if isinstance(stated_id := call.get("id"), str) and stated_id:
        given_id = stated_id
    else:
        given_id = None
    arguments, change = object_text(function.get("arguments"))
    if change:
        note(where, f"the arguments of a call {change}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        note(where, "a call has no name")
        name = UNKNOWN
    call_id = given_id if given_id and given_id not in ids else new_id
    if call_id != given_id:
        note(where, "a call has no id of its own")
    ids.add(call_id)
    return _Call(
        where, {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}, given_id
    )


def _match(groups: Iterable[_Group], note: Note) -> None:
    """Match results with calls by their ids; the last message with an id wins. A result with another id belongs to a
    call of the message right before it, if one is left. The other results become messages of the user."""
    waiting: dict[str | None, list[_Call]] = {}
    matched: set[int] = set()
    for group in groups:
        for call in reversed(group.calls):
            waiting.setdefault(call.given_id, []).append(call)
        for _, message in group.later:
            call_id = message.get("tool_call_id")
            if message["role"] == "tool" and call_id and (calls := waiting.get(call_id)):
                calls.pop().result = message
                matched.add(id(message))
    for group in groups:
        left = iter([call for call in group.calls if call.result is None])
        later = []
        for where, message in group.later:
            if id(message) in matched:
                continue
            if message["role"] != "tool":
                later.append((where, message))
            elif (taker := next(left, None)) is not None:
                taker.result = message
                note(where, "a result has the id of no call, and is given to the last one without a result")
            else:
                note(where, "a result without its call is shown as the user's text")
                later.append((where, _as_text(message)))
        results = [id(message) for _, message in group.later if message["role"] == "tool"]
        if [id(call.result) for call in group.calls if call.result is not None] != results[: len(group.calls)]:
            where = group.later[0][0] if group.later else group.calls[0].where
            note(where, "results are put behind their calls")
        group.later = later


def _as_text(result: Message) -> Message:
    content = result["content"]
    labelled = f"{ORPHAN}{content}" if isinstance(content, str) else [{"type": "text", "text": ORPHAN}, *content]
    return {"role": "user", "content": labelled}


def _note_changes(messages: Sequence[Message], abilities: Abilities, note: Note, param: str) -> None:
    roles = [message["role"].replace("developer", "system") for message in messages]
    if "system" in roles and not abilities.system:
        note(param, "the system's text is put before the user's, as the chat template has no place for it")
    elif "system" in roles[1:] and not abilities.late_systems:
        note(param, "the texts of the system are put in front, as the chat template takes one")
    if abilities.needs_user and "user" not in roles:
        note(param, "an empty message of the user is added, as the chat template needs one")
    if abilities.loses_text and any(message.get("tool_calls") and message["content"] for message in messages):
        note(param, "text next to calls is left out, as the chat template has no place for it")
    said = [role for role in roles if role != "system"]
    repeats = any(pair in (("user", "user"), ("assistant", "assistant"), ("tool", "user")) for pair in pairwise(said))
    if abilities.wants_turns and (repeats or said[:1] == ["assistant"]):
        note(param, "messages are joined, as the chat template wants turns")
