"""`AnswerReader`: turns the chunks of one choice into segments of its answer, and counts tokens and calls."""

from __future__ import annotations

from oaiserve.engine.request import FinishReason, TokenChunk
from oaiserve.facts.record import ToolCallOutcome
from oaiserve.routes.dialects.answer import AnswerParser
from oaiserve.routes.dialects.segments import Segment, joined


class AnswerReader:
    """Reads the text of one choice, and counts the tokens of its reasoning."""

    def __init__(self, parser: AnswerParser) -> None:
        self.num_reasoning_tokens = 0
        self._parser = parser
        self._text_length = 0  # of the tokens so far
        self._lengths: list[int] = []  # of the tokens not counted yet

    @property
    def has_called(self) -> bool:
        """Return whether the answer so far has a call of a tool."""
        return self._parser.calls is not None and self._parser.calls.num_called > 0

    def read(self, chunk: TokenChunk) -> list[Segment]:
        segments = self._parser.push(chunk.text)
        if chunk.finish_reason is not None:
            is_cut = chunk.finish_reason == FinishReason.LENGTH or chunk.stop_reason is not None
            segments += self._parser.finish(is_cut=is_cut)
        if chunk.text_lengths is not None:
            self._count(chunk.text_lengths)
        return joined(segments) if len(segments) > 1 else segments

    def add_calls(self, counted: dict[ToolCallOutcome, int]) -> None:
        """Add the outcomes of the calls in this finished answer to those of other choices."""
        if (calls := self._parser.calls) is None:
            return
        for outcome, number in (
            (ToolCallOutcome.CALLED, calls.num_called),
            (ToolCallOutcome.UNPARSED, calls.num_unparsed),
        ):
            if number:
                counted[outcome] = counted.get(outcome, 0) + number

    def _count(self, text_lengths: list[int]) -> None:
        """Count the tokens whose text begins within the reasoning."""
        thinking = self._parser.thinking
        if thinking is None or (thinking.is_over and not self._lengths and self._text_length >= thinking.end):
            return
        self._lengths += text_lengths
        counted = 0
        for length in self._lengths:
            if self._text_length >= thinking.end:
                break
            self._text_length += length
            counted += 1
        self.num_reasoning_tokens += counted
        del self._lengths[:counted]
        if thinking.is_over:
            self._lengths.clear()
