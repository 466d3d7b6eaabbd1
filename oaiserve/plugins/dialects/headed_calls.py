"""Calls after headers: Solar Open's messages, and Functionary's `>>>NAME` with the arguments below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex

from oaiserve.engine.request import ANSWER_START
from oaiserve.plugins.dialects.mistral import with_short_ids
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import NamedCalls
from oaiserve.routes.dialects.lark import NUMBER
from oaiserve.routes.dialects.segments import Segment, find_tag
from oaiserve.routes.dialects.sites import NAME, SPACE, Site

_ASSISTANT = "<|begin|>assistant"


class SolarCalls(NamedCalls):
    opening_tags = (f"{_ASSISTANT}<|tool_calls|>", "<|tool_calls|>", "<|tool_call:begin|>")
    closing_tags = ("<|tool_call:end|>", "<|calls|>")
    hidden_tags = (f"{_ASSISTANT}<|content|>", "<|content|>", "<|end|>", "<|calls|>")
    tags = (
        *("<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
        *("<|begin|>", "<|content|>", "<|end|>", "<|calls|>"),
    )
    named = regex.compile(
        r"(?:(?:<\|begin\|>assistant)?<\|tool_calls\|>\s*)?<\|tool_call:begin\|>[^<]*+<\|tool_call:name\|>"
        r"(?P<name>[^\s<>{}]++)<\|tool_call:args\|>\s*(?=\{)"
    )
    sites = (Site(regex.escape("<|tool_call:name|>"), NAME, ("<|tool_call:args|>", SPACE)),)


class RecipientCalls(NamedCalls):
    """The prompt ends with the first `>>>`. The recipient of a text is `all`."""

    opening_tags = ()
    hidden_tags = (">>>all\n",)
    tags = ()
    named = regex.compile(r"(?:>>>)?(?P<name>[^\s<>{}]++)\n\s*(?=\{)")
    sites = (Site(f"(?:{ANSWER_START}|>>>)", NAME, (r"/\n[ \t\n\r]{0,20}/",)),)

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], **options: Any) -> None:
        super().__init__(tools, **options)
        self._step = self._at_start

    def finish(self, *, is_cut: bool) -> list[Segment]:
        if self._step == self._at_start:
            self._step = self._in_text
        return super().finish(is_cut=is_cut)

    def _at_start(self, _segments: list[Segment]) -> bool:
        text = self._text
        heads = [f"{name}\n" for name in ("all", *self._tools)]
        head = next((head for head in heads if text.startswith(head)), None)
        if head is None and any(head.startswith(text) for head in heads):
            return False
        self._step = self._in_text
        if head == "all\n":
            self._text = text[len(head) :]
        elif head is not None:
            self._begin_head(head)
        return True

    def _find(self, text: str) -> tuple[int, str]:
        if ">" not in text:
            return len(text), ""
        return find_tag(text, (*self.hidden_tags, *(f">>>{name}\n" for name in self._tools)))


SOLAR = CallFamily(
    "solar_open",
    SolarCalls,
    f"<|tool_call:begin|>{NUMBER}<|tool_call:name|>",
    "<|tool_call:end|>",
    before=f"{_ASSISTANT}<|tool_calls|>",
    arguments_key="",
    name_end="<|tool_call:args|>",
    signs=("<|tool_call:begin|>",),
    history=with_short_ids,
    reasoning_tags=("<|think|>", "<|end|>"),
    reasons_always=True,
    answer_opening=f"{_ASSISTANT}<|content|>",
)
FUNCTIONARY_HEADED = CallFamily(
    "functionary_v32",
    RecipientCalls,
    separator=">>>",
    arguments_key="",
    name_end="\n",
    signs=(">>>${recipient}",),
)
