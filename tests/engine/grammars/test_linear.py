"""Translating a client's grammar takes time linear in its text."""

import contextlib

import pytest

from oaiserve.engine.grammars.notations import translate
from oaiserve.engine.grammars.refusal import Refused
from oaiserve.engine.request import GrammarKind
from tests.growth import is_linear

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
]


@pytest.mark.parametrize("kind", ["lark", "gbnf"])
@pytest.mark.parametrize("begin", ["", 'start: "', "start: /", "start: <"])
@pytest.mark.parametrize("unit", UNITS)
def test_translating_takes_linear_time(unit: str, begin: str, kind: GrammarKind) -> None:
    def read(size: int) -> None:
        with contextlib.suppress(Refused):
            translate(kind, begin + unit * (size // len(unit)))

    assert is_linear(read, 1000)


@pytest.mark.parametrize("text", ['start: "a', "start: /a", 'start: "a\\"\nb: "c"'])
def test_a_text_without_an_end_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="without an end in its line"):
        translate("lark", text)
