"""The text of content that other APIs and servers have and a chat template has not: files, results of hosted tools,
parts and items of types that are not known yet.

Their types grow in number, but the names of fields with text for the model recur. So text is read by these names,
whatever the type. Ids, signatures and files that are no text are left out.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any

_MOST_DEPTH = 12
_TEXT_FIELDS = (
    *("title", "filename", "url", "source", "sources", "text", "refusal", "thinking", "summary", "stdout", "stderr"),
    *("logs", "message", "output", "outputs", "content", "results", "result", "error", "reason"),
)
_DATA_URL = re.compile(r"data:[^,]{0,200}?;base64,", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/=_\r\n-]{256,}")
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f]")
# What a model reads where something has no text.
LEFT_OUT = {
    "image": "[Image left out]",
    "image_url": "[Image left out]",
    "input_image": "[Image left out]",
    "computer_screenshot": "[Screenshot left out]",
    "input_audio": "[Sound left out]",
    "video_url": "[Video left out]",
    "file": "[File left out]",
    "input_file": "[File left out]",
    "document": "[Document left out]",
}
# Types that notes may name. Others are a client's text.
_NAMED = {
    *LEFT_OUT,
    *("redacted_thinking", "thinking", "reasoning", "refusal", "summary_text", "input_text", "output_text", "text"),
    *("local_shell_call", "shell_call", "apply_patch_call", "computer_call", "mcp_call", "web_search_call"),
    *("file_search_call", "code_interpreter_call", "image_generation_call", "tool_search_call", "tool_search_output"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction", "tool_result", "tool_use"),
    *("local_shell_call_output", "shell_call_output", "apply_patch_call_output", "computer_call_output"),
}


def name_of(value: Mapping[str, Any]) -> str:
    """Return the type of a part or an item for a note."""
    return str(kind) if (kind := value.get("type")) in _NAMED else "another type"


def text_of(value: object) -> str:
    """Return the text in a part or an item, or "" if nothing in it is for the model."""
    return "\n".join(_texts(value, _MOST_DEPTH))


def _texts(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        if value and not is_binary(value):
            yield value
    elif isinstance(value, list) and depth:
        for each in value:
            yield from _texts(each, depth - 1)
    elif isinstance(value, dict) and depth:
        texts = [text for name in _TEXT_FIELDS for text in _texts(value.get(name), depth - 1)]
        texts += filter(None, [file_text(value)])
        yield from texts or filter(None, [LEFT_OUT.get(str(value.get("type")))])
        outcome = value.get("outcome")
        if isinstance(outcome, dict) and outcome.get("exit_code"):
            yield f"Exit code {outcome['exit_code']}"


def is_binary(text: str) -> bool:
    return _DATA_URL.match(text) is not None or _BASE64.fullmatch(text) is not None


def file_text(part: Mapping[str, Any]) -> str | None:
    """Return the text of a file in a part of chat or responses, or of a document's source, or None."""
    inner = part.get("file")
    holder = inner if isinstance(inner, dict) else part
    data = holder.get("file_data", holder.get("data"))
    if isinstance(data, str) and holder.get("type") == "text":
        return data
    if not isinstance(data, str) or ((found := _DATA_URL.match(data)) is None and "file_data" not in holder):
        return None
    try:
        text = b64decode(data[found.end() if found else 0 :], validate=True).decode()
    except ValueError:
        return None
    if text.startswith("%PDF") or _CONTROLS.search(text):
        return None
    return "\n".join(filter(None, (str(holder.get("filename") or ""), text)))


_RESULTS = ("output", "outputs", "results", "result", "error")
_OF_SERVER = {"id", "type", "status", "call_id", "server_label", "container_id", "created_by", "approval_request_id"}


def hosted_call(item: Mapping[str, Any]) -> tuple[str, str, Any, str] | None:
    """Return the id, the name, the arguments and the result of a call of a hosted tool. Of one that has neither a
    result nor an output of its own, the model is told nothing."""
    found = {name: item.get(name) for name in _RESULTS}
    action = item.get("action")
    result = text_of([found, {"sources": action.get("sources")} if isinstance(action, dict) else None])
    call_id = item.get("call_id")
    if not result and not call_id:
        return None
    given = {name: value for name, value in item.items() if name not in _OF_SERVER and name not in _RESULTS}
    name = given.pop("name", None) or str(item["type"]).removesuffix("_call")
    arguments: Any = {name: value for name, value in given.items() if value is not None}
    if len(arguments) == 1 and isinstance(only := next(iter(arguments.values())), dict | str):
        arguments = only if isinstance(only, dict) or "arguments" in arguments else arguments
    return str(call_id or item["id"]), str(name), arguments, result
