"""Calls of Hermes, Qwen 2.5 and 3, and Granite 4: JSON objects in `<tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import regex

from oaiserve.routes.dialects.calls import NotACall
from oaiserve.routes.dialects.family import CallFamily, Message
from oaiserve.routes.dialects.json_calls import JsonCallParser
from oaiserve.routes.dialects.segments import Segment

_FENCE = "```json"
_FENCE_END = "```"
_BARE = regex.compile(r'\{\s*+"name"\s*+:')


class HermesCalls(JsonCallParser):
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after the other.

    Qwen 2.5 Coder writes a fenced block of JSON in place of the tags, or begins an answer with the object alone. One
    with a name and arguments, and nothing else, is a call, which comes when the block or the object ends.
    """

    bare: ClassVar[tuple[str, ...]] = ("{",)
    opening_tags: ClassVar[tuple[str, ...]] = ("<tool_call>", _FENCE)
    closing_tags: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    tags: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    _fenced_end: int | None  # of the object in a block

    def _begin_head(self, tag: str, before: str = "") -> None:
        super()._begin_head(tag, before)
        self._fenced_end = None

    def _head(self, segments: list[Segment]) -> bool:
        if self._tag in self.bare:
            return self._bare_head(segments)
        if self._tag != _FENCE:
            return super()._head(segments)
        at = self._place_of_object(len(_FENCE))
        if self._fenced_end is None:
            self._fenced_end = self._end_of_json(at) if at < len(self._text) else None
        if self._fenced_end is None:
            return False
        rest = self._text[self._fenced_end :].lstrip()
        if len(rest) < len(_FENCE_END) and _FENCE_END.startswith(rest):
            return False
        if not rest.startswith(_FENCE_END) or not _has_exactly(self._text[at : self._fenced_end], "name", "arguments"):
            raise NotACall
        return self._take_whole(segments, at, self._fenced_end, _FENCE_END)

    def _bare_head(self, segments: list[Segment]) -> bool:
        end = None if self._match(_BARE) is None else self._end_of_json(0)
        if end is None:
            return False
        if not _has_exactly(self._text[:end], "name", "arguments"):
            raise NotACall
        return self._take_whole(segments, 0, end)


def _has_exactly(text: str, *keys: str) -> bool:
    try:
        return msgspec.json.decode(text, type=dict[str, Any]).keys() == set(keys)
    except (msgspec.MsgspecError, RecursionError):
        return False


def without_line_ends(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose content before calls has lost the line end that the model wrote there. Templates write it
    again, and with two of them the prompt would be another text than the one in the prefix cache."""
    return [
        {**message, "content": message["content"].removesuffix("\n")}
        if message.get("tool_calls") and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


HERMES = CallFamily(
    "hermes", HermesCalls, "<tool_call>\n", "\n</tool_call>", "\n", signs=("<tool_call>",), history=without_line_ends
)
