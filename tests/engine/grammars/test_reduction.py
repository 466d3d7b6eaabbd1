"""Tests what is left out of lenient schemas that llguidance cannot compile, although it obeys each keyword alone."""

import json
from typing import Any

import pytest

from oaiserve.engine.grammars.json_schema import reduction
from oaiserve.engine.grammars.json_schema.prepare import PreparedSchema
from oaiserve.engine.request import Grammar
from oaiserve.errors import InvalidRequest
from tests.engine.grammars.keywords import integer, record, string
from tests.engine.grammars.plain import GRAMMARS, is_refused, make_grammars, pushed

OVERLAPPING = {"allOf": [{"patternProperties": {"a": integer()}}, {"patternProperties": {"^.$": {"minimum": 5}}}]}
CIRCULAR = {
    "additionalProperties": {},
    "anyOf": [{"$ref": "#/$defs/list"}, record("text")],
    "$defs": {"list": record("items", properties={"items": {"type": "array", "items": {"$ref": "#"}}})},
}
FORM = record("a", properties={"a": integer(), "b": OVERLAPPING, "c": string(enum=["x"])})


def left_out(schema: Any, **options: Any) -> list[str]:
    return [*GRAMMARS.compile(Grammar("json_schema", json.dumps(schema), is_lenient=True, **options)).left_out]


@pytest.mark.parametrize(
    ("schema", "keywords"),
    [
        (OVERLAPPING, ["patternProperties"]),
        (FORM, ["patternProperties"]),
        ({"$ref": "#/$defs/a", "$defs": {"a": FORM}}, ["patternProperties"]),
        (record(properties={"a": {}, "b": {}}, maxProperties=1), ["maxProperties"]),
        (record("a", "b", properties={"a": {}, "b": {}}, oneOf=[{"required": ["a"]}, {"required": ["b"]}]), ["oneOf"]),
        (CIRCULAR, ["anyOf"]),
        ({"$ref": "#/$defs/none", "$defs": {"none": False}}, [""]),
        (string(pattern="^a$", minLength=5), ["pattern"]),
        (string(format="ipv4", minLength=50), ["format"]),
    ],
)
def test_what_only_compiling_finds_impossible_is_left_out_and_named(schema: Any, keywords: list[str]) -> None:
    assert left_out(schema) == keywords


def test_the_rest_of_a_schema_is_obeyed() -> None:
    compiled = GRAMMARS.compile(Grammar("json_schema", json.dumps(FORM), is_lenient=True))
    pushed(compiled.matcher(), '{"c": "x", "a": 1, "b": {"z": 7}}')
    for wrong in ('{"a": "', '{"a": 1, "c": "y', '{"c": "x"}', '{"b": {"z": 4}'):
        assert is_refused(wrong, compiled.matcher()), wrong


def test_nothing_is_left_out_of_a_schema_that_compiles() -> None:
    assert left_out(record("a", properties={"a": integer()})) == []


def test_the_place_of_an_error_that_nobody_reads_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    monkeypatch.setattr(
        PreparedSchema, "subschemas", lambda _: (searched.append(place) or ({}, place) for place in "$")
    )
    grammars = make_grammars()
    assert grammars.compile(Grammar("json_schema", json.dumps(FORM), is_lenient=True)).left_out
    assert searched == []
    with pytest.raises(InvalidRequest):
        grammars.compile(Grammar("json_schema", json.dumps(FORM)))
    assert searched == ["$"]


def test_a_search_that_takes_too_long_leaves_out_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "MOST_SEARCH_NS", -1)
    compiled = make_grammars().compile(Grammar("json_schema", json.dumps(FORM), is_lenient=True))
    assert compiled.left_out == [""]
    pushed(compiled.matcher(), '{"a": "x"}')


def test_only_lenient_schemas_of_tools_are_reduced() -> None:
    text = {"lark": "start: @schema_0 @schema_1", "schemas": {"t": FORM, "u": integer()}}
    reduced = GRAMMARS.compile(Grammar("lark_with_schemas", json.dumps({**text, "lenient": ["t"]})))
    assert reduced.left_out == ["patternProperties"]
    pushed(reduced.matcher(), '{"a": 1, "b": {"z": 7}, "c": "x"}5')
    with pytest.raises(InvalidRequest, match="in the parameters of 't'|the parameters of 't'"):
        GRAMMARS.compile(Grammar("lark_with_schemas", json.dumps(text)))
