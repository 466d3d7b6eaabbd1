"""The message for a value of the wrong type names its field, whatever the value says."""

import json

import msgspec
import pytest

from oaiserve.routes.intake.body_types import ChatBody
from oaiserve.routes.intake.invalid import invalid_type


@pytest.mark.parametrize(
    "unit", [" - at `$.", " - at `$`", "Expected `", "Invalid value '", "Object missing required field `"]
)
@pytest.mark.parametrize("end", ["", "\n", "`"])
def test_a_word_that_looks_like_an_error_hides_no_field(unit: str, end: str) -> None:
    body = {"model": "m", "messages": [], "response_format": {"type": 100 * unit + end}}

    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.json.decode(json.dumps(body), type=ChatBody)

    assert "response_format.type" in invalid_type(ChatBody, str(refused.value)).message
