"""Errors and forms of what clients send are found in time linear in it."""

import json

import msgspec
import pytest

from oaiserve.routes.bodies import ChatBody
from oaiserve.routes.constraints import GBNF_DEFINITION
from oaiserve.routes.invalid import invalid_type
from tests.growth import is_linear


@pytest.mark.parametrize(
    "unit", [" - at `$.", " - at `$`", "Expected `", "Invalid value '", "Object missing required field `"]
)
@pytest.mark.parametrize("end", ["", "\n", "`"])
def test_words_that_are_not_allowed_are_told_in_linear_time(unit: str, end: str) -> None:
    def tell(size: int) -> None:
        value = unit * (size // len(unit)) + end
        body = {"model": "m", "messages": [], "response_format": {"type": value}}
        with pytest.raises(msgspec.ValidationError) as refused:
            msgspec.json.decode(json.dumps(body), type=ChatBody)
        assert "response_format.type" in invalid_type(ChatBody, str(refused.value)).message

    assert is_linear(tell, 5000)


@pytest.mark.parametrize("unit", ["\n", " ", "a", "a\n", "a ", "-\n"])
def test_gbnf_is_told_from_lark_in_linear_time(unit: str) -> None:
    assert is_linear(lambda size: GBNF_DEFINITION.search(unit * (size // len(unit))), 5000)
