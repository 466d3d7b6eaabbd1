"""The segments of an answer, as parsers return them."""

from __future__ import annotations

from dataclasses import dataclass


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
    """The open call is none. `text` is all of it so far, from the tag on, for readers that have not passed the call
    on."""

    text: str


Segment = Reasoning | Content | CallBegin | Arguments | CallEnd | CallBroken


def joined(segments: list[Segment]) -> list[Segment]:
    """Join the texts of neighbouring segments of one kind."""
    result: list[Segment] = []
    for segment in segments:
        last = result[-1] if result else None
        if isinstance(segment, Content | Reasoning | Arguments) and type(last) is type(segment):
            result[-1] = type(segment)(last.text + segment.text)
        else:
            result.append(segment)
    return result
