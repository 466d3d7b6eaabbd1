"""`ChannelCalls`: reads answers of models that write everything in channels: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oaiserve.routes.dialects.json_calls import NamedCalls
from oaiserve.routes.dialects.segments import Segment


class ChannelCalls(NamedCalls):
    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        only_one: bool = False,
        in_reasoning: bool = False,
        is_raw: bool = False,
        strict: frozenset[str] = frozenset(),
    ) -> None:
        """`in_reasoning`: the prompt ends within the reasoning. With `is_raw`, a call's text is its only argument."""
        super().__init__(tools, only_one=only_one, strict=strict)
        self._in_reasoning = in_reasoning
        self._is_raw = is_raw
        self.is_over = False
        self.end = 0  # characters of the text up to the end of the last reasoning so far
        self._num_pushed = 0

    def push(self, text: str) -> list[Segment]:
        self._num_pushed += len(text)
        return super().push(text)

    def finish(self, *, is_cut: bool) -> list[Segment]:
        self.is_over = True
        return super().finish(is_cut=is_cut)
