"""Calls of Hermes, Qwen 2.5 and 3, and Granite 4: JSON objects in `<tool_call>`."""

from __future__ import annotations

from typing import ClassVar

from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import JsonCallParser


class HermesCalls(JsonCallParser):
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after the other."""

    opening_tags: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    closing_tags: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    tags: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")


HERMES = CallFamily("hermes", HermesCalls, "<tool_call>\n", "\n</tool_call>", "\n", signs=("<tool_call>",))
