"""The segments of an answer, as parsers return them, and the search for the tags between them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FIRST_TOKEN = re.compile(r"<[^<>]*>")  # first token of a tag that consists of several tokens
_LAST_TOKEN = re.compile(r"<[^<>]*>\Z")


@dataclass(slots=True)
class Reasoning:
    """The next piece of the reasoning."""

    text: str


@dataclass(slots=True)
class Content:
    """The next piece of the text for the reader."""

    text: str


@dataclass(slots=True)
class CallBegin:
    """A call of a tool begins. Its arguments follow, then `CallEnd` or `CallBroken`, unless the answer is cut."""

    name: str


@dataclass(slots=True)
class Arguments:
    """The next piece of the arguments of the open call: JSON text."""

    text: str


@dataclass(slots=True)
class CallEnd:
    """The call is complete: its arguments are a JSON object."""


@dataclass(slots=True)
class CallBroken:
    """The open call is broken. `text` is all of it so far, from the tag on, for readers that have not passed the call
    on."""

    text: str


Segment = Reasoning | Content | CallBegin | Arguments | CallEnd | CallBroken


def joined(segments: list[Segment]) -> list[Segment]:
    result: list[Segment] = []
    for segment in segments:
        last = result[-1] if result else None
        if isinstance(segment, Content | Reasoning | Arguments) and type(last) is type(segment):
            result[-1] = type(segment)(last.text + segment.text)
        else:
            result.append(segment)
    return result


def find_tag(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """Return the position of the first tag, and the tag.

    If there is none, the tag is "", and the position is that of an unfinished tag at the end, or else the length of the
    text. No tag may begin with another one.
    """
    first = -1
    which = ""
    pending = len(text)
    for tag in tags:
        at = text.find(tag)
        if at == -1:
            pending = min(pending, unfinished_tag(text, tag))
        elif not which or at < first:
            first = at
            which = tag
    if which:
        return (first, which)
    return (pending, "")


def opening_tags(text: str, opening: str, *, is_open: bool = False) -> tuple[int, bool]:
    """Return the length of the opening tags at the beginning of a text, and whether more text can't change it.

    Models sometimes repeat the tag, or the token that it begins or ends with, as in "<|channel><|channel>thought". With
    `is_open`, an opening tag may have come directly before the text.
    """
    first = match[0] if (match := _FIRST_TOKEN.match(opening)) else opening
    last = match[0] if (match := _LAST_TOKEN.search(opening)) else opening
    end = at = 0
    while True:
        rest = text[at:].lstrip()
        begin = len(text) - len(rest)
        follows_tag = at == end and (is_open or end > 0)
        if rest.startswith(opening):
            at = end = begin + len(opening)
        elif follows_tag and rest.startswith(last):
            at = end = begin + len(last)
        elif opening.startswith(rest) or (follows_tag and last.startswith(rest)):
            return end, False
        elif rest.startswith(first):
            at = begin + len(first)
        else:
            return end, True


def after_blanks(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def unfinished_tag(text: str, tag: str) -> int:
    """Return the position of an unfinished tag at the end of the text, or else the length of the text."""
    at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while at != -1:
        if tag.startswith(text[at:]):
            return at
        at = text.find(tag[0], at + 1)
    return len(text)
