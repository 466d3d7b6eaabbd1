"""The text of content that chat templates have no place for: files, results of hosted tools, and parts and items of
unknown types, as other APIs and servers send them.

There are ever more types, but the fields with text for the model have few names. So text is read by these names,
whatever the type. Ids, signatures and files that are not text are left out.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any

_MOST_DEPTH = 12
_TEXT_FIELDS = (
    *("title", "filename", "url", "page_age", "context", "source", "sources", "text", "refusal", "thinking", "summary"),
    *("stdout", "stderr", "logs", "message", "output", "outputs", "content", "results", "result", "error", "reason"),
    *("file", "lines", "tool_references", "tool_name", "tabs"),
)
_NAMES_OF_FILES = ("title", "filename", "context")
_DATA_URL = re.compile(r"data:[^,]{0,200}?;base64,", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/=_\r\n-]{256,}")
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f]")
# The model reads the first text in place of something missing. A user who asks about it reads the second.
LEFT_OUT = " left out]"
NOT_READ = "this server reads text, images and sounds, no video and no other files"
_MEDIA = {
    "image": f"[Image{LEFT_OUT}",
    "image_url": f"[Image{LEFT_OUT}",
    "input_image": f"[Image{LEFT_OUT}",
    "computer_screenshot": f"[Screenshot{LEFT_OUT}",
    "audio": f"[Sound{LEFT_OUT}",
    "input_audio": f"[Sound{LEFT_OUT}",
    "video_url": f"[Video{LEFT_OUT}",
}
_FILES = {"file": f"[File{LEFT_OUT}", "input_file": f"[File{LEFT_OUT}", "document": f"[Document{LEFT_OUT}"}
# Prefixes for text that the model could otherwise take for the user's words.
_LABELS = {"document": "[Document]", "search_result": "[Search result]", "tool_reference": "[Tool found]"}
# Types that notes may name, without their endings. Other types are text from a client, which notes must not contain.
_NAMED = {
    *(
        *_MEDIA,
        *_FILES,
        *_LABELS,
        "redacted_thinking",
        "thinking",
        "reasoning",
        "refusal",
        "summary_text",
        "input_text",
    ),
    *("output_text", "text", "local_shell", "shell", "apply_patch", "computer", "mcp", "web_search", "file_search"),
    *("code_interpreter", "image_generation", "tool_search", "mcp_list_tools", "mcp_approval_request"),
    *("mcp_approval_response", "mcp_tool_listing", "compaction", "tool", "advisor", "bash_code_execution"),
    *("browser_state", "code_execution", "text_editor_code_execution", "web_fetch", "server", "container_upload"),
    *("fallback", "tool_addition", "tool_removal", "item_reference"),
}
_ENDING = re.compile(r"(_call)?(_output)?$|(_tool)?_(use|result)$")


def name_of(value: Mapping[str, Any]) -> str:
    kind = str(value.get("type"))
    if kind in _NAMED or _ENDING.sub("", kind) in _NAMED:
        return kind
    return "content of another type"


def text_of(value: object) -> str:
    """Return the text in a part, a block or an item; "" if it has none for the model."""
    return "\n".join(_texts(value, _MOST_DEPTH))


def _texts(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        if value and not _is_binary(value):
            yield value
    elif isinstance(value, list) and depth:
        for each in value:
            yield from _texts(each, depth - 1)
    elif isinstance(value, dict) and depth:
        kind = str(value.get("type"))
        is_missing = is_unread(value)
        if is_missing:
            yield _MEDIA.get(kind) or _FILES[kind]
        elif kind in _LABELS:
            yield _LABELS[kind]
        if code := value.get("error_code"):
            yield f"Error: {code}"
        for name in _NAMES_OF_FILES if is_missing else _TEXT_FIELDS:
            yield from _texts(value.get(name), depth - 1)
        yield from filter(None, [_file_text(value)])
        outcome = value.get("outcome")
        if code := value.get("return_code") or (outcome.get("exit_code") if isinstance(outcome, dict) else None):
            yield f"Exit code {code}"


def is_unread(part: Mapping[str, Any]) -> bool:
    """Return whether a part is a medium, or a file whose text this server does not read, such as a PDF."""
    if (kind := str(part.get("type"))) not in _FILES:
        return kind in _MEDIA
    holder = next((inner for name in ("file", "source") if isinstance(inner := part.get(name), dict)), part)
    return _file_text(holder) is None and not holder.keys() & {"content", "text"}


def _is_binary(text: str) -> bool:
    return _DATA_URL.match(text) is not None or _BASE64.fullmatch(text) is not None


def _file_text(holder: Mapping[str, Any]) -> str | None:
    """Return the text of a file in a part of chat or responses, or of a document's source, or None."""
    data = holder.get("file_data", holder.get("data"))
    if not isinstance(data, str):
        return None
    if holder.get("type") == "text":
        return data
    head = _DATA_URL.match(data)
    if head is None and "file_data" not in holder and not str(holder.get("media_type")).startswith("text/"):
        return None
    try:
        text = b64decode(data[head.end() if head else 0 :], validate=True).decode()
    except ValueError:
        return None
    if text.startswith("%PDF") or _CONTROLS.search(text):
        return None
    return text
