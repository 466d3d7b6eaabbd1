"""The types that a tool's schema states are read in one way, by templates' plain tools and by parsers of calls."""

import json
from typing import Any

import pytest

from oaiserve.engine.text.plain_tools import plain_tool
from oaiserve.engine.text.schema_types import SchemaTypes
from oaiserve.routes.chat.answer_reader import AnswerReader
from tests.routes.dialects.reading import read, segments_of

ROOT: dict[str, Any] = {
    "$defs": {
        "Count": {"type": "integer"},
        "Maybe": {"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
        "a/b": {"enum": ["x", 1, 2, None]},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, ["integer"]),
        ({"type": ["null", "integer", 7]}, ["null", "integer"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["integer", "null"]),
        (
            {"oneOf": [{"const": 1.5}, {"enum": [True, {}]}, {"type": "array"}]},
            ["number", "boolean", "object", "array"],
        ),
        ({"anyOf": [{"type": "integer"}, {}]}, []),
        ({"allOf": [{"title": "x"}, {"type": ["string", "integer"]}, {"$ref": "#/$defs/Count"}]}, ["integer"]),
        ({"$ref": "#/$defs/Maybe"}, ["integer", "null"]),
        ({"$ref": "#/$defs/a~1b"}, ["string", "integer", "null"]),
        ({"$ref": "#/$defs/Loop"}, []),
        ({"$ref": "#/$defs/None"}, []),
        ({"$ref": "https://example.org/x"}, []),
        ({"type": 7, "anyOf": 3}, []),
        ({"enum": "x"}, []),
        (True, []),
    ],
)
def test_the_types_of_a_schema(schema: Any, types: list[str]) -> None:
    assert list(SchemaTypes(ROOT).of(schema)) == types


def test_references_that_lead_to_each_other_are_followed_once() -> None:
    definitions = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 50} for n in range(14)}
    root = {"$defs": {**definitions, "d14": {"type": "integer"}}}
    assert SchemaTypes(root).of({"$ref": "#/$defs/d7"}) == ("integer",)
    assert SchemaTypes(root).of({"$ref": "#/$defs/d0"}) == ()  # too deep


def plain(schema: Any) -> Any:
    parameters = {**ROOT, "type": "object", "properties": {"n": schema}}
    tool = plain_tool({"type": "function", "function": {"name": "f", "parameters": parameters}})
    return tool["function"]["parameters"]["properties"]["n"]


@pytest.mark.parametrize(
    ("optional", "expected"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "N"}, {"type": "integer", "title": "N"}),
        ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, {"type": "integer"}),
        ({"type": ["integer", "null"]}, {"type": "integer"}),
        (
            {
                "anyOf": [
                    {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
                    {"type": "null"},
                ]
            },
            {"type": "array", "items": {"type": "number"}},
        ),
        (
            {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
            {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        ),
        ({"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]}, {"$ref": "#/$defs/Count", "type": "integer"}),
        ({"enum": [1, 2]}, {"enum": [1, 2], "type": "integer"}),
        ({"type": "null"}, {"type": "string"}),
    ],
)
def test_a_plain_tool_has_the_type_that_an_optional_value_has_otherwise(optional: Any, expected: Any) -> None:
    assert plain(optional) == expected


@pytest.mark.plugin("dialects")
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_a_call_between_tags_has_the_types_of_its_schema(name: str) -> None:
    from oaiserve.plugins.dialects import families

    family = next(family for family in families() if family.name == name)
    properties = {
        "n": {"allOf": [{"$ref": "#/$defs/Maybe"}]},
        "text": {"const": "12"},
        "choice": {"enum": ["1", "2"]},
        "flag": {"enum": [True, "no"]},
    }
    arguments = {"n": 3, "text": "12", "choice": "1", "flag": True}
    parser = family.parser({"f": {**ROOT, "type": "object", "properties": properties}})
    text = family.written([("f", json.dumps(arguments))])
    (call,) = read(segments_of(AnswerReader(None, parser), [text])).calls
    assert json.loads(call[1]) == arguments
