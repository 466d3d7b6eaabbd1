"""`CallParser`: recognises calls of tools in a text. Each family of models has its dialect, in its own file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import regex

from oaiserve.routes.dialects.segments import CallBegin, CallBroken, CallEnd, Content, Segment, find_tag
from oaiserve.routes.dialects.sites import Site
from oaiserve.routes.dialects.tagged_form import TaggedForm

MOST_HEAD = 2048  # maximum characters of white space, or from a tag or an argument to the next argument
_SLICE = MOST_HEAD // 2  # characters that are read at once
MOST_TRIED_AGAIN = 1000  # A longer text that turned out to be no call is not searched again.

Step = Callable[[list[Segment]], bool]


class NotACall(Exception):
    """The text after a tag is no call of the request's tools, as its beginning up to `at` shows."""

    def __init__(self, at: int = 0) -> None:
        super().__init__(at)
        self.at = at


class Value(Protocol):
    """The search for the end of a value that is read as a whole. It receives the text piece by piece."""

    num_read: int  # characters up to the end, once it has come, or up to the position where the value is broken
    is_broken: bool

    def push(self, piece: str) -> bool:
        """Receive the next piece, and return whether the search is over."""


class TagEnd:
    """The search for a tag."""

    is_broken = False

    def __init__(self, tag: str) -> None:
        self.num_read = 0
        self._tag = tag
        self._last = ""  # end of the text, where the tag may have begun

    def push(self, piece: str) -> bool:
        text = self._last + piece
        at = text.find(self._tag)
        end = len(text) if at == -1 else at + len(self._tag)
        self.num_read += end - len(self._last)
        self._last = text[max(0, len(text) - len(self._tag) + 1) :]
        return at != -1


class CallParser(ABC):
    """Turns the text of one answer, in pieces, into segments. Each character is returned as soon as its kind is
    certain.

    A step reads one element of the text: it takes the certain part, adds segments, and returns whether another step can
    continue. If not, more text is needed. So the segments do not depend on how the text was split.

    Whitespace before a call, and between calls, belongs to the calls. A broken call stays text.

    Parsing takes linear time. A step sees at most MOST_HEAD characters. Only the end of a value may be further away,
    and the search for it reads each character once. A long text that turned out to be no call is not searched for other
    calls.
    """

    opening_tags: ClassVar[tuple[str, ...]]  # A call may begin with each of these.
    bare: ClassVar[tuple[str, ...]] = ()  # beginnings of answers that are calls without a tag
    closing_tags: ClassVar[tuple[str, ...]] = ()  # tags that may follow a call, in this order
    untagged: ClassVar[tuple[str, ...]] = ()  # beginnings that may be calls, but mostly are plain text
    hidden_tags: ClassVar[tuple[str, ...]] = ()  # tags around texts that are not calls: dropped, with or without tools
    tags: ClassVar[tuple[str, ...]]  # all tags of the family
    form: ClassVar[TaggedForm | None] = None  # the form of calls that are not in JSON
    sites: ClassVar[tuple[Site, ...]] = ()  # positions where names of calls occur

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        only_one: bool = False,
        strict: frozenset[str] = frozenset(),
    ) -> None:
        """`tools` are schemas of parameters by name. With `only_one`, the text ends with the first call. Calls of
        `strict` tools are read only in the forms for which grammars enforce their schemas."""
        self._strict = strict
        self.num_called = 0
        self.num_unparsed = 0  # tags without a call after them, and broken calls
        self._tools = tools
        self._only_one = only_one
        self._text = ""  # text that no step has taken yet
        self._num_read = 0  # characters of the answer that were read so far
        self._step: Step = self._in_text
        self._is_blank = True  # only whitespace has come since the beginning, or since the last call
        self._tag = ""  # tag at the start of the call
        self._raw: list[str] = []  # the text of the call up to `_text`, with the whitespace before it
        self._value: Value | None = None  # a value that is read as a whole
        self._awaits_value = False
        self._behind_text: list[str] = []  # the text after the value's beginning, while its end is awaited

    @classmethod
    def own_arguments(
        cls, name: str, schema: Mapping[str, Any], schemas: dict[str, Any], special_ids: Mapping[str, int]
    ) -> str | None:
        """Return the Lark grammar of arguments in a form other than JSON, or None if this form cannot express the
        schema.

        It adds the schemas of values to `schemas`. Lark names them by their index.
        """
        return None

    def push(self, text: str) -> list[Segment]:
        segments: list[Segment] = []
        at = 0
        while True:
            if self._awaits_value:
                at = self._read_value(text, at)
            if self._awaits_value:
                return segments
            while self._step(segments):
                pass
            if self._awaits_value:
                continue
            if len(self._text) >= MOST_HEAD:
                self._give_up(segments)
            elif at == len(text):
                return segments
            else:
                piece = text[at : at + min(_SLICE, MOST_HEAD - len(self._text))]
                self._text += piece
                self._num_read += len(piece)
                at += len(piece)

    def _read_value(self, text: str, at: int) -> int:
        """Read a text from `at` until the value is complete, and return the position after the part that was read."""
        assert self._value is not None
        while self._awaits_value and at < len(text):
            piece = text[at : at + _SLICE]
            self._behind_text.append(piece)
            self._num_read += len(piece)
            at += len(piece)
            if self._value.push(piece):
                self._join()
        return at

    def _join(self) -> None:
        self._awaits_value = False
        self._text = "".join((self._text, *self._behind_text))
        self._behind_text = []

    def _end_of(self, value: Callable[[], Value], at: int) -> int | None:
        """Return the position after the value at this position, or None if its end has not arrived. Raises NotACall."""
        if self._value is None:
            self._value = value()
            self._awaits_value = not self._value.push(self._text[at:])
        if self._awaits_value:
            return None
        reading = self._value
        self._value = None
        if reading.is_broken:
            raise NotACall(at + reading.num_read)
        return at + reading.num_read

    def _give_up(self, segments: list[Segment]) -> None:
        """Continue after a step has waited for too much text."""
        if self._step == self._in_head:
            self._no_call(segments, len(self._text))
        elif self._step == self._in_text:
            segments.append(Content(self._text))
            self._text = ""
            self._is_blank = False
        elif self._step == self._after_call:
            self._step = self._in_text
        else:
            self._break(segments)

    def finish(self, *, is_cut: bool) -> list[Segment]:
        """Return the last segments at the end of the text. If the answer `is_cut` within a call, the call stays
        open."""
        self._join()
        segments: list[Segment] = []
        if self._step == self._in_text:
            if self._text and not (self._is_blank and self.num_called and self._text.isspace()):
                segments.append(Content(self._text))
        elif self._step == self._in_head:
            self._end_head(segments, is_cut=is_cut)
        elif self._step not in (self._after_call, self._after_last_call) and not is_cut:
            self._take(len(self._text))
            self._break(segments)
        self._text = ""
        return segments

    def _in_text(self, segments: list[Segment]) -> bool:
        at, tag = self._find(self._text)
        before = self._text[:at]
        is_blank = self._is_blank and (not before or before.isspace())
        if is_blank and not tag:
            return False
        if not is_blank:
            self._is_blank = False
            if before:
                segments.append(Content(before))
                before = ""
        self._text = self._text[at:]
        if tag in self.hidden_tags:
            self._text = self._text[len(tag) :]
        elif tag:
            self._begin_head(tag, before)
        return bool(tag)

    def _find(self, text: str) -> tuple[int, str]:
        """Return the position and the opening tag of the next call, as `find_tag` does."""
        if self._is_blank and self.bare:
            num_spaces = len(text) - len(text.lstrip())
            if text.startswith(self.bare, num_spaces):
                return num_spaces, text[num_spaces]
        return find_tag(text, self._sought())

    def _sought(self) -> tuple[str, ...]:
        return (*self.opening_tags, *self.hidden_tags)

    def _begin_head(self, tag: str, before: str = "") -> None:
        self._tag = tag
        self._raw = [before]
        self._step = self._in_head
        self._value = None

    def _in_head(self, segments: list[Segment]) -> bool:
        try:
            return self._head(segments)
        except NotACall as error:
            self._no_call(segments, error.at)
            return True

    def _no_call(self, segments: list[Segment], at: int) -> None:
        """Continue after the tag, or at the position where a long text turned out to be no call."""
        self.num_unparsed += self._tag not in self.untagged
        taken = "".join(self._raw[1:])
        del self._raw[1:]
        self._text = taken + self._text
        at += len(taken)
        self._take(at if at > MOST_TRIED_AGAIN else len(self._tag))
        segments.append(Content("".join(self._raw)))
        self._is_blank = False
        self._step = self._in_text

    @abstractmethod
    def _head(self, segments: list[Segment]) -> bool:
        """Take the text from the tag up to the arguments. Raises NotACall, and then takes nothing."""

    def _end_head(self, segments: list[Segment], *, is_cut: bool) -> None:
        """End the text before the arguments of a call. If it `is_cut`, a tag without a name is dropped."""
        self.num_unparsed += not is_cut and self._tag not in self.untagged
        name = self._name_in_head() if is_cut else None
        if name is not None:
            segments.append(CallBegin(name))
        elif not (is_cut and self._tag in self.opening_tags and self._may_name_a_tool()):
            segments.append(Content("".join(self._raw) + self._text))

    def _name_in_head(self) -> str | None:
        """Return the tool's name if the text ends before the arguments, or in arguments that are read as a whole."""
        return None

    def _may_name_a_tool(self) -> bool:
        """Return whether a text that ends before the arguments may continue with the name of a tool."""
        return True

    def _begin(self, segments: list[Segment], name: str) -> None:
        if name not in self._tools:
            raise NotACall
        segments.append(CallBegin(name))

    def _take(self, length: int) -> str:
        taken = self._text[:length]
        self._text = self._text[length:]
        self._raw.append(taken)
        return taken

    def _end(self, segments: list[Segment]) -> bool:
        segments.append(CallEnd())
        self.num_called += 1
        self._is_blank = True
        if self._only_one:
            self._step = self._after_last_call
        else:
            self._step = self._after_call
        return True

    def _break(self, segments: list[Segment]) -> bool:
        self.num_unparsed += self._tag not in self.untagged
        segments.append(CallBroken("".join(self._raw)))
        self._is_blank = False
        self._step = self._in_text
        return True

    def _match(self, pattern: regex.Pattern[str], at: int = 0) -> regex.Match[str] | None:
        """Return the match of a head, or None if more text is needed. Raises NotACall."""
        match = pattern.match(self._text, at, partial=True)
        if match is None:
            raise NotACall
        if match.partial:
            return None
        return match

    def _after_call(self, _segments: list[Segment]) -> bool:
        """Take the whitespace and the tags after a call, which a model may leave out."""
        rest = self._text.lstrip()
        for tag in self.closing_tags:
            if rest.startswith(tag):
                self._text = rest[len(tag) :]
                return True
        if any(tag.startswith(rest) for tag in self.closing_tags):
            return False
        self._step = self._in_text
        return True

    def _after_last_call(self, _segments: list[Segment]) -> bool:
        self._text = ""
        return False
