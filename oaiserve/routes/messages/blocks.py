"""The text of blocks that Anthropic's API has and a chat template has not: documents, search results, tools that ran
elsewhere, and types that are not known yet.

Their types grow in number, but the names of fields with text for the model recur. So text is read by these names,
whatever the type. Ids, signatures, encrypted copies and files are left out.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Any

from oaiserve.routes.messages.body import Block

LEFT_OUT = " left out]"
_MOST_DEPTH = 12
_TEXT_FIELDS = (
    *("title", "url", "page_age", "context", "source", "text", "stdout", "stderr", "content", "lines"),
    *("tool_references", "tool_name", "tabs"),
)
# What a model reads before texts that it could take for words of the user.
_LABELS = {
    "document": "[Document]",
    "search_result": "[Search result]",
    "tool_reference": "[Tool found]",
    "image": f"[Image{LEFT_OUT}",
}
# Types that notes may name. Others are a client's text.
_NAMED = {
    *("advisor", "bash_code_execution", "browser_state", "code_execution", "mcp", "text_editor_code_execution"),
    *(
        "tool_use",
        "tool_result",
        "tool_search",
        "web_fetch",
        "web_search",
        "server",
        "container_upload",
        "compaction",
        "fallback",
        "thinking",
    ),
    *("redacted_thinking", "mcp_tool_listing", "tool_addition", "tool_removal", "document", "image", "search_result"),
}


def name_of(block: Block) -> str:
    """Return the name of a block for a note."""
    kind = str(block.get("type"))
    return kind if kind.removesuffix("_tool_result").removesuffix("_tool_use") in _NAMED else "a block of another type"


def text_of(value: object) -> str:
    """Return the text in a block or a part of one, or "" if nothing in it is for the model."""
    return "\n".join(_texts(value, _MOST_DEPTH))


def _texts(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, list) and depth:
        for each in value:
            yield from _texts(each, depth - 1)
    elif isinstance(value, dict) and depth:
        texts = [text for name in _TEXT_FIELDS for text in _texts(value.get(name), depth - 1)]
        texts += filter(None, [plain_text(value)])
        label = f"[Document{LEFT_OUT}" if is_unreadable(value) else _LABELS.get(str(value.get("type")))
        if label:
            yield label
        if code := value.get("error_code"):
            yield f"Error: {code}"
        yield from texts
        if code := value.get("return_code"):
            yield f"Exit code {code}"


def plain_text(source: dict[str, Any]) -> str | None:
    """Return the text in the data of a document's source, or None if that is no text."""
    data = source.get("data")
    if not isinstance(data, str):
        return None
    if source.get("type") == "text":
        return data
    try:
        is_text = str(source.get("media_type")).startswith("text/")
        return b64decode(data).decode() if is_text and source.get("type") == "base64" else None
    except ValueError:
        return None


def is_unreadable(block: Block) -> bool:
    """Return whether a document is a file that this server does not read, such as a PDF."""
    source = block.get("source")
    if block.get("type") != "document" or not isinstance(source, dict) or source.get("type") in ("text", "content"):
        return False
    return plain_text(source) is None
