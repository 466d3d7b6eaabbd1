"""Translating a client's grammar takes time linear in its text."""

import contextlib
import json

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


@pytest.mark.parametrize("keyword", ["anyOf", "allOf"])
def test_schemas_that_refer_to_each_other_twice_take_linear_time(keyword: str) -> None:
    def read(size: int) -> None:
        defs: dict[str, object] = {
            f"d{number}": {keyword: [{"$ref": f"#/$defs/d{number + 1}"}] * 2} for number in range(size)
        }
        text = json.dumps({"$defs": {**defs, f"d{size}": {"type": "integer"}}, "$ref": "#/$defs/d0"})
        with contextlib.suppress(Refused):
            translate("json_schema", text)

    assert is_linear(read, 2)


def test_long_chain_of_references_is_refused() -> None:
    defs = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(2000)}
    with pytest.raises(Refused, match="schemas within each other"):
        translate("json_schema", json.dumps({"$defs": {**defs, "d2000": {"type": "integer"}}, "$ref": "#/$defs/d0"}))
