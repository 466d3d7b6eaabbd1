"""`AnswerParser`: reads the text of one choice, first its reasoning, then its calls."""

from __future__ import annotations

from oaiserve.routes.dialects.calls import CallParser
from oaiserve.routes.dialects.segments import Content, Reasoning, Segment
from oaiserve.routes.dialects.thinking import ThinkingParser


class AnswerParser:
    def __init__(self, thinking: ThinkingParser | None, calls: CallParser | None) -> None:
        self.calls = calls
        self.thinking = thinking
        self._thinks = thinking is not None
        self._skips_space = False  # between the reasoning and the answer proper

    def push(self, text: str) -> list[Segment]:
        """Take the next piece of the text, and return the segments in it."""
        segments: list[Segment] = []
        if self._thinks and self.thinking is not None:
            reasoning, text = self.thinking.push(text)
            if reasoning:
                segments.append(Reasoning(reasoning))
            if not self.thinking.is_over:
                return segments
            self._thinks, self._skips_space = False, self.thinking.end > 0
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        answer = self._answer(text)
        return segments + answer if segments else answer

    def finish(self, *, is_cut: bool) -> list[Segment]:
        """Return the last segments at the end of the text, which may be cut."""
        segments: list[Segment] = []
        if self._thinks and self.thinking is not None:
            reasoning, text = self.thinking.finish()
            segments += [Reasoning(reasoning)] if reasoning else self._answer(text)
        return segments if self.calls is None else segments + self.calls.finish(is_cut=is_cut)

    def _answer(self, text: str) -> list[Segment]:
        if not text:
            return []
        return [Content(text)] if self.calls is None else self.calls.push(text)
