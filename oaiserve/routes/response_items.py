"""The items of a talk over /v1/responses: what a client may send, what is kept, and the messages that they stand for.

An item is a dictionary, checked and complete, in the form in which the API returns it. This file knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from oaiserve.errors import InvalidRequest
from oaiserve.routes.protocol import invalid, show

Item = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # parts, and where each has its text


def references(given: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of the items that the client refers to instead of sending them."""
    if isinstance(given, str):
        return []
    ids = []
    for number, item in enumerate(given):
        if item.get("type") == "item_reference":
            ids.append(_string(f"input[{number}]", item, "id"))
    return ids


def input_items(
    given: str | Sequence[Mapping[str, Any]], new_id: Callable[[str], str], referred: Mapping[str, Item]
) -> list[Item]:
    """Return the items that a client has sent. `new_id` makes the id of one that has none, out of its prefix, and
    `referred` has the items that it only refers to. Raises InvalidRequest."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise invalid("input", "must hold at least one item")
    return [_item(f"input[{number}]", item, new_id, referred) for number, item in enumerate(given)]


def _item(where: str, item: Mapping[str, Any], new_id: Callable[[str], str], referred: Mapping[str, Item]) -> Item:
    def identity(prefix: str) -> Item:
        given = item.get("id")
        is_given = isinstance(given, str) and given
        return {"id": given if is_given else new_id(prefix), "type": kind, "status": "completed"}

    kind = item.get("type") or "message"
    match kind:
        case "message":
            if (role := item.get("role")) not in ROLES:
                raise _invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {show(role)}")
            return {**identity("msg"), "role": role, "content": _content(where, item, role)}
        case "function_call":
            called = {name: _string(where, item, name) for name in ("call_id", "name", "arguments")}
            return {**identity("fc"), **called}
        case "function_call_output":
            call_id, output = _string(where, item, "call_id"), item.get("output")
            if isinstance(output, list):
                output = [_part(f"{where}.output[{i}]", part) for i, part in enumerate(output)]
            elif not isinstance(output, str):
                raise _invalid(f"{where}.output", f"must be a string or a list of parts, got {show(output)}")
            return {**identity("fco"), "call_id": call_id, "output": output}
        case "reasoning":
            parts = {name: _reasoning_parts(where, item, name) for name in ("summary", "content")}
            return {**identity("rs"), **parts}
        case "item_reference":
            item_id = _string(where, item, "id")
            if item_id not in referred:
                reason = f"there is no item {show(item_id)} in the stored responses. Please send the item itself"
                raise _invalid(f"{where}.id", reason)
            return referred[item_id]
    raise _invalid(f"{where}.type", f"must be one of {', '.join(TYPES)}, got {show(kind)}")


def _content(where: str, item: Mapping[str, Any], role: str) -> list[Item]:
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise _invalid(f"{where}.content", f"must be a string or a list of parts, got {show(content)}")
    return [_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]


def _part(where: str, part: object) -> Item:
    if not isinstance(part, Mapping):
        raise _invalid(where, f"must be an object, got {show(part)}")
    kind = part.get("type")
    if kind not in _TEXTS:
        raise _invalid(f"{where}.type", f"this server takes text only ({', '.join(_TEXTS)}), got {show(kind)}")
    text = {_TEXTS[kind]: _string(where, part, _TEXTS[kind])}
    return {"type": kind, **text, **({"annotations": [], "logprobs": []} if kind == "output_text" else {})}


def _reasoning_parts(where: str, item: Mapping[str, Any], name: str) -> list[Item]:
    parts = item.get(name) or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise _invalid(f"{where}.{name}", f"must be a list of objects, got {show(parts)}")
    kind = "summary_text" if name == "summary" else "reasoning_text"
    return [{"type": kind, "text": _string(f"{where}.{name}[{i}]", part, "text")} for i, part in enumerate(parts)]


def _string(where: str, value: Mapping[str, Any], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise _invalid(f"{where}.{name}", f"must be a string, got {show(text)}")
    return text


def chat_messages(earlier: Iterable[Item], new: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages that the items stand for, in the form of chat. Raises InvalidRequest for a `new` item that
    has the result of a call which nobody made."""
    messages: list[dict[str, Any]] = []
    call_ids: set[str] = set()
    reasoning = ""  # of the message or the call that follows
    for number, item in enumerate((*(earlier := list(earlier)), *new), start=-len(earlier)):
        match item["type"]:
            case "message":
                messages.append(_message(item, reasoning if item["role"] == "assistant" else ""))
                reasoning = ""
            case "reasoning":
                reasoning = _text(item.get("content") or item["summary"])
            case "function_call":
                if reasoning or not messages or messages[-1]["role"] != "assistant":
                    messages.append(_message({"role": "assistant", "content": []}, reasoning))
                reasoning = ""
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
                call_ids.add(item["call_id"])
            case "function_call_output":
                call_id, output = item["call_id"], item["output"]
                if call_id not in call_ids:
                    reason = f"there is no call {show(call_id)} before this output of it"
                    raise _invalid(f"input[{number}].call_id", reason)
                content = output if isinstance(output, str) else _chat_content(output)
                messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
    return messages


def _message(item: Mapping[str, Any], reasoning: str) -> dict[str, Any]:
    # Templates know it by one name or the other.
    thought = {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
    return {"role": item["role"], "content": _chat_content(item["content"]), **thought}


def _chat_content(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, str]]:
    """Return the content of a message: a string if that can hold it, as most clients of chat send."""
    texts = [part[_TEXTS[part["type"]]] for part in parts]
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def _text(parts: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)


def _invalid(where: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{where}': {reason}.", param="input")
