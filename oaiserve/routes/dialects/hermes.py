"""Calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after the other."""

from __future__ import annotations

from typing import ClassVar

from oaiserve.routes.dialects.json_calls import JsonCallParser
from oaiserve.routes.dialects.parts import Part


class HermesCalls(JsonCallParser):
    opening_marks: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def _after_call(self, _parts: list[Part]) -> bool:
        return self._close(self.marks[1])
