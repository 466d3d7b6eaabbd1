"""Reads texts with parsers in tests: at once, in pieces, and with the segments of an answer joined as a client does."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.segments import (
    Arguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Content,
    Reasoning,
    Segment,
    joined,
)

TOOLS = {
    "get_time": {"type": "object", "properties": {"zone": {"type": "string"}, "at": {"type": "integer"}}},
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "text": {"type": "string"}}},
}


@dataclass
class Read:
    """What a client of a whole answer gets."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def segments_of(parser: AnswerReader, pieces: Iterable[str], *, is_cut: bool = False) -> list[Segment]:
    segments: list[Segment] = []
    for piece in pieces:
        segments += parser.push(piece)
    return joined(segments + parser.finish(is_cut=is_cut))


def read(segments: Sequence[Segment]) -> Read:
    result = Read()
    for segment in segments:
        match segment:
            case Content(text):
                result.content += text
            case Reasoning(text):
                result.reasoning += text
            case CallBegin(name):
                result.calls.append((name, ""))
            case Arguments(text):
                name, so_far = result.calls[-1]
                result.calls[-1] = (name, so_far + text)
            case CallBroken(text):
                result.calls.pop()
                result.content += text
            case CallEnd():
                pass
    return result


def cut(text: str, places: Iterable[int]) -> list[str]:
    """Cut a text at these places."""
    at = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]


def cuts() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 10_000), max_size=12)


def own_form(family: CallFamily, name: str, given: Mapping[str, Any]) -> str:
    """Return a call as the models write it, where that is not the JSON that is forced."""
    if (form := family.parser.form) is not None:
        parts = [form.begin.replace("{name}", name).replace("{number}", "1")]
        for key, value in given.items():
            is_string = isinstance(value, str)
            text = form.key.replace("{key}", key).replace("{is_string}", str(is_string).lower())
            text = text.replace("{type}", "string" if is_string else "number")
            parts += [text, value if is_string else json.dumps(value), form.value_end.replace("{key}", key)]
        return "".join([family.opening, *parts, form.end, family.closing])
    return family.written([(name, json.dumps(given))])
