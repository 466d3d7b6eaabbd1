"""Grammars that would cost much are refused, or take little memory."""

import contextlib
import json
import tracemalloc
from typing import Any

import pytest

from oaiserve.engine.grammars.notations import translate
from oaiserve.engine.grammars.refusal import Refused


@pytest.mark.parametrize("text", ['start: "a', "start: /a", 'start: "a\\"\nb: "c"'])
def test_a_text_without_an_end_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="without an end in its line"):
        translate("lark", text)


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
