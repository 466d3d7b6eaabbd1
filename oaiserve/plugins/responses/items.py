"""The items of a conversation over /v1/responses: those of clients, stored ones, and their messages.

An item is a dictionary, checked and complete, in the form in which the API returns it. This file knows nothing of HTTP.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from oaiserve.plugins.responses.offered import arguments_of
from oaiserve.plugins.responses.store import StoredDecoder
from oaiserve.routes.adaptations import STORED, Adaptations
from oaiserve.routes.answer.common_shape import is_own_call_id
from oaiserve.routes.chat.contents import ONE_PART, WITHOUT_TYPE, ContentReader, has_parts, is_part, thoughts_in
from oaiserve.routes.chat.foreign import name_of, text_of
from oaiserve.routes.chat.history import BEFORE_SUMMARY, IS_JSON, UNKNOWN, Placed, calls_of
from oaiserve.routes.chat.tools import joined_name
from oaiserve.routes.intake.invalid import converted, invalid, needed, show
from oaiserve.routes.intake.last_turn import first_asked
from oaiserve.routes.intake.object_types import InputItem

IN_CHATS_FORM = "is read in chat's form"
# Fields of a call of a hosted tool: its result, and what the server adds.
_RESULTS = ("output", "outputs", "results", "result", "error")
_OF_SERVER = {"id", "type", "status", "call_id", "server_label", "container_id", "created_by", "approval_request_id"}

Item = dict[str, Any]
stored_items = StoredDecoder(list[Item])


def references(items: str | Sequence[Mapping[str, Any]]) -> list[str]:
    if isinstance(items, str):
        return []
    return [str(item.get("id")) for item in items if item.get("type") == "item_reference"]


def input_items(
    items: str | Sequence[Mapping[str, Any]],
    new_id: Callable[[str], str],
    referred: Mapping[str, Item],
    adaptations: Adaptations,
    param: str = "input",
) -> list[Item]:
    """Return the items of a client, with ids from `new_id`, which takes a prefix, and the `referred` items. `param` is
    the field of the request that has them. No two have the same id. Raises InvalidRequest."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not items:
        raise invalid(param, "must hold at least one item")
    last: Mapping[str, Any] = items[-1]
    if last.get("type") == "item_reference" and isinstance(last.get("id"), str) and last["id"] not in referred:
        reason = f"there is no item {show(last['id'])} in the stored responses. Please send the item itself"
        raise invalid(param, reason, f"{param}[{len(items) - 1}].id")
    read = [_item(f"{param}[{number}]", item, new_id, referred, adaptations) for number, item in enumerate(items)]
    return with_distinct_ids(read, new_id)


def with_distinct_ids(items: Iterable[Item], new_id: Callable[[str], str], taken: Iterable[str] = ()) -> list[Item]:
    """Return the items, with a new id for each whose id an earlier item has, or is `taken`. Otherwise a client that
    reads pages of a list by the last id of each would never reach the end."""
    ids = set(taken)
    distinct: list[Item] = []
    for item in items:
        if item["id"] in ids:
            item = {**item, "id": new_id(_PREFIXES.get(item["type"]) or "it")}
        ids.add(item["id"])
        distinct.append(item)
    return distinct


def _item(
    where: str,
    raw: Mapping[str, Any],
    new_id: Callable[[str], str],
    referred: Mapping[str, Item],
    adaptations: Adaptations,
) -> Item:
    kind = raw.get("type")
    if kind in (None, "message") and raw.get("role") in ("tool", "function"):
        adaptations.note(where, IN_CHATS_FORM)
        raw = {"type": "function_call_output", "call_id": raw.get("tool_call_id"), "output": raw.get("content")}
    if kind == "configuration_update" and any(isinstance(raw.get(name), dict) for name in ("text", "reasoning")):
        reason = "settings cannot change within a conversation. Send 'text' and 'reasoning' with the request"
        raise invalid(where.partition("[")[0], reason, where)
    if isinstance(kind, str) and kind not in _PREFIXES:  # an item of a hosted tool, or of another server
        ids = {name: raw[name] for name in ("id", "call_id") if isinstance(raw.get(name), str) and raw[name]}
        others = {name: value for name, value in raw.items() if name not in ("id", "call_id")}
        return {"id": ids.get("id") or new_id("it"), "status": "completed", **others, **ids}
    item = converted(InputItem, raw, where)
    prefix = _PREFIXES[item.type or "message"]
    identity = {"id": item.id or new_id(prefix), "type": item.type or "message", "status": "completed"}
    call_id = item.call_id or identity["id"]
    for name in _NEEDED.get(item.type or "", ()):
        if raw.get(name) is None:
            what = "is missing" if name in ("call_id", "name") else "is missing, and read as empty"
            adaptations.note(f"{where}.{name}", what)
    _note_content(item.content, f"{where}.content", adaptations)
    match item.type:
        case "function_call":
            if item.arguments is not None and not isinstance(item.arguments, str):
                adaptations.note(f"{where}.arguments", IS_JSON)
            call = {**identity, "call_id": call_id, "name": item.name or UNKNOWN, "arguments": _text(item.arguments)}
            if item.namespace is not None:
                call["namespace"] = item.namespace
            return call
        case "custom_tool_call":
            return {**identity, "call_id": call_id, "name": item.name or UNKNOWN, "input": item.input or ""}
        case "function_call_output" | "custom_tool_call_output":
            output = _parts(item.output, "") if has_parts(item.output) else _text(item.output)
            if item.output is not None and not (isinstance(item.output, str) or has_parts(item.output)):
                adaptations.note(f"{where}.output", "is read as a text in JSON")
            return {**identity, "call_id": call_id, "output": output}
        case "reasoning":
            parts = _parts(item.content, "reasoning_text")
            if not parts and (thought := read_encrypted(item.encrypted_content)):
                parts = [{"type": "reasoning_text", "text": thought}]
            return {**identity, "summary": _parts(item.summary, "summary_text"), "content": parts}
        case "item_reference":
            return referred.get(needed(where, item, "id")) or identity
        case "compaction":
            return {**identity, "encrypted_content": item.encrypted_content}
        case "compaction_trigger":  # The routes that support it have removed it.
            raise invalid(where.partition("[")[0], "may only be the last item of a request for a response", where)
    role = needed(where, item, "role")
    if raw.get("phase"):
        adaptations.note(f"{where.partition('[')[0]}[].phase", "is left out: chat templates have no place for it")
    if item.content is None and not raw.get("tool_calls"):
        adaptations.note(f"{where}.content", "is missing, and read as empty")
    message = {**identity, "role": role, "content": _parts(item.content, f"{_SIDES.get(role, 'input')}_text")}
    if role == "assistant" and isinstance(calls := raw.get("tool_calls"), list) and calls:
        adaptations.note(where, IN_CHATS_FORM)
        message["tool_calls"] = calls_of(calls, where, adaptations.note)
    return message


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "item_reference": "",
    "compaction": "cmp",
    "compaction_trigger": "",
}
# Fields that an item must have by the API, by type.
_NEEDED = {
    "function_call": ("call_id", "name", "arguments"),
    "custom_tool_call": ("call_id", "name", "input"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call_output": ("call_id", "output"),
}
_SIDES = {"assistant": "output"}
_MORE_FIELDS: dict[str, Item] = {"output_text": {"annotations": [], "logprobs": []}}


def _note_content(content: object, where: str, adaptations: Adaptations) -> None:
    if isinstance(content, dict):
        adaptations.note(where, ONE_PART)
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, str):
            adaptations.note(f"{where}[{number}]", WITHOUT_TYPE)


def _text(value: object) -> str:
    """Return a text, or the JSON of another value."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def _parts(content: object, text_type: str) -> list[Any]:
    """Return the parts of a content in the API's form. A string becomes one part of this type."""
    if content is None:
        return []
    shown: list[Any] = []
    for part in content if isinstance(content, list) else [content]:
        fields = {"type": text_type, "text": part} if isinstance(part, str) else part
        if isinstance(fields, dict) and isinstance(fields.get("text"), str) and fields.get("type") in _TEXT_TYPES:
            shown.append({**_MORE_FIELDS.get(fields["type"], {}), **fields})
        elif isinstance(fields, dict):
            shown.append({name: value for name, value in fields.items() if value is not None})
        else:
            shown.append(fields)
    return shown


_TEXT_TYPES = ("input_text", "output_text", "reasoning_text", "summary_text")


def since_compaction(items: Sequence[Item]) -> list[Item]:
    """Return the items from which a conversation continues: its last compaction replaces the ones before it."""
    readable = (number for number, item in enumerate(items) if read_encrypted(item.get("encrypted_content")))
    last = max((number for number in readable if items[number]["type"] == "compaction"), default=0)
    return [*kept(items[:last]), *items[last:]]


def kept(items: Iterable[Item]) -> list[Item]:
    return [item for item in items if item["type"] == "message" and item["role"] != "assistant"]


def chat_messages(
    earlier: Iterable[Item], new: Sequence[Item], reader: ContentReader, adaptations: Adaptations
) -> list[Placed]:
    """Return the chat messages of the items, each with its place. Raises InvalidRequest for unreadable media in the
    user's last turn."""
    placed: list[Placed] = []
    reasoning = ""  # reasoning of the message or the call that follows
    first_question = first_asked([item.get("role") if item["type"] == "message" else None for item in new])

    def called(where: str, call_id: object, name: object, arguments: object) -> None:
        nonlocal reasoning
        if reasoning or not placed or placed[-1][1]["role"] != "assistant":
            placed.append((where, _thought("", reasoning)))
            reasoning = ""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        placed[-1][1].setdefault("tool_calls", []).append(call)

    def answered(where: str, call_id: object, content: str | list[dict[str, Any]]) -> None:
        placed.append((where, {"role": "tool", "content": _joined(content), "tool_call_id": call_id}))

    for number, item in enumerate((*(earlier := list(earlier)), *new), start=-len(earlier)):
        where = f"input[{number}]" if number >= 0 else f"{STORED}{item['id']}"
        match item["type"]:
            case "message":
                is_asked = number >= first_question and item["role"] != "assistant"
                content = _joined(reader.read(item["content"], f"{where}.content", item["role"], is_asked=is_asked))
                if item["role"] == "assistant":
                    thought = reasoning or thoughts_in(item["content"])
                    # A text right after calls belongs to the same answer.
                    if content and not thought and placed and (calls := placed[-1][1].get("tool_calls")):
                        placed[-1][1]["content"] = _after(placed[-1][1]["content"], content)
                        # After this server's calls it is the model's own text. Codex returns it without its id.
                        if not is_own_call_id(calls[-1]["id"]):
                            adaptations.note(where, "text after a call is shown before it")
                    else:
                        placed.append((where, _thought(content, thought)))
                else:
                    placed.append((where, {"role": item["role"], "content": content}))
                reasoning = ""
                for call in item.get("tool_calls", ()):
                    called(where, call["id"], call["function"].get("name"), call["function"].get("arguments"))
            case "reasoning":
                reasoning = text_of(item.get("content") or item.get("summary"))
                if not reasoning:
                    adaptations.note(where, "reasoning is left out, as it has no text")
            case "function_call":
                called(where, item["call_id"], joined_name(item.get("namespace"), item["name"]), item["arguments"])
            case "custom_tool_call":
                called(where, item["call_id"], item["name"], arguments_of(item["input"]))
            case "function_call_output" | "custom_tool_call_output":
                result = reader.read(item["output"], f"{where}.output", "tool", is_asked=False)
                answered(where, item["call_id"], result)
            case "compaction" if summary := read_encrypted(item.get("encrypted_content")):
                placed.append((where, {"role": "user", "content": f"{BEFORE_SUMMARY}\n\n{summary}"}))
            case kind if kind.endswith("_call") and (call := hosted_call(item)) is not None:
                adaptations.note(where, f"{name_of(item)} is shown as the call of a tool")
                called(where, *call[:3])
                if call[3]:
                    answered(where, call[0], call[3])
            case "additional_tools" | "tool_search_output":
                adaptations.note(where, "its tools are shown with the others, before the conversation")
                if item["type"] == "tool_search_output":
                    names = ", ".join(_names_in(item.get("tools")))
                    answered(where, item.get("call_id") or item["id"], f"These tools can be called now: {names}")
            case kind if kind.endswith("_call_output"):
                output = item.get("output")
                adaptations.note(where, f"{name_of(item)} is shown as the result of a tool")
                is_content = is_part(output) or has_parts(output)
                if is_content:
                    shown = reader.read(output, f"{where}.output", "tool", is_asked=False)
                else:
                    shown = text_of(output)
                answered(where, item.get("call_id") or item["id"], shown)
            case kind if kind in _WITHOUT_TEXT or kind.endswith("_call") or not (text := text_of(item)):
                adaptations.note(where, f"{name_of(item)} is left out")
            case _:
                adaptations.note(where, f"{name_of(item)} is shown by its text")
                placed.append((where, {"role": "user", "content": text}))
    return placed


# Items for the client, or for the server that made them.
_WITHOUT_TEXT = (
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction"),
    "item_reference",
)


def _names_in(tools: object) -> list[str]:
    return [str(tool.get("name")) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []


def _after(before: str | list[dict[str, Any]], content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the contents of two messages as one."""
    if not before:
        return content
    if isinstance(before, str) and isinstance(content, str):
        return f"{before}\n\n{content}"
    parts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (before, content))
    return [part for each in parts for part in each]


def _thought(content: str | list[dict[str, Any]], reasoning: str) -> dict[str, Any]:
    thought = {"reasoning": reasoning} if reasoning else {}
    return {"role": "assistant", "content": content, **thought}


def _joined(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message, as a string if possible, which most clients of chat send."""
    if isinstance(content, list) and len(content) < 2 and all(part.keys() == {"type", "text"} for part in content):
        return "".join(part["text"] for part in content)
    return content


_ENCRYPTED = "oaiserve:"


def encrypted(text: str) -> str:
    """Return a text in the form of `encrypted_content`, which clients send back unchanged. It is not a secret."""
    return _ENCRYPTED + b64encode(text.encode()).decode()


def read_encrypted(content: str | None) -> str:
    """Return the text in the `encrypted_content` of an item, or "" if another server made it."""
    if content is None or not content.startswith(_ENCRYPTED):
        return ""
    try:
        return b64decode(content.removeprefix(_ENCRYPTED), validate=True).decode()
    except ValueError:
        return ""


def hosted_call(item: Mapping[str, Any]) -> tuple[str, str, Any, str] | None:
    """Return the id, name, arguments and result of a call of a hosted tool. If it has neither a result nor an output
    item, the model does not see the call."""
    results = {name: item.get(name) for name in _RESULTS}
    action = item.get("action")
    result = text_of([results, {"sources": action.get("sources")} if isinstance(action, dict) else None])
    call_id = item.get("call_id")
    if not result and not call_id:
        return None
    fields = {name: value for name, value in item.items() if name not in _OF_SERVER and name not in _RESULTS}
    name = fields.pop("name", None) or str(item["type"]).removesuffix("_call")
    arguments: Any = {name: value for name, value in fields.items() if value is not None}
    only = next(iter(arguments.values())) if len(arguments) == 1 else None
    if isinstance(only, dict) or (isinstance(only, str) and "arguments" in arguments):
        arguments = only
    return str(call_id or item["id"]), str(name), arguments, result
