"""The items of a conversation over /v1/responses: those of clients, those that are stored, and their messages.

An item is a dictionary, checked and complete, in the form in which the API returns it. This file knows nothing of HTTP.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from oaiserve.routes.invalid import invalid, needed, show
from oaiserve.routes.media import MediaPart, MediaReader
from oaiserve.routes.objects import (
    EarlierReasoning,
    EarlierText,
    InputImage,
    InputItem,
    InputText,
    ItemPart,
    RefusalPart,
    SoundPart,
)
from oaiserve.routes.responses.offered import arguments_of
from oaiserve.routes.tools import joined_name

BEFORE_SUMMARY = "This is a summary of the conversation so far:"

Item = dict[str, Any]
stored_items = msgspec.json.Decoder(list[Item])


def references(given: str | Sequence[InputItem]) -> list[str]:
    """Return the ids of the items to which the client refers."""
    if isinstance(given, str):
        return []
    numbered = enumerate(given)
    return [needed(f"input[{i}]", item, "id") for i, item in numbered if item.type == "item_reference"]


def input_items(
    given: str | Sequence[InputItem], new_id: Callable[[str], str], referred: Mapping[str, Item], param: str = "input"
) -> list[Item]:
    """Return the items of a client, with ids by `new_id`, of a prefix, and those `referred` to. `param` is the field
    of the request that they came from. Raises InvalidRequest."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    if not given:
        raise invalid(param, "must hold at least one item")
    return [_item(f"{param}[{number}]", item, new_id, referred) for number, item in enumerate(given)]


def _item(where: str, item: InputItem, new_id: Callable[[str], str], referred: Mapping[str, Item]) -> Item:
    def identity(prefix: str) -> Item:
        return {"id": item.id or new_id(prefix), "type": item.type or "message", "status": "completed"}

    match item.type:
        case "function_call":
            called = {name: needed(where, item, name) for name in ("call_id", "name", "arguments")}
            namespace = {} if item.namespace is None else {"namespace": item.namespace}
            return {**identity("fc"), **called, **namespace}
        case "custom_tool_call":
            return {**identity("ctc"), **{name: needed(where, item, name) for name in ("call_id", "name", "input")}}
        case "function_call_output" | "custom_tool_call_output":
            call_id, output = needed(where, item, "call_id"), needed(where, item, "output")
            return {
                **identity("fco" if item.type == "function_call_output" else "ctco"),
                "call_id": call_id,
                "output": output if isinstance(output, str) else _parts(output),
            }
        case "reasoning":
            summary = [{"type": "summary_text", "text": part.text} for part in item.summary or []]
            content = item.content or []
            if isinstance(content, str) or not all(isinstance(part, EarlierReasoning) for part in content):
                reason = "must be a list of parts of the type 'reasoning_text'"
                raise invalid(where.partition("[")[0], reason, f"{where}.content")
            if not content and (thought := read_encrypted(item.encrypted_content)):
                content = [EarlierReasoning(thought)]
            return {**identity("rs"), "summary": summary, "content": _parts(content)}
        case "item_reference":
            item_id: str = needed(where, item, "id")
            if item_id not in referred:
                reason = f"there is no item {show(item_id)} in the stored responses. Please send the item itself"
                raise invalid(where.partition("[")[0], reason, f"{where}.id")
            return referred[item_id]
        case "compaction" if read_encrypted(item.encrypted_content):
            return {**identity("cmp"), "encrypted_content": item.encrypted_content}
        case "compaction_trigger":  # the routes that know it have taken it away
            raise invalid(where.partition("[")[0], "may only be the last item of a request for a response", where)
        case "message" | None:
            pass
        case other:  # of a tool that runs elsewhere, or of another server: nothing in it is for this model
            return identity(other)
    role, content = needed(where, item, "role"), needed(where, item, "content")
    if isinstance(content, str):
        content = [EarlierText(content) if role == "assistant" else InputText(content)]
    for number, part in enumerate(content):
        place = f"{where}.content[{number}].type"
        if isinstance(part, EarlierReasoning):
            raise invalid(where.partition("[")[0], "reasoning is an item of its own", place)
        if isinstance(part, MediaPart) and role != "user":
            raise invalid(where.partition("[")[0], "images and sounds are in messages of users and in outputs", place)
    return {**identity("msg"), "role": role, "content": _parts(content)}


def _parts(parts: Iterable[ItemPart | EarlierReasoning]) -> list[Item]:
    shown: list[Item] = []
    for part in parts:
        match part:
            case EarlierText(text):
                shown.append({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
            case InputText(text):
                shown.append({"type": "input_text", "text": text})
            case EarlierReasoning(text):
                shown.append({"type": "reasoning_text", "text": text})
            case RefusalPart(refusal):
                shown.append({"type": "refusal", "refusal": refusal})
            case InputImage() | SoundPart():  # a prompt has them as files
                shown.append({name: value for name, value in msgspec.to_builtins(part).items() if value is not None})
    return shown


def since_compaction(items: Sequence[Item]) -> list[Item]:
    """Return the items that a conversation goes on from: those before its last compaction were made shorter by it."""
    readable = (number for number, item in enumerate(items) if read_encrypted(item.get("encrypted_content")))
    last = max((number for number in readable if items[number]["type"] == "compaction"), default=0)
    return [*kept(items[:last]), *items[last:]]


def kept(items: Iterable[Item]) -> list[Item]:
    """Return the items that a compaction leaves as they are."""
    return [item for item in items if item["type"] == "message" and item["role"] != "assistant"]


def chat_messages(earlier: Iterable[Item], new: Sequence[Item], media: MediaReader) -> list[dict[str, Any]]:
    """Return the chat messages of the items. Raises InvalidRequest for a `new` item with the result of an unknown
    call, and for media that are not read."""
    messages: list[dict[str, Any]] = []
    call_ids: set[str] = set()
    reasoning = ""  # of the message or the call that follows
    for number, item in enumerate((*(earlier := list(earlier)), *new), start=-len(earlier)):
        where = f"input[{number}]" if number >= 0 else f"the stored item {item['id']}"
        match item["type"]:
            case "message":
                thought = reasoning if item["role"] == "assistant" else ""
                messages.append(_message(item, thought, f"{where}.content", media))
                reasoning = ""
            case "reasoning":
                reasoning = _text(item.get("content") or item["summary"])
            case "function_call" | "custom_tool_call":
                if reasoning or not messages or messages[-1]["role"] != "assistant":
                    messages.append(_message({"role": "assistant", "content": []}, reasoning, where, media))
                reasoning = ""
                is_custom = item["type"] == "custom_tool_call"
                function = {
                    "name": joined_name(item.get("namespace"), item["name"]),
                    "arguments": arguments_of(item["input"]) if is_custom else item["arguments"],
                }
                call = {"id": item["call_id"], "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
                call_ids.add(item["call_id"])
            case "function_call_output" | "custom_tool_call_output":
                call_id, output = item["call_id"], item["output"]
                if call_id not in call_ids:
                    reason = f"there is no call {show(call_id)} before this output of it"
                    raise invalid("input", reason, f"{where}.call_id" if number >= 0 else where)
                content = output if isinstance(output, str) else _chat_content(output, f"{where}.output", media)
                messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
            case "compaction" if summary := read_encrypted(item.get("encrypted_content")):
                messages.append({"role": "user", "content": f"{BEFORE_SUMMARY}\n\n{summary}"})
    return messages


def _message(item: Mapping[str, Any], reasoning: str, where: str, media: MediaReader) -> dict[str, Any]:
    thought = {"reasoning": reasoning} if reasoning else {}
    return {"role": item["role"], "content": _chat_content(item["content"], where, media), **thought}


def _chat_content(parts: Sequence[Mapping[str, Any]], where: str, media: MediaReader) -> str | list[dict[str, Any]]:
    """Return the content of a message: a string if that can hold it, as most clients of chat send."""
    content: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        if kind := _MEDIA.get(part["type"]):
            content.append(media.part(msgspec.convert(part, kind), f"{where}[{number}]", "input"))
        else:
            content.append({"type": "text", "text": part["refusal"] if part["type"] == "refusal" else part["text"]})
    is_text = len(content) < 2 and all("text" in part for part in content)
    return "".join(part["text"] for part in content) if is_text else content


_MEDIA: dict[str, type[MediaPart]] = {"input_image": InputImage, "input_audio": SoundPart}
_ENCRYPTED = "oaiserve:"


def encrypted(text: str) -> str:
    """Return a text in the form of `encrypted_content`, which clients send back as it is. It is no secret."""
    return _ENCRYPTED + b64encode(text.encode()).decode()


def read_encrypted(content: str | None) -> str:
    """Return the text in the `encrypted_content` of an item, or "" if another server has made it."""
    if content is None or not content.startswith(_ENCRYPTED):
        return ""
    try:
        return b64decode(content.removeprefix(_ENCRYPTED), validate=True).decode()
    except ValueError:
        return ""


def _text(parts: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)
