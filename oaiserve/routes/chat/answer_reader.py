"""`AnswerReader`: reads the text of one choice, first its reasoning and then its calls, and counts tokens and calls."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from oaiserve.engine.request import FinishReason, TokenChunk
from oaiserve.facts.record import ToolCallOutcome
from oaiserve.routes.dialects.calls import CallParser
from oaiserve.routes.dialects.channels import ChannelParser
from oaiserve.routes.dialects.reasoning import ThinkingParser
from oaiserve.routes.dialects.segments import CallBegin, Content, Reasoning, Segment, joined
from oaiserve.routes.exchange import AnswerFacts


class AnswerReader:
    def __init__(
        self,
        thinking: ThinkingParser | None,
        calls: CallParser | None,
        *,
        client_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """A call that the end of the answer cuts stays open. `client_names` maps the model's names of tools to the
        client's, where they differ."""
        self._client_names = client_names
        self.num_reasoning_tokens = 0
        self.thinking = thinking
        self.calls = calls
        # This parser finds the end of the reasoning itself.
        self._reasoning = calls if isinstance(calls, ChannelParser) else thinking
        self._thinks = thinking is not None
        self._skips_space = False  # between the reasoning and the answer proper
        self._text_length = 0  # characters of the tokens so far
        self._lengths: list[int] = []  # lengths of the tokens not counted yet

    @property
    def has_called(self) -> bool:
        return self.calls is not None and self.calls.num_called > 0

    @property
    def is_thinking(self) -> bool:
        return self._reasoning is not None and not self._reasoning.is_over

    def read(self, chunk: TokenChunk) -> list[Segment]:
        segments = self.push(chunk.text)
        if chunk.finish_reason is not None:
            is_cut = chunk.finish_reason == FinishReason.LENGTH or chunk.stop_reason is not None
            segments += self.finish(is_cut=is_cut)
        if chunk.text_lengths is not None:
            self._count(chunk.text_lengths)
        for segment in segments if self._client_names else ():
            if isinstance(segment, CallBegin):
                segment.name = self._client_names.get(segment.name, segment.name)
        if len(segments) > 1:
            return joined(segments)
        return segments

    def report(self, facts: AnswerFacts) -> None:
        """Add the reasoning and the outcomes of calls in this finished choice to those of other choices."""
        if self._reasoning is not None:
            facts.reasoning_tokens = (facts.reasoning_tokens or 0) + self.num_reasoning_tokens
        if self.calls is None:
            return
        for outcome, number in (
            (ToolCallOutcome.CALLED, self.calls.num_called),
            (ToolCallOutcome.UNPARSED, self.calls.num_unparsed),
        ):
            if number:
                facts.tool_calls[outcome] = facts.tool_calls.get(outcome, 0) + number

    def push(self, text: str) -> list[Segment]:
        segments: list[Segment] = []
        if self._thinks and self.thinking is not None:
            reasoning, text = self.thinking.push(text)
            if reasoning:
                segments.append(Reasoning(reasoning))
            if not self.thinking.is_over:
                return segments
            self._thinks = False
            self._skips_space = self.thinking.end > 0
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        answer = self._answer(text)
        if segments:
            return segments + answer
        return answer

    def finish(self, *, is_cut: bool) -> list[Segment]:
        segments: list[Segment] = []
        if self._thinks and self.thinking is not None:
            reasoning, text = self.thinking.finish(is_cut=is_cut)
            segments += [Reasoning(reasoning)] if reasoning else self._answer(text)
        if self.calls is None:
            return segments
        return segments + self.calls.finish(is_cut=is_cut)

    def _answer(self, text: str) -> list[Segment]:
        if not text:
            return []
        if self.calls is None:
            return [Content(text)]
        return self.calls.push(text)

    def _count(self, text_lengths: list[int]) -> None:
        """Count the tokens whose text begins within the reasoning."""
        thinking = self._reasoning
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
