"""`CallParser`: finds calls of tools in a text. Each family of models writes them in its own form, and has its file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from oaiserve.routes.dialects import marks
from oaiserve.routes.dialects.parts import CallBegin, CallBroken, CallEnd, Content, Part

Step = Callable[[list[Part]], bool]


class NotACall(Exception):
    """What follows a mark is no call of a tool of the request."""


class CallParser(ABC):
    """Takes the text of one answer in pieces and returns its parts: each character as soon as it is certain what it is.

    A step is what comes next in the text. It takes what it can from the text that is left, adds parts, and returns
    whether another step goes on from there; if not, more text is needed. So the parts do not depend on the pieces.

    Whitespace before a call, and between calls, belongs to the calls. What turns out not to be a call stays text.
    """

    opening_marks: ClassVar[tuple[str, ...]]  # with each of these, a call may begin
    marks: ClassVar[tuple[str, ...]]  # all marks of the family

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], *, only_one: bool = False) -> None:
        """Read calls of these tools, which are schemas of parameters by name. With `only_one`, the text ends with the
        first call."""
        self.num_called = 0
        self.num_unparsed = 0  # marks that no call followed, and calls that broke
        self._tools = tools
        self._only_one = only_one
        self._text = ""  # what no step has taken yet
        self._step: Step = self._in_text
        self._is_blank = True  # nothing but whitespace has come since the beginning, or since the last call
        self._mark = ""  # that the call has begun with
        self._raw: list[str] = []  # the text of the call up to `_text`, with the whitespace before it

    def push(self, text: str) -> list[Part]:
        """Take the next piece of the text."""
        self._text += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self, *, is_cut: bool) -> list[Part]:
        """Return what is left at the end of the text. If the answer `is_cut` within a call, the call stays as it is."""
        parts: list[Part] = []
        if self._step == self._in_text:
            if self._text and not (self._is_blank and self.num_called and self._text.isspace()):
                parts.append(Content(self._text))
        elif self._step == self._in_head:
            self.num_unparsed += not is_cut
            parts.append(Content("".join(self._raw) + self._text))
        elif self._step not in (self._after_call, self._after_last_call) and not is_cut:
            self._take(len(self._text))
            self._break(parts)
        self._text = ""
        return parts

    def _in_text(self, parts: list[Part]) -> bool:
        at, mark = self._find(self._text)
        before = self._text[:at]
        is_blank = self._is_blank and (not before or before.isspace())
        if is_blank and not mark:
            return False
        if not is_blank:
            self._is_blank = False
            if before:
                parts.append(Content(before))
                before = ""
        self._text = self._text[at:]
        if mark:
            self._begin_head(mark, before)
        return bool(mark)

    def _find(self, text: str) -> tuple[int, str]:
        """Return where a call may begin, and the mark that it begins with, as `marks.find` does."""
        return marks.find(text, self.opening_marks)

    def _begin_head(self, mark: str, before: str = "") -> None:
        self._mark, self._raw, self._step = mark, [before], self._in_head

    def _in_head(self, parts: list[Part]) -> bool:
        try:
            return self._head(parts)
        except NotACall:
            self.num_unparsed += 1
            self._take(len(self._mark))
            parts.append(Content("".join(self._raw)))
            self._is_blank, self._step = False, self._in_text
            return True

    @abstractmethod
    def _head(self, parts: list[Part]) -> bool:
        """Take the text from the mark up to the arguments. Raises NotACall, and then takes nothing."""

    def _begin(self, parts: list[Part], name: str) -> None:
        if name not in self._tools:
            raise NotACall
        parts.append(CallBegin(name))

    def _take(self, length: int) -> str:
        """Take so much of the text as belongs to the call."""
        taken, self._text = self._text[:length], self._text[length:]
        self._raw.append(taken)
        return taken

    def _end(self, parts: list[Part]) -> bool:
        parts.append(CallEnd())
        self.num_called += 1
        self._is_blank = True
        self._step = self._after_last_call if self._only_one else self._after_call
        return True

    def _break(self, parts: list[Part]) -> bool:
        """Give the call up: what comes from here on is text."""
        self.num_unparsed += 1
        parts.append(CallBroken("".join(self._raw)))
        self._is_blank, self._step = False, self._in_text
        return True

    @abstractmethod
    def _after_call(self, parts: list[Part]) -> bool:
        """Take what closes a call, or separates it from the next one."""

    def _after_last_call(self, _parts: list[Part]) -> bool:
        self._text = ""
        return False

    def _close(self, mark: str) -> bool:
        """Take whitespace and a mark that closes the call. A model may leave it out."""
        rest = self._text.lstrip()
        if rest.startswith(mark):
            self._text = rest[len(mark) :]
        elif mark.startswith(rest):
            return False
        self._step = self._in_text
        return True
