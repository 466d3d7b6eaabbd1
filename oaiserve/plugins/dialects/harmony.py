"""Harmony, the dialect of gpt-oss: an answer is messages in channels: analysis, commentary with calls, and final."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex

from oaiserve.routes.dialects.calls import NotACall, Step
from oaiserve.routes.dialects.channels import ChannelParser
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import NamedCalls, in_quotes
from oaiserve.routes.dialects.raw_call import RAW_BEGIN, RAW_END
from oaiserve.routes.dialects.segments import Arguments, Content, Reasoning, Segment, find_tag
from oaiserve.routes.dialects.sites import SPACE, Site

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_CONSTRAIN = "<|constrain|>"
_MESSAGE = "<|message|>"
_IN_HEADER = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE)
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
REASONING_TAGS = (f"{_CHANNEL}analysis{_MESSAGE}", "<|end|>")
# The name of a tool comes before the channel or after it. Models sometimes repeat a token.
_HEADER = regex.compile(
    r"(?:(?:<\|start\|>)*assistant)?\s*+(?:to=(?P<to>[^\s<>]++))?\s*+(?:(?:<\|channel\|>\s*+)+(?P<channel>[a-z]++)"
    r"(?:\s++to=(?P<to>[^\s<>]++))?\s*+){0,2}(?:<\|constrain\|>)?\s*+(?:json|code)?\s*+<\|message\|>"
)


class HarmonyCalls(ChannelParser, NamedCalls):
    """Reads whole answers: reasoning, content and calls. A message with a broken header is content, and one to an
    unknown tool is dropped."""

    opening_tags = (_CHANNEL, _START)
    closing_tags = _ENDS
    tags = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
    named = _HEADER
    sites = (
        Site(
            "to=",
            r"^\s<>",
            (
                "/ {0,2}/",
                f"{_CHANNEL}commentary?",
                "/ {0,2}/",
                f"{_CONSTRAIN}?",
                "/(json|code)? {0,2}/",
                _MESSAGE,
                SPACE,
            ),
            prefix=r"functions\.",
        ),
    )

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], **options: Any) -> None:
        super().__init__(tools, **options)
        self._name = ""  # name of the tool that receives the message
        self._body: Step = self._in_analysis  # the step that reads the text of the message
        self._step = self._at_body if self._in_reasoning else self._at_start

    def finish(self, *, is_cut: bool) -> list[Segment]:
        if self._step != self._at_body:
            return self._finish(is_cut=is_cut)
        self._step = self._body
        segments = self.push("")
        return segments + self._finish(is_cut=is_cut)

    def _finish(self, *, is_cut: bool) -> list[Segment]:
        self.is_over = True
        if self._step == self._at_start:
            self._step = self._in_text
        if self._step == self._in_raw and not is_cut:
            self._text += _ENDS[0]  # the end of a sequence, which is not shown
            return self.push("")
        if self._step == self._in_dropped:
            return []
        in_message = self._step in (self._in_analysis, self._in_message)
        kind = Reasoning if self._step == self._in_analysis else Content
        if not in_message:
            return super().finish(is_cut=is_cut)
        text = self._text
        self._text = ""
        self.end = self._num_read if kind is Reasoning else self.end
        if text:
            return [kind(text)]
        return []

    def _at_start(self, _segments: list[Segment]) -> bool:
        """Wait for a header, without the words that are in the prompt, or for a text without a header."""
        match = _HEADER.match(self._text, partial=True)
        if match is not None and match.partial:
            return False
        self._begin_head("")
        self._step = self._in_text if match is None else self._in_head
        return True

    def _give_up(self, segments: list[Segment]) -> None:
        if self._step == self._at_start:
            self._step = self._in_text
        elif self._step == self._at_body:
            self._step = self._body
        else:
            super()._give_up(segments)

    def _head(self, _segments: list[Segment]) -> bool:
        match = self._match(_HEADER)
        if match is not None:
            self._begin_message(match)
        return match is not None

    def _begin_message(self, header: regex.Match[str]) -> None:
        """Take a header, and choose how the text after it is read. Raises NotACall for a header without a channel and a
        tool, and then takes nothing."""
        if header["to"] not in (None, "assistant"):
            self._name = header["to"].removeprefix("functions.")
            self._body = self._at_call
        elif header["channel"] is None:
            raise NotACall
        elif header["channel"] == "analysis":
            self._body = self._in_analysis
        else:
            self._body = self._in_message
        self._take(header.end())
        self._step = self._at_body

    def _at_body(self, _segments: list[Segment]) -> bool:
        """Take what a model repeats before the text of a message: the last tag of the header, or a whole header."""
        rest = self._text.lstrip()
        is_header = rest.startswith(_IN_HEADER)
        if not is_header and any(tag.startswith(rest) for tag in _IN_HEADER):
            return False
        repeated = _HEADER.match(rest, partial=True) if is_header else None
        if repeated is None:
            self._step = self._body
        elif repeated.partial:
            return False
        else:
            self._take(len(self._text) - len(rest))
            try:
                self._begin_message(repeated)
            except NotACall:  # Only tags are repeated, so the header before them holds.
                self._take(repeated.end())
        return True

    def _at_call(self, segments: list[Segment]) -> bool:
        if self._name not in self._tools:
            self.num_unparsed += 1
            self._step = self._in_dropped
            return True
        self._begin(segments, self._name)
        if self._is_raw:
            segments.append(Arguments(RAW_BEGIN))
            self._step = self._in_raw
        else:
            self._begin_arguments(0, 0, depth=0)
        return True

    def _in_analysis(self, segments: list[Segment]) -> bool:
        return self._in_body(segments, Reasoning)

    def _in_message(self, segments: list[Segment]) -> bool:
        return self._in_body(segments, Content)

    def _in_dropped(self, segments: list[Segment]) -> bool:
        return self._in_body(segments, None)

    def _in_raw(self, segments: list[Segment]) -> bool:
        at, tag = find_tag(self._text, _ENDS)
        if at:
            segments.append(Arguments(in_quotes(self._take(at))))
        if not tag:
            return False
        segments.append(Arguments(RAW_END))
        return self._end(segments)

    def _in_body(self, segments: list[Segment], kind: type[Content | Reasoning] | None) -> bool:
        at, tag = find_tag(self._text, _ENDS)
        if at and kind is not None:
            segments.append(kind(self._text[:at]))
        self._text = self._text[at + len(tag) :]
        if kind is Reasoning:
            self.end = self._num_read - len(self._text)
        if tag:
            self._is_blank = True
            self._step = self._after_call
        return bool(tag)


HARMONY = CallFamily(
    "openai",
    HarmonyCalls,
    f"{_START}assistant{_CHANNEL}commentary to=functions.",
    arguments_key="",
    name_end=f" {_CONSTRAIN}json{_MESSAGE}",
    signs=(REASONING_TAGS[0],),
    reasoning_tags=REASONING_TAGS,
    by_channels=True,
    answer_opening=f"{_START}assistant{_CHANNEL}final{_MESSAGE}",
)
