"""Translating a client's grammar takes time linear in its text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from oaiserve.engine.grammars.notations import translate
from oaiserve.engine.grammars.refusal import Refused
from oaiserve.engine.grammars.thinking import Thinking
from oaiserve.engine.request import GrammarKind, Reasoning
from oaiserve.engine.text.detokenize import TokenTable
from tests.engine.grammars.plain import BACKEND, ids
from tools.attack.functions.linear import Case, repeated

UNITS = [
    "a",
    " ",
    "\n",
    "a ",
    "-",
    '"',
    '\\"',
    "/",
    "\\/",
    "<",
    "<a",
    "a:",
    "@",
    "~",
    "temperature ",
    "%json ",
    "[",
    "(",
    "[a-z",
]
BEGINNINGS = ["", 'start: "', "start: /", "start: <", "root ::= ["]
KINDS: list[GrammarKind] = ["lark", "gbnf"]

Schema = dict[str, Any]


def cases() -> Iterator[Case]:
    for kind in KINDS:
        for begin in BEGINNINGS:
            for unit in UNITS:
                read = reader(kind, repeated(begin, unit))
                yield Case(f"{kind}, {begin!r} and many {unit!r}", read, 1000)
    for name, make, number in (("anyOf", twice("anyOf"), 2), ("allOf", twice("allOf"), 2), ("zigzag", zigzag, 50)):
        yield Case(f"schema, {name}", reader("json_schema", in_json(make)), number)
    large = in_json(lambda number: {"enum": [2**53 + 1 + at for at in range(number)]})
    yield Case("schema, an enum of large numbers", reader("json_schema", large), 500)
    yield Case("white space before reasoning", push_blanks, 2000)


def reader(kind: GrammarKind, text: Callable[[int], str]) -> Callable[[int], None]:
    def read(size: int) -> None:
        with contextlib.suppress(Refused):
            translate(kind, text(size))

    return read


def in_json(make: Callable[[int], Schema]) -> Callable[[int], str]:
    return lambda number: json.dumps(make(number))


def twice(keyword: str) -> Callable[[int], Schema]:
    """Each definition has the next one twice, so that there are 2**number ways through them."""

    def schema(number: int) -> Schema:
        links = {f"d{at}": {keyword: [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(number)}
        return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{number}": {"type": "integer"}}}

    return schema


def zigzag(number: int) -> Schema:
    """A chain of references whose links are met in the least helpful order, from the middle outwards."""
    places = sorted(range(number), key=lambda at: number + at if at % 2 else number - at)
    links = {f"d{at}": {"$ref": f"#/$defs/d{at - 1}"} if at else {"type": "string"} for at in range(number)}
    return {"anyOf": [{"$ref": f"#/$defs/d{at}"} for at in places], "$defs": links}


def push_blanks(size: int) -> None:
    (blank,) = ids(" ")
    thinking = Thinking(Reasoning("</think>", "<think>"), TokenTable(BACKEND), ids("</think>"))
    for _ in range(size):
        assert thinking.push(blank) == b""
    assert thinking.push(BACKEND.token_to_id("|")) == b" " * size + b"|"
