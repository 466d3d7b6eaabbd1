"""`RawCall`: an answer that is the input of a tool, without any tag, because a grammar forces it."""

from __future__ import annotations

from oaiserve.routes.dialects.calls import CallParser
from oaiserve.routes.dialects.json_calls import in_quotes
from oaiserve.routes.dialects.segments import Arguments, CallBegin, CallEnd, Segment

INPUT = "input"  # the only argument of such a tool
RAW_BEGIN = f'{{"{INPUT}": "'
RAW_END = '"}'


class RawCall(CallParser):
    """Reads all text as the argument `input` of the only tool."""

    opening_tags = ()
    tags = ()

    def push(self, text: str) -> list[Segment]:
        begun: list[Segment] = []
        if not self._raw:
            (name,) = self._tools
            begun = [CallBegin(name), Arguments(RAW_BEGIN)]
            self._raw.append(name)
        return [*begun, Arguments(in_quotes(text))]

    def finish(self, *, is_cut: bool) -> list[Segment]:
        begun = [] if self._raw else self.push("")
        if is_cut:
            return begun
        self.num_called = 1
        return [*begun, Arguments(RAW_END), CallEnd()]

    def _head(self, segments: list[Segment]) -> bool:
        raise NotImplementedError

    def _after_call(self, segments: list[Segment]) -> bool:
        raise NotImplementedError
