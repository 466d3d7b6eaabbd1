"""Arguments of calls that are no JSON object become one, with as much of their text as can be read."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.routes.chat.call_arguments import MOST_DEPTH, RAW_KEY, object_text

CUT = "are cut, and completed"
NO_OBJECT = "are no object"
PYTHON = "are Python's, not JSON"
BROKEN = "are not valid JSON"
DEEP = '{"a":' * (MOST_DEPTH + 1) + "1" + "}" * (MOST_DEPTH + 1)
LONG_NUMBER = "9" * 5000
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize(
    ("arguments", "expected", "change"),
    [
        (None, {}, "are empty"),
        (" ", {}, "are empty"),
        ({"a": {"b": 1}}, {"a": {"b": 1}}, ""),
        ('{"a": 9007199254740993}', {"a": 9007199254740993}, ""),
        ("null", {}, NO_OBJECT),
        ("[]", {}, NO_OBJECT),
        ('"x"', {RAW_KEY: "x"}, NO_OBJECT),
        ("[1, 2]", {RAW_KEY: [1, 2]}, NO_OBJECT),
        (5, {RAW_KEY: 5}, NO_OBJECT),
        ('{"text": "', {"text": ""}, CUT),
        ('{"text": "a \\"b\\" \\u00', {"text": 'a "b" '}, CUT),
        ('{"text": "a\\', {"text": "a"}, CUT),
        ('{"a": [1, {"b": "c', {"a": [1, {"b": "c"}]}, CUT),
        ('{"a": {"b": 1}, "c', {"a": {"b": 1}}, CUT),
        ('{"a": 1, "b":', {"a": 1}, CUT),
        ('{"a": 1, "b": tru', {"a": 1}, CUT),
        ('{"smile": "\\ud83d', {"smile": "\ufffd"}, CUT),
        ("{'city': 'Paris', 'now': True}", {"city": "Paris", "now": True}, PYTHON),
        ('"{\\"a\\": 1}"', {"a": 1}, "are JSON within a JSON string"),
        ('{"a": NaN, "b": -Infinity}', {"a": "NaN", "b": "-Infinity"}, "are not quite JSON"),
        ('{"a": 1e999}', {"a": "1e999"}, "are not quite JSON"),
        ('{"a": Infinity', {"a": "Infinity"}, CUT),
        ("{'a': -1e999}", {"a": "-Infinity"}, PYTHON),
        (f'{{"a": -{LONG_NUMBER}', {"a": f"-{LONG_NUMBER}"}, CUT),
        (f'{{"a": {LONG_NUMBER}}}', {"a": LONG_NUMBER}, "are not quite JSON"),
        ("garbage", {RAW_KEY: "garbage"}, BROKEN),
        ('{"a": 1}}', {RAW_KEY: '{"a": 1}}'}, BROKEN),
        (DEEP, {RAW_KEY: DEEP}, "are nested too deeply, and shown as a text"),
    ],
)
def test_arguments_become_an_object(arguments: object, expected: dict[str, Any], change: str) -> None:
    text, said = object_text(arguments)
    assert (json.loads(text, parse_constant=refuse), said) == (expected, change)
    if not change and isinstance(arguments, str) and arguments.strip():
        assert text == arguments


@given(st.dictionaries(st.text(), st.recursive(st.none() | FINITE | st.text(), st.lists), max_size=4), st.data())
def test_a_cut_object_keeps_its_whole_members(whole: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(whole)
    cut = data.draw(st.integers(1, len(text) - 1))
    read_again = json.loads(object_text(text[:cut])[0])
    members = [*whole.items()]
    whole_members = [(name, json.dumps(value)) for name, value in members[: max(0, len(read_again) - 1)]]
    assert [(name, json.dumps(value)) for name, value in read_again.items()][: len(whole_members)] == whole_members


@given(
    st.text() | st.text('{}[]",:\\0a') | st.builds('{{"a": {}'.format, st.sampled_from(["NaN", "1e999", "-Infinity}"]))
)
def test_whatever_the_text_it_becomes_an_object_that_can_be_encoded(text: str) -> None:
    text_of_object, _ = object_text(text)
    assert isinstance(json.loads(text_of_object, parse_constant=refuse), dict)
    text_of_object.encode()


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**5, '{"a": "' + "\\" * 10**6, "{'a': " + "(" * 16000])
def test_hostile_arguments_take_little_time(text: str) -> None:
    start = time.thread_time()
    object_text(text)
    assert time.thread_time() - start < 1
