"""Calls of Hermes, Qwen 2.5 and 3, and Granite 4: JSON objects in `<tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from oaiserve.routes.dialects.family import CallFamily, Message
from oaiserve.routes.dialects.untagged_calls import UntaggedCalls


class HermesCalls(UntaggedCalls):
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after the other."""

    opening_tags: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    closing_tags: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    tags: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")


def without_line_ends(messages: Sequence[Message]) -> list[Message]:
    """Return messages without the line end that the model wrote before calls. Templates add it again, and with two line
    ends the prompt would differ from the one in the prefix cache."""
    return [_without_line_end(message) for message in messages]


def _without_line_end(message: Message) -> Message:
    content = message.get("content")
    if message.get("tool_calls") and isinstance(content, str):
        return {**message, "content": content.removesuffix("\n")}
    return message


HERMES = CallFamily(
    "hermes",
    HermesCalls,
    "<tool_call>\n",
    "\n</tool_call>",
    "\n",
    signs=("<tool_call>",),
    rank=1,
    history=without_line_ends,
)
