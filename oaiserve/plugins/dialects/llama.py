"""Calls of Llama: JSON objects without tags; Llama 4 also writes lists of calls in Python."""

from __future__ import annotations

from typing import ClassVar

from oaiserve.plugins.dialects.pythonic import PythonicCalls
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import JsonCallParser
from oaiserve.routes.dialects.segments import Segment, find_tag


class LlamaCalls(JsonCallParser):
    """Reads `{"name": ..., "parameters": {...}}` as the whole answer of Llama 3, or several of these joined by `;`."""

    opening_tags: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    tags: ClassVar[tuple[str, ...]] = opening_tags
    bare: ClassVar[tuple[str, ...]] = ("{",)

    def _head(self, segments: list[Segment]) -> bool:
        return self._head_of_object(segments, 0 if self._tag in self.bare else len(self._tag))

    def _after_call(self, segments: list[Segment]) -> bool:
        if self._goes_on(";"):
            return True
        return bool(self._text.strip()) and super()._after_call(segments)


class Llama4Calls(PythonicCalls, LlamaCalls):
    opening_tags = ("<|python_start|>", "<|python_tag|>")
    closing_tags = ("<|python_end|>",)
    tags = (*opening_tags, *closing_tags)
    bare = ("{", "[")

    def _find(self, text: str) -> tuple[int, str]:
        at, tag = super()._find(text)
        if "[" not in text:
            return at, tag
        in_text, bracket = find_tag(text, [f"[{name}(" for name in self._tools])
        if in_text < at:
            return (in_text, bracket[:1])
        return (at, tag)


LLAMA = CallFamily(
    "llama3_json",
    LlamaCalls,
    separator="; ",
    arguments_key="parameters",
    signs=('"parameters": ', "<|start_header_id|>"),  # Llama 3.2's template has no <|python_tag|>
    rank=3,
)
LLAMA4 = CallFamily(
    "llama4_pythonic",
    Llama4Calls,
    separator=", ",
    before="[",
    after="]",
    arguments_key="parameters",
    signs=("<|python_start|>",),
    rank=2,
)
