"""`ChannelParser`: reads whole answers whose reasoning, content and calls are in channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oaiserve.routes.dialects.calls import CallParser


class ChannelParser(CallParser):
    """Also reads the reasoning, as a `ThinkingParser` does for other families."""

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        in_reasoning: bool = False,
        is_raw: bool = False,
        **options: Any,
    ) -> None:
        """`in_reasoning`: the prompt ends within the reasoning. With `is_raw`, a call's text is its only argument."""
        super().__init__(tools, **options)
        self.is_over = False
        self.end = 0  # characters of the text up to the end of the last reasoning so far
        self._in_reasoning = in_reasoning
        self._is_raw = is_raw
