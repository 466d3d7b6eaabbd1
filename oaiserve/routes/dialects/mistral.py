"""Calls of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or newer `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re

from oaiserve.routes.dialects.calls import NotACall
from oaiserve.routes.dialects.json_calls import JsonCallParser
from oaiserve.routes.dialects.segments import Segment

_NAME = re.compile(r"\s*([A-Za-z0-9_-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?\[ARGS\]\s*(?=\{)")
# The beginning of the newer format, without its arguments.
_NAME_SO_FAR = re.compile(r"\s*[A-Za-z0-9_-]*(?:\[[A-Z_]*\]?[A-Za-z0-9]*){0,2}\s*")


class MistralCalls(JsonCallParser):
    opening_tags = ("[TOOL_CALLS]",)
    tags = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    _is_list = False

    def _head(self, segments: list[Segment]) -> bool:
        text, at = self._text, len(self._tag)
        if self._tag == ",":
            return self._head_of_object(segments, at)
        while text[at : at + 1].isspace():
            at += 1
        self._is_list = text.startswith("[", at)
        if self._is_list:
            return self._head_of_object(segments, at + 1)
        if match := _NAME.match(text, at):
            self._begin(segments, match[1])
            self._begin_arguments(match.end(), match.end(), depth=0)
            return True
        if not _NAME_SO_FAR.fullmatch(text, at):
            raise NotACall
        return False

    def _after_call(self, _segments: list[Segment]) -> bool:
        if not self._is_list:
            self._step = self._in_text
            return True
        text = self._text.lstrip()
        if text.startswith(","):
            self._begin_head(",", self._text[: -len(text)])
            self._text = text
            return True
        return self._close("]")
