"""Calls of Llama 3: the answer is `{"name": ..., "parameters": {...}}`, or several of these joined by `;`."""

from __future__ import annotations

from oaiserve.routes.dialects.json_calls import JsonCallParser
from oaiserve.routes.dialects.segments import Segment


class LlamaCalls(JsonCallParser):
    opening_tags = ("<|python_tag|>",)
    tags = opening_tags

    def _find(self, text: str) -> tuple[int, str]:
        if self._is_blank:
            num_spaces = len(text) - len(text.lstrip())
            if text.startswith("{", num_spaces):
                return num_spaces, "{"
        return super()._find(text)

    def _head(self, segments: list[Segment]) -> bool:
        return self._head_of_object(segments, 0 if self._tag == "{" else len(self._tag))

    def _after_call(self, _segments: list[Segment]) -> bool:
        text = self._text.lstrip()
        if text.startswith(";"):
            self._begin_head(";", self._text[: -len(text)])
            self._text = text
        elif text:
            self._step = self._in_text
        return bool(text)
