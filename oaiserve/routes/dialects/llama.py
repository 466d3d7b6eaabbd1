"""Calls of Llama 3: the answer is `{"name": ..., "parameters": {...}}`, or several of these joined by `;`."""

from __future__ import annotations

from oaiserve.routes.dialects.json_calls import JsonCallParser
from oaiserve.routes.dialects.parts import Part


class LlamaCalls(JsonCallParser):
    opening_marks = ("<|python_tag|>",)
    marks = opening_marks

    def _find(self, text: str) -> tuple[int, str]:
        if self._is_blank:
            num_spaces = len(text) - len(text.lstrip())
            if text.startswith("{", num_spaces):
                return num_spaces, "{"
        return super()._find(text)

    def _head(self, parts: list[Part]) -> bool:
        return self._head_of_object(parts, 0 if self._mark == "{" else len(self._mark))

    def _after_call(self, _parts: list[Part]) -> bool:
        text = self._text.lstrip()
        if text.startswith(";"):
            self._begin_head(";", self._text[: -len(text)])
            self._text = text
        elif text:
            self._step = self._in_text
        return bool(text)
