"""Calls of Qwen 3 Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

Values are written without quotes; by the tool's schema, some of them are strings. The JSON of other Qwen models is
read, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from oaiserve.routes.dialects.calls import NotACall
from oaiserve.routes.dialects.json_calls import HermesCalls
from oaiserve.routes.dialects.segments import Arguments, Segment, unfinished_tag

_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>\n?")
_END = re.compile(r"\s*</function>")
_LITERALS = {"True": "true", "False": "false", "None": "null"}  # as Python writes them


class QwenCoderCalls(HermesCalls):
    opening_tags = ("<tool_call>", "<function=")
    tags = ("<tool_call>", "</tool_call>")

    def _head(self, segments: list[Segment]) -> bool:
        text = self._text
        if match := _FUNCTION.match(text):
            self._begin(segments, match[1])
            self._schema = self._tools[match[1]].get("properties") or {}
            self._separator = "{"
            self._take(match.end())
            self._step = self._in_function
            return True
        inner = text.removeprefix("<tool_call>").lstrip()
        if _may_be_a_tag(inner, "<function="):
            return False
        if self._tag == "<function=":
            raise NotACall
        return super()._head(segments)

    def _in_function(self, segments: list[Segment]) -> bool:
        text = self._text
        if match := _PARAMETER.match(text):
            if match.end() == len(text) and not match[0].endswith("\n"):
                return False  # the line break behind it belongs to it
            self._take(match.end())
            key = msgspec.json.encode(match[1]).decode()
            segments.append(Arguments(f"{self._separator}{key}: "))
            self._separator = ", "
            self._is_string = _is_string(self._schema.get(match[1]))
            if self._is_string:
                segments.append(Arguments('"'))
            self._step = self._in_value
            return True
        if match := _END.match(text):
            self._take(match.end())
            segments.append(Arguments("{}" if self._separator == "{" else "}"))
            return self._end(segments)
        rest = text.lstrip()
        if "</function>".startswith(rest) or _may_be_a_tag(rest, "<parameter="):
            return False
        return self._break(segments)

    def _in_value(self, segments: list[Segment]) -> bool:
        text, closing = self._text, "</parameter>"
        end = text.find(closing)
        if end == -1 and not self._is_string:
            return False
        if end == -1:
            # A line break before the closing tag belongs to the tag.
            end = min(unfinished_tag(text, closing), unfinished_tag(text, "\n" + closing))
            if end:
                segments.append(Arguments(in_quotes(self._take(end))))
            return False
        value = self._take(end).removesuffix("\n")
        self._take(len(closing))
        segments.append(Arguments(in_quotes(value) + '"' if self._is_string else _as_json(value)))
        self._step = self._in_function
        return True


def _may_be_a_tag(text: str, tag: str) -> bool:
    """Return whether the text can begin this tag, which has a name."""
    return tag.startswith(text[: len(tag)]) and not set(text[len(tag) :]) & set("<>\n")


def _is_string(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    return schema.get("type") == "string" or (
        "type" not in schema
        and isinstance(choices := schema.get("enum"), list)
        and all(isinstance(choice, str) for choice in choices)
    )


def in_quotes(text: str) -> str:
    """Return the text as it is written within a JSON string."""
    return msgspec.json.encode(text).decode()[1:-1]


def _as_json(value: str) -> str:
    """Return a value in JSON: itself if it is JSON, else as a string."""
    text = value.strip()
    text = _LITERALS.get(text, text)
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return msgspec.json.encode(value).decode()
    return text
