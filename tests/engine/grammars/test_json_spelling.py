"""What follows the respelled beginning of a JSON text may also follow the beginning itself."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.grammars.json_spelling import respelled

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(value=VALUES, separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,", "  : ")]), ascii_=st.booleans(),
       indent=st.sampled_from([None, 2]), share=st.floats(0, 1))  # fmt: skip
def test_any_beginning_and_the_rest_of_the_usual_spelling_are_the_value(
    value: Any, separators: tuple[str, str], ascii_: bool, indent: int | None, share: float
) -> None:
    text = json.dumps(value, separators=separators, ensure_ascii=ascii_, indent=indent)
    begun = text[: round(share * len(text))]
    spelled = respelled(begun)
    if spelled is not None:
        usual = json.dumps(value, ensure_ascii=False)
        assert usual.startswith(spelled)
        assert json.loads(begun + usual[len(spelled) :]) == value


@pytest.mark.parametrize(
    ("begun", "spelled"),
    [
        ("", ""),
        ('{"a":"x', '{"a": "x'),
        ('{"a":["x","y', '{"a": ["x", "y'),
        ('{"a":', '{"a":'),
        ('{"a": ', '{"a": '),
        ('{"a":1,\n ', '{"a": 1, '),
        ('{ "a" ', '{"a"'),
        ('["caf\\u00e9 , a:b"', '["café , a:b"'),
        ('["caf\\u00e', None),
        ('["caf\\', None),
        ('["\\ud83d', None),
        ('["\t', None),
        ("[1 ", None),
        ("[1", "[1"),
    ],
)
def test_a_beginning_is_spelled_anew_or_not_at_all(begun: str, spelled: str | None) -> None:
    assert respelled(begun) == spelled
