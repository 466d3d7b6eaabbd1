"""Tests of which schemas are refused, and where. test_keywords.py has those that are obeyed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from oaiserve.engine.grammars.json_schema.formats import FORMATS, NUMBER_FORMATS
from oaiserve.engine.grammars.json_schema.limits import MOST_FORCED, MOST_LINKED_DEPTH
from oaiserve.engine.grammars.json_schema.prepare import (
    MOST_BYTES,
    MOST_DEPTH,
    MOST_ITEMS,
    MOST_PROPERTIES,
    MOST_SCHEMAS,
    prepare,
)
from oaiserve.engine.grammars.refusal import Refused


def prepared(schema: Any) -> dict[str, Any]:
    return prepare(json.dumps(schema)).document


def refusal(schema: Any) -> str:
    with pytest.raises(Refused) as refused:
        prepare(schema if isinstance(schema, str) else json.dumps(schema))
    return refused.value.reason


def within(num_levels: int, schema: Any) -> Any:
    for _ in range(num_levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def chain(length: int, end: Any, **beside: Any) -> dict[str, Any]:
    """Return a schema of definitions that each refer to the next one."""
    definitions = {
        f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}", **beside}}} for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": end}}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ([], "the schema at $ must be an object, true or false, got a list"),
        ({"items": 5}, "$.items must be an object, true or false, got a number"),
        ({"type": "bogus"}, "the type at $.type must be one of string, number, integer, boolean, null, array, object,"),
        ({"type": []}, "the list of types at $.type must not be empty"),
        ({"type": ["string", None]}, "got null"),
        ({"properties": []}, "$.properties must be an object, got a list"),
        ({"required": "a"}, "$.required must be a list of strings"),
        ({"enum": []}, "$.enum must be a list that is not empty, got []"),
        ({"enum": "a"}, "$.enum must be a list that is not empty, got a string"),
        ({"anyOf": []}, "$.anyOf must be a list that is not empty"),
        ({"type": "string", "enum": [1, None]}, "no value of $.enum is of the type at $.type"),
        ({"type": "string", "const": 1}, "no value of $.const is of the type"),
        ({"minimum": "1"}, "$.minimum must be a number, got a string"),
        ({"minimum": True}, "$.minimum must be a number, got a boolean"),
        ({"minimum": 3, "maximum": 2}, "$.minimum must not be greater than 'maximum', got 3 and 2"),
        ({"exclusiveMinimum": 3, "maximum": 3}, "$.exclusiveMinimum must be less than 'maximum', got 3 and 3"),
        ({"exclusiveMinimum": 3, "exclusiveMaximum": 3}, "must be less than 'exclusiveMaximum'"),
        ({"minLength": -1}, "$.minLength must be an integer from 0"),
        ({"minLength": 1.5}, "got 1.5"),
        ({"minLength": 2, "maxLength": 1}, "$.minLength must not be greater than 'maxLength', got 2 and 1"),
        ({"minItems": 2, "maxItems": 1}, "$.minItems must not be greater than 'maxItems'"),
        ({"minProperties": 2, "maxProperties": 1}, "$.minProperties must not be greater than"),
        ({"maxItems": MOST_ITEMS + 1}, "$.maxItems is too large"),
        ({"multipleOf": 0}, "$.multipleOf must be greater than 0"),
        ({"multipleOf": 1e-7}, "$.multipleOf must have at most 6 decimal places, got 1e-07"),
        ({"multipleOf": 655.37}, "$.multipleOf must be at most 65536, and so must its digits as a whole number"),
        ({"allOf": [{"multipleOf": 1.01}]*2}, "must be at most 100, and so must its digits as a whole number, to"),
        (
            {"patternProperties": {"^(a|a)*$": {}}, "properties": {60 * "a" + "b": {}}},
            "to tell which names match the patterns of $.patternProperties takes too long",
        ),
        ({"enum": [2**53 + 1], "multipleOf": 2}, "no value of $.enum is within the bounds at $"),
        ({"enum": ["a", {"b": [1e300]}]}, "$.enum[1] has the number 1e+300, which is no integer and is inexact"),
        ({"enum": ["a", "b\x01"]}, "the value at $.enum[1] has a control character"),
        ({"pattern": "\x7f"}, "the pattern at $.pattern has the control character U+007F"),
        ({"minimum": 2**63}, "the bound at $.minimum must be at most 9223372036854656000"),
        ({"minimum": 2**60 + 1, "maximum": 2**60 + 2}, "the bounds at $ are too close to each other"),
        ({"oneOf": [{"const": 1}, {"multipleOf": 0.5}], "const": 1}, "'oneOf' at $.oneOf is only supported where"),
        ('{"maximum": 1e999}', "not valid JSON: Out of range float values"),
        ({"pattern": "("}, "the pattern at $.pattern has a '(' without a ')'"),
        ({"pattern": 5}, "$.pattern must be a string"),
        ({"format": "zip"}, f"the format at $.format must be one of {', '.join(FORMATS)}, got \"zip\""),
        ({"$ref": "#/$defs/x"}, '$.$ref refers to "#/$defs/x", which is not in the schema'),
        ({"$ref": "#x"}, "which is not in the schema"),
        ({"$ref": "https://example.org/x"}, "outside the schema; nothing is fetched"),
        ({"$ref": "other.json#/x"}, "outside the schema"),
        ({"$ref": "#/title", "title": "x"}, "which is no schema but a string"),
        ({"$ref": 5}, "$.$ref must be a string"),
        ({"items": {"$id": "x", "items": {"$ref": "#/b"}}}, '$.items.items.$ref refers to "#/items/b", which is not'),
        ({"$id": "http://a/b", "items": {"$ref": "c#d"}}, 'refers to "http://a/c#d", outside the schema'),
        ({"x-guidance": {"lenient": True}}, "'x-guidance' at $.x-guidance"),
        (False, "no answer is valid under the schema"),
        ({"properties": {"a b": {"not": {}}}}, '\'not\' at $.properties["a b"].not'),
        ({"properties": {"ä": {"anyOf": [{}, {"contains": {}}]}}}, '\'contains\' at $.properties["ä"].anyOf[1].c'),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"uniqueItems": True}}}, "'uniqueItems' at $.$defs.a.uniqueItems"),
        ("{", "the schema is not valid JSON"),
        ('{"minimum": NaN}', "NaN is no number"),
        ('{"const": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, f"more than {MOST_DEPTH} schemas within each other"),
        ('{"const": ' + "1" * 5000 + "}", "not valid JSON"),
        (" " * (MOST_BYTES + 1), f"more than {MOST_BYTES} bytes"),
        (within(MOST_DEPTH, {}), f"more than {MOST_DEPTH} schemas within each other"),
        (within(400, {}), f"more than {MOST_DEPTH} schemas within each other"),
        (chain(MOST_LINKED_DEPTH, {}), f"more than {MOST_LINKED_DEPTH} schemas within each other, through '$ref'"),
        (chain(2000, {}), "through '$ref'"),
        (chain(300, {"$ref": "#/$defs/d0"}), "through '$ref'"),
        ({"anyOf": [{} for _ in range(MOST_SCHEMAS)]}, f"more than {MOST_SCHEMAS} schemas"),
        ({"properties": {f"p{i}": {} for i in range(MOST_PROPERTIES + 1)}}, f"more than {MOST_PROPERTIES} properties"),
        ({"$ref": "#"}, "the schema at $ refers to itself for the same value"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "refers to itself for the same value"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "refers to itself without an end"),
        ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, "without an end"),
        ({"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}}, "without an end"),
        ({"required": ["a"], "allOf": [{"type": "object"}, {"properties": {"a": {"$ref": "#"}}}]}, "without an end"),
        ({"type": "string", "minLength": MOST_FORCED + 1}, f"more than {MOST_FORCED} characters"),
        ({"type": "array", "minItems": 5000, "items": {"const": "x" * 100}}, f"more than {MOST_FORCED} characters"),
        ({"minProperties": 2}, "'minProperties' at $.minProperties is not supported where"),
        ({"oneOf": [{"type": "string"}, {"pattern": "a"}]}, "'oneOf' at $.oneOf is only supported where"),
        ({"oneOf": [{"type": "object"}] * 2}, "0 and 1 may both hold"),
        ({"required": ["a"], "properties": {"a": {"type": "null", "enum": [1]}}}, "no value of $.properties.a.enum is"),
        ({"anyOf": [{"const": 1, "type": "null"}, {"minimum": 3, "maximum": 2}]}, "is valid under a schema of $.anyOf"),
        ({"allOf": [{"pattern": f"^a{i}"} for i in range(13)]}, "more than 12 that are joined"),
        ({"minLength": 1, "anyOf": [{"allOf": [{"pattern": f"^a{i}"} for i in range(13)]}]}, "more than 12 that"),
        ({"allOf": [{"enum": list(range(100))}] * 3}, "joins unions that come to more than"),
    ],
)  # fmt: skip
def test_what_cannot_be_obeyed_is_refused_with_its_place(schema: Any, says: str) -> None:
    reason = refusal(schema)
    assert says in reason
    assert len(reason) < 500


def test_definitions_that_double_at_each_level_are_refused() -> None:
    """If a schema has a reference and other keywords, the target is copied."""
    both = {"x": {"$ref": "", "type": "object"}, "y": {"$ref": "", "type": "object"}}
    definitions = {}
    for i in range(60):
        pair = {name: {**each, "$ref": f"#/$defs/d{i + 1}"} for name, each in both.items()}
        definitions[f"d{i}"] = {"type": "object", "properties": pair}
    # Copying all of them would take 2**60 steps.
    assert "joins more than" in refusal({"$ref": "#/$defs/d0", "$defs": {**definitions, "d60": {}}})


def test_unions_that_are_not_joined_may_be_long() -> None:
    values = {"enum": [f"value {i}" for i in range(6000)]}
    assert prepared(values) == values
    assert "joins unions that come to more than 2000" in refusal({"allOf": [values, {"enum": ["value 1"]}]})


def test_patterns_of_alternatives_are_not_joined_with_each_other() -> None:
    alternatives = {"type": "string", "anyOf": [{"pattern": f"^a{i}"} for i in range(50)]}
    assert len(prepared(alternatives)["anyOf"]) == 50
    assert "more than 12 that are joined" in refusal(
        {"allOf": [{"pattern": f"^{i}"} for i in range(12)], **alternatives}
    )


LISTED = {"type": "object", "properties": {"a": {"type": "null"}}}
HARMLESS = {"uniqueItems": False, "dependentRequired": {}, "unevaluatedProperties": True, "then": {"not": {}}}
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        # A definition is prepared once, and what nothing refers to may be anything.
        (
            {"prefixItems": [{"$ref": "#/$defs/a"}] * 3, "$defs": {"a": NULL, "b": {"not": {}}}},
            {"prefixItems": [{"$ref": "#/$defs/r0"}] * 3, "$defs": {"r0": NULL}},
        ),
        # A schema that lists its properties has no others, unless it says so or needs one.
        (LISTED, {**LISTED, "additionalProperties": False}),
        *(
            (opened, opened)
            for opened in (
                {**LISTED, "additionalProperties": True},
                {**LISTED, "required": ["b"]},
                {**LISTED, "minProperties": 2, "required": ["a"]},
                {"type": "object"},
                {"allOf": [LISTED, {"type": "object"}]},
            )
        ),
        # Older drafts are put in the words of the newest.
        ({"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}),
        ({"maximum": 1, "exclusiveMaximum": False}, {"maximum": 1}),
        ({"items": [NULL], "additionalItems": False}, {"prefixItems": [NULL], "items": False}),
        # What demands nothing is left out, and so are values of other types.
        ({"title": "x", "type": "null", "unknown": {"not": {}}, **HARMLESS}, NULL),
        ({"type": ["integer", "null"], "enum": [1, 2.0, 2.5, "x", None, True]}, {"enum": [1, 2.0, None]}),
        # Formats of numbers are bounds.
        ({"type": "integer", "format": "int32", "minimum": 0}, {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}),
        ({"type": "number", "format": "double"}, {"type": "number"}),
        # Other formats are about strings.
        ({"type": ["integer", "array"], "format": "utc-millisec"}, {"type": ["integer", "array"]}),
        # Where keywords contradict each other, there can be no value.
        (
            {"properties": {"a": NULL, "b": {"minLength": 2, "maxLength": 1}}},
            {"properties": {"a": NULL, "b": False}, "additionalProperties": False},
        ),
        ({"items": {"type": "boolean", "enum": ["true"]}}, {"items": False}),
        ({"anyOf": [NULL, {"type": "string", "const": 1}]}, {"anyOf": [NULL, False]}),
    ],
)
def test_a_schema_is_prepared_in_the_words_that_are_known_to_be_obeyed(schema: Any, expected: Any) -> None:
    assert prepared(schema) == expected


@pytest.mark.parametrize("reference", ["#/$defs/a~1b%20%7Ec", "#name", "https://example.org/s#name", "#/$defs/list/0"])
def test_references_within_the_document_are_followed(reference: str) -> None:
    definitions = {"a/b ~c": {"$anchor": "name", "type": "null"}, "list": [{"type": "null"}]}
    schema = {"$id": "https://example.org/s", "$ref": reference.replace("%7Ec", "%7E0c"), "$defs": definitions}
    assert prepared(schema) == {"$ref": "#/$defs/r0", "$defs": {"r0": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "http://a/b/c", "$ref": "e", "$defs": {"d": {"$id": "e", "type": "null"}}},
        {"$id": "http://a/b/c", "$ref": "/e", "$defs": {"d": {"$id": "http://a/e", "type": "null"}}},
        {
            "$id": "http://a/b/c",
            "$ref": "e#f",
            "$defs": {"d": {"$id": "e", "$defs": [{"$anchor": "f", "type": "null"}]}},
        },
        {
            "$ref": "#f",
            "$defs": {"d": {"$id": "e", "$defs": [{"$anchor": "f"}]}, "g": {"$anchor": "f", "type": "null"}},
        },
        {"$ref": "urn:x", "$defs": {"a/~b %": {"$id": "urn:x", "type": "null"}}},
        {"$ref": "urn:x#/$defs/y", "$defs": {"d": {"$id": "urn:x", "$defs": {"y": {"type": "null"}}}}},
        {"$ref": "e", "$defs": {"const": {"$id": "e", "type": "null"}}, "enum": [None, {"$id": "e"}]},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "id": "http://a/b#",
            "$ref": "http://a/b#/definitions/d",
            "definitions": {"d": {"type": "null"}},
        },
        {"$ref": "#d", "definitions": {"d": {"$id": "#d", "type": "null"}}},
    ],
)
def test_references_by_uri_lead_to_the_part_with_that_id(schema: dict[str, Any]) -> None:
    document = prepared({key: value for key, value in schema.items() if key != "enum"})
    assert document == {"$ref": "#/$defs/r0", "$defs": {"r0": {"type": "null"}}}


def test_references_are_relative_to_the_nearest_id() -> None:
    inner = {"$id": "b", "$ref": "#/$defs/c", "$defs": {"c": {"type": "null"}}}
    document = prepared({"items": inner, "prefixItems": [{"$ref": "#/$defs/c"}], "$defs": {"c": {"type": "boolean"}}})
    first = document["prefixItems"][0]["$ref"]
    items = document["items"]["$ref"]
    assert document["$defs"] == {first[8:]: {"type": "boolean"}, items[8:]: {"type": "null"}}


def test_the_alternatives_of_many_objects_are_bounded() -> None:
    members = [{"type": "object", "properties": {f"k{i}_{j}": {"const": j} for j in range(40)}} for i in range(140)]
    with pytest.raises(Refused, match="too many schemas to exclude each other"):
        prepared({"oneOf": members})


def test_a_long_uri_is_not_repeated_before_each_anchor() -> None:
    parts = {f"d{number}": {"$anchor": f"x{number}"} for number in range(1000)}
    with pytest.raises(Refused, match="a URI in the schema has more than 1000 characters: urn:aaa"):
        prepared({"$id": "urn:" + "a" * 100_000, "$ref": "#x0", "$defs": parts})
    assert prepared({"$id": "urn:" + "a" * 100_000, "type": "null", "$defs": parts}) == {"type": "null"}


def with_k(value: str, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": {"const": value}}, "required": list(required)}


@pytest.mark.parametrize(
    ("one", "other", "exclude"),
    [
        ({"type": "string"}, {"type": ["integer", "null"]}, True),
        ({"type": "integer"}, {"type": "number"}, False),
        ({"type": "integer"}, {"enum": ["a", None]}, True),
        ({"const": True}, {"const": 1}, True),
        ({"enum": ["a", "b"]}, {"enum": ["c"]}, True),
        ({"type": "null"}, {"anyOf": [{"type": "string"}, {"const": 1}]}, True),
        ({"type": "string"}, {"format": "date"}, False),
        (True, {"type": "string"}, False),
        (False, {"type": "string"}, True),
        (with_k("a", "k"), with_k("b", "k"), True),
        (with_k("a", "k"), with_k("b"), True),
        ({"type": "object", "required": ["k"]}, {"type": "object", "additionalProperties": False}, True),
        ({"type": "object", "required": ["k"]}, {"type": "object", "minProperties": 1}, False),
    ],
)  # fmt: skip
def test_one_of_is_supported_where_the_schemas_exclude_each_other(one: Any, other: Any, exclude: bool) -> None:
    schema = {"oneOf": [one, {"$ref": "#/$defs/other"}], "$defs": {"other": other}}
    if exclude:
        assert len(prepared(schema)["anyOf"]) == 2
    else:
        assert "may both hold" in refusal(schema)


def test_the_documentation_lists_all_formats() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/json-schema.md").read_text()
    listed = {name for row in page.splitlines() if row.startswith("| `format`") for name in re.findall("`(.*?)`", row)}
    versions = {f"uuid{version}" for version in range(2, 8)}
    sizes = {"int16", "int32", "uint16", "uint32"}
    assert {*FORMATS, *NUMBER_FORMATS} - versions - sizes <= listed
