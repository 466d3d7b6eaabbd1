"""Translating a client's grammar takes time linear in its text."""

import contextlib
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

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
    "[a-z",
]

Schema = dict[str, Any]


@pytest.mark.parametrize("kind", ["lark", "gbnf"])
@pytest.mark.parametrize("begin", ["", 'start: "', "start: /", "start: <", "root ::= ["])
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


def twice(keyword: str) -> Callable[[int], Schema]:
    """Each definition has the next one twice, so that there are 2**number ways through them."""

    def made(number: int) -> Schema:
        links = {f"d{at}": {keyword: [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(number)}
        return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{number}": {"type": "integer"}}}

    return made


def zigzag(number: int) -> Schema:
    """A chain of references whose links are met in the least helpful order, from the middle outwards."""
    places = sorted(range(number), key=lambda at: number + at if at % 2 else number - at)
    links = {f"d{at}": {"$ref": f"#/$defs/d{at - 1}"} if at else {"type": "string"} for at in range(number)}
    return {"anyOf": [{"$ref": f"#/$defs/d{at}"} for at in places], "$defs": links}


@pytest.mark.parametrize(
    ("made", "number"),
    [(twice("anyOf"), 2), (twice("allOf"), 2), (zigzag, 50)],
    ids=["anyOf", "allOf", "zigzag"],
)
def test_schemas_take_linear_time(made: Callable[[int], Schema], number: int) -> None:
    def read(size: int) -> None:
        with contextlib.suppress(Refused):
            translate("json_schema", json.dumps(made(size)))

    assert is_linear(read, number)


def test_many_values_far_inside_a_schema_take_no_memory_for_their_places() -> None:
    value: Any = [{}] * 20_000
    for _ in range(200):
        value = {"a" * 60: value}
    text = json.dumps({"type": "string", "examples": value})
    tracemalloc.start()
    try:
        with contextlib.suppress(Refused):
            translate("json_schema", text)
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    finally:
        tracemalloc.stop()


def test_long_chain_of_references_is_refused() -> None:
    defs = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(2000)}
    with pytest.raises(Refused, match="schemas within each other"):
        translate("json_schema", json.dumps({"$defs": {**defs, "d2000": {"type": "integer"}}, "$ref": "#/$defs/d0"}))
