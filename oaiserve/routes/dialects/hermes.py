"""Calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after the other."""

from __future__ import annotations

from typing import ClassVar

from oaiserve.routes.dialects.json_calls import JsonCallParser
from oaiserve.routes.dialects.segments import Segment


class HermesCalls(JsonCallParser):
    opening_tags: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    tags: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def _after_call(self, _segments: list[Segment]) -> bool:
        return self._close(self.tags[1])
