"""The keywords of JSON Schema, obeyed or refused: a row each, and the check that a row holds.

A row is a schema with instances that are valid under it and others that are not. The grammar of a row has to accept
the first and to reject the others. Then answers are made by drawing among the tokens that the grammar allows: after
some tokens each is brought to an end, and must be valid for the library jsonschema. A row that is refused has to be
refused with its place.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from oaiserve.engine.grammars.grammar import CompiledGrammar, GrammarViolation
from oaiserve.engine.request import Grammar
from oaiserve.engine.text.detokenize import TokenTable
from oaiserve.errors import InvalidRequest
from tests.engine.grammars.json_validity import error_of, instance_error
from tests.engine.grammars.plain import BACKEND, EOS, VOCAB_SIZE, make_grammars, pushed
from tools.markdown import as_markdown

MOST_FREE_TOKENS = 30  # drawn among all that are allowed; then such that close what is open are preferred
MOST_TOKENS = 2_000
CLOSING = (b'"}', b'"]', b'"', b"@", b"}", b"]", b":", b",")
LETTER = {"type": "string", "pattern": "^[a-z]$"}
UUID4 = "123e4567-e89b-42d3-a456-426614174000"
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


@dataclass(frozen=True)
class Obeyed:
    keyword: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]
    note: str = ""


@dataclass(frozen=True)
class RefusedRow:
    keyword: str
    schema: Any
    place: str  # in the message
    note: str = ""


string, numeric, integer, array = (partial(dict, type=name) for name in ("string", "number", "integer", "array"))


def record(*required: str, **keywords: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), **keywords}


DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
CAT = record("kind", "lives", properties={"kind": {"const": "cat"}, "lives": integer()})
DOG = record("kind", "good", properties={"kind": {"const": "dog"}, "good": {"type": "boolean"}})
TREE = record("name", properties={"name": LETTER, "children": array(items={"$ref": "#"}, maxItems=2)})

OBEYED = [
    Obeyed("type", {"type": "boolean"}, [True, False], [None, 0, "true"]),
    Obeyed("type", {"type": ["integer", "null"]}, [5, -3, None], ["5", True, {}], "a list of types"),
    Obeyed(
        "enum", {"enum": ["a", "ab", 1, 1.5, None, [1], {"k": 2}]}, ["a", "ab", 1, 1.5, None, [1], {"k": 2}], ["abc", 2]
    ),
    Obeyed("enum", {"type": "string", "enum": ["a", 1, None]}, ["a"], [1, None], "next to `type`"),
    Obeyed(
        "enum",
        record("a", properties={"a": LETTER, "b": {"type": "boolean", "enum": ["true"]}}),
        [{"a": "x"}],
        [{"a": "x", "b": True}, {"a": "x", "b": "true"}],
        "a property whose keywords contradict each other is not written",
    ),
    Obeyed(
        "enum",
        record("id", properties={"id": integer(enum=[1, 2**53 + 1, -(2**63)]), "name": LETTER}),
        [{"id": 2**53 + 1, "name": "x"}, {"id": -(2**63)}, {"id": 1}],
        [{"id": 2**53}, {"id": 2**63}, {"name": "x"}],
        "integers beyond 2^53 - 1, unless objects around them are joined with others",
    ),
    Obeyed(
        "enum",
        {"enum": [[2**53 + 1, 1], {"id": 2**60 + 1}, 1e16]},
        [[2**53 + 1, 1], {"id": 2**60 + 1}, 10**16],
        [[2**53, 1], {"id": 2**60}, 10**16 + 2],
    ),
    Obeyed(
        "enum",
        {"$ref": "#/$defs/id", "maximum": 2**60, "$defs": {"id": integer(enum=[7, 2**53 + 1, 2**60 + 1])}},
        [7, 2**53 + 1],
        [2**53, 2**60 + 1, 2**53 + 2],
    ),
    Obeyed("const", {"const": {"b": [1, "x"], "a": None}}, [{"b": [1, "x"], "a": None}], [{}, {"b": [1, "x"]}]),
    Obeyed(
        "properties",
        record(properties={"b": integer(), "a": LETTER}),
        [{}, {"b": 1, "a": "x"}, {"a": "x"}],
        [{"b": "x"}],
        "in their order; if they are listed, no others, unless `additionalProperties` is given",
    ),
    Obeyed("required", record("a", properties={"a": LETTER, "b": LETTER}), [{"a": "x"}], [{}, {"b": "x"}]),
    Obeyed(
        "additionalProperties",
        record(additionalProperties=integer(), properties={"a": LETTER}),
        [{"a": "x"}, {"a": "x", "b": 1}],
        [{"a": 1}, {"b": "x"}],
        "a schema",
    ),
    Obeyed(
        "additionalProperties",
        record(additionalProperties=False, properties={"a": LETTER}),
        [{}, {"a": "x"}],
        [{"b": 1}],
    ),
    Obeyed(
        "patternProperties",
        record(patternProperties={"^n_": integer(), "^s_": LETTER}, additionalProperties=False),
        [{}, {"n_a": 1, "s_b": "x"}],
        [{"n_a": "x"}, {"b": 1}],
        "if no name can match two of the patterns",
    ),
    Obeyed(
        "patternProperties",
        record("n_b", patternProperties={"^n_": string(minLength=2)}, properties={"n_a": string(maxLength=2)}),
        [{"n_a": "xy", "n_b": "xyz"}],
        [{"n_b": "x"}, {"n_a": "x", "n_b": "xy"}, {"n_a": "xyz", "n_b": "xy"}],
    ),
    Obeyed(
        "propertyNames",
        record(
            propertyNames={"$ref": "#/$defs/n"},
            additionalProperties=integer(),
            **{"$defs": {"n": {"enum": ["a", "b"]}}},
        ),
        [{}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}],
        "an `enum` or a `pattern`, without `properties`",
    ),
    Obeyed(
        "propertyNames",
        record(propertyNames=string(pattern="^x"), additionalProperties=integer()),
        [{}, {"x1": 1}],
        [{"a": 1}, {"x": "x"}],
    ),
    Obeyed(
        "minProperties",
        record("a", properties={"a": LETTER, "b": LETTER}, minProperties=1),
        [{"a": "x"}],
        [{}],
        "at most one more than are required",
    ),
    Obeyed(
        "minProperties", record(properties={"a": LETTER, "b": LETTER}, minProperties=1), [{"a": "x"}, {"b": "x"}], [{}]
    ),
    Obeyed(
        "maxProperties",
        record(maxProperties=2, additionalProperties=integer()),
        [{}, {"a": 1, "b": 2}],
        [{"a": 1, "b": 2, "c": 3}],
        "if all listed properties are required",
    ),
    Obeyed("items", array(items=integer()), [[], [1, 2]], [["x"], [1, None]]),
    Obeyed("items", array(items=False), [[]], [[1]], "`false`"),
    Obeyed(
        "prefixItems",
        array(prefixItems=[LETTER, integer()], items=False, minItems=2),
        [["x", 1]],
        [[], ["x"], [1, "x"], ["x", 1, 2]],
    ),
    Obeyed(
        "prefixItems",
        array(prefixItems=[{"const": 2**53 + 1}, LETTER], items=integer(), minItems=1, maxItems=3),
        [[2**53 + 1], [2**53 + 1, "x", 5]],
        [[], [2**53], [2**53 + 1, 5], [2**53 + 1, "x", 5, 5]],
    ),
    Obeyed("minItems", array(items=integer(), minItems=2), [[1, 2], [1, 2, 3]], [[], [1]]),
    Obeyed("maxItems", array(items=integer(), maxItems=2), [[], [1, 2]], [[1, 2, 3]]),
    Obeyed("minLength", string(minLength=2), ["ab", "é😀"], ["", "a", "😀"], "in characters"),
    Obeyed("maxLength", string(maxLength=2), ["", "😀é"], ["abc"]),
    Obeyed("pattern", string(pattern="^[a-c]+\\d$"), ["ab1", "c0"], ["1", "xab1", "ab1x"]),
    Obeyed("pattern", string(pattern='^[^"]*$'), ["", "a\n\\"], ['"', 'a"b']),
    Obeyed("pattern", string(pattern="^[^\\\\a]+$"), ['b"\n'], ["\\", "b\\"]),
    Obeyed("pattern", string(pattern="b"), ["b", "abc"], ["", "ac"], "without anchors, somewhere in the string"),
    Obeyed(
        "pattern",
        string(pattern=ZOD_EMAIL, format="email"),
        ["a.b@example.org"],
        [".a@example.org", "a..b@example.org"],
        "those of zod and pydantic that look around themselves",
    ),
    Obeyed(
        "pattern",
        string(pattern="^[a-z]+$", minLength=2, maxLength=3),
        ["ab", "abc"],
        ["a", "abcd", "A1"],
        "with bounds of length",
    ),
    Obeyed("format", string(format="date"), ["2024-02-29"], ["2023-02-29", "2024-13-01", "x"], "`date`"),
    Obeyed("format", string(format="time"), ["23:59:01Z", "01:02:03.5+01:00"], ["24:00:00Z", "1:2:3"], "`time`"),
    Obeyed(
        "format",
        string(format="date-time"),
        ["2024-02-29T23:59:01Z"],
        ["2024-02-30T00:00:00Z", "2024-02-29"],
        "`date-time`",
    ),
    Obeyed("format", string(format="duration"), ["P1DT2H", "P3W"], ["1D", "P"], "`duration`"),
    Obeyed("format", string(format="uuid"), ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"], "`uuid`"),
    Obeyed("format", string(format="email"), ["a.b@example.org"], ["a.b", "@x"], "`email`"),
    Obeyed(
        "format", string(format="hostname"), ["a-b.example.org", "ab-c--d", "a"], ["-a", "a..b", "xn--X"], "`hostname`"
    ),
    Obeyed("format", string(format="ipv4"), ["127.0.0.1"], ["256.0.0.1", "1.2.3"], "`ipv4`"),
    Obeyed("format", string(format="ipv6"), ["::1", "2001:db8::ff00:42:8329"], ["1.2.3.4", ":::"], "`ipv6`"),
    Obeyed("format", string(format="uri"), ["https://example.org/a?b=c#d"], ["example", "/a"], "`uri`"),
    Obeyed("format", string(format="uuid4"), [UUID4], [UUID4.replace("-4", "-1")], "`uuid1` to `uuid8`"),
    Obeyed("format", string(format="ipvanyaddress"), ["1.2.3.4", "2001:db8::1", "::"], ["1::2::3"], "`ipvanyaddress`"),
    Obeyed("format", string(format="ipv4interface"), ["10.0.0.1/8"], ["10.0.0.1/33"], "`ipv4interface`"),
    Obeyed("format", string(format="base64"), ["", "QUI=", "+/8="], ["QUI", "_-8="], "`base64`, `byte`"),
    Obeyed("format", string(format="base64url"), ["QUI=", "_-8="], ["+/8="], "`base64url`"),
    Obeyed("format", string(format="nanoid"), ["V1StGXR8_Z5jdHi6B-myT"], ["V1StGXR8"], "`nanoid`"),
    Obeyed("format", string(format="cuid2"), ["tz4a98xxat96iws9zmbrgj3a"], ["A", ""], "`cuid2`"),
    Obeyed("format", string(format="ulid"), ["01ARZ3NDEKTSV4RRFFQ69G5FAV"], ["01ARZ3NDEKTSV4RRFFQ69G5FAI"], "`ulid`"),
    Obeyed("format", string(format="e164"), ["+4915112345678"], ["004915112345678"], "`e164`"),
    Obeyed(
        "format",
        string(format="binary"),
        ["", "x"],
        [5],
        "`binary`, `password`, `path`, `file-path` and `directory-path`, which any string is",
    ),
    Obeyed(
        "format",
        integer(format="int32"),
        [-(2**31), 2**31 - 1],
        [2**31],
        "of numbers: `int8` to `int64`, `uint8` to `uint64`, `float`, `double`",
    ),
    Obeyed("format", integer(format="int64"), [2**60 + 1, -(2**53) - 1], [2**63, -(2**63) - 1]),
    Obeyed("format", array(items=integer(format="int64")), [[2**60 + 1, 2**63 - 2**17]], [[2**63], [1, -(2**63) - 1]]),
    Obeyed("format", array(items=array(items=integer(format="int64"))), [[[2**60 + 1]]], [[[2**63]], [[1], [2**64]]]),
    Obeyed("format", array(items=integer(), format="table"), [[1]], ["x"], "any, for values that aren't strings"),
    Obeyed("minimum", integer(minimum=-3), [-3, 0, 12], [-4, -30]),
    Obeyed(
        "minimum",
        integer(minimum=2**53, maximum=2**63 - 1),
        [2**53, 2**60 + 1],
        [2**53 - 1, 2**63],
        "bounds beyond 2^53 - 1 are narrowed by less than 1 in 10^13, and end at 2^63",
    ),
    Obeyed("exclusiveMaximum", numeric(exclusiveMaximum=-(2**60)), [-(2**61)], [-(2**60), -5]),
    Obeyed("exclusiveMaximum", numeric(exclusiveMaximum=1e300), [2**53 - 2, 1.5, -(10**20)], []),
    Obeyed("maximum", numeric(maximum=2.5), [2.5, -7, 2.4], [2.6, 3]),
    Obeyed("exclusiveMinimum", numeric(exclusiveMinimum=-1.5), [-1.4, 0], [-1.5, -2]),
    Obeyed("exclusiveMaximum", integer(exclusiveMaximum=10), [9, -10], [10, 11]),
    Obeyed(
        "multipleOf",
        integer(multipleOf=3, minimum=-9, maximum=30),
        [-9, 0, 27],
        [1, -8, 33],
        "up to six decimal places, as JSON Schema defines it",
    ),
    Obeyed("multipleOf", integer(multipleOf=1e-8), [5, -(10**12)], [0.5]),
    Obeyed("multipleOf", numeric(multipleOf=0.01, minimum=0), [19.99, 0.07, 3], [19.995, -0.01]),
    Obeyed("anyOf", {"anyOf": [LETTER, integer(minimum=5)]}, ["x", 5], ["xy", 4]),
    Obeyed(
        "anyOf",
        record("a", properties={"a": {}}, anyOf=[{"required": ["b"]}, {"properties": {"a": integer()}}]),
        [{"a": 1}],
        [{"a": "x"}],
        "next to other keywords",
    ),
    Obeyed(
        "oneOf",
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
        [{"kind": "cat", "lives": 9}, {"kind": "dog", "good": True}],
        [{"kind": "cat", "good": True}, {}],
        "if the types, `const` or `enum` of the schemas, or those of a property, exclude each other",
    ),
    Obeyed(
        "oneOf",
        record(properties={"a": integer(), "b": LETTER, "c": LETTER}, oneOf=[{"required": ["a"]}, record("b", "c")]),
        [{"a": 1}, {"b": "x", "c": "y"}, {"a": 1, "c": "y"}],
        [{}, {"b": "x"}, {"a": 1, "b": "x", "c": "y"}],
        "or if each requires a property that the other doesn't, of which an object then has one",
    ),
    Obeyed(
        "oneOf",
        {"oneOf": [{"$ref": "#/$defs/a"}, record("b", properties={"b": LETTER})], "$defs": {"a": record("a")}},
        [{"a": 1}, {"b": "x"}],
        [{}, {"a": 1, "b": "x"}, "a"],
    ),
    Obeyed("oneOf", {"oneOf": [string(maxLength=2), {"enum": ["a", 5]}]}, ["b", "", 5], ["a", "abc", 6, None]),
    Obeyed(
        "oneOf",
        {"oneOf": [record("a"), record("a", "b"), {"type": "null"}]},
        [{"a": 1}, {"a": 1, "c": 2}, None],
        [{"a": 1, "b": 2}, {}, "a"],
        "or `not` may have them",
    ),
    Obeyed(
        "oneOf",
        {
            "oneOf": [
                {"$ref": "#/$defs/a"},
                {"properties": {"k": {"enum": ["b", "c"]}}, "additionalProperties": False},
            ],
            "$defs": {"a": record(properties={"k": {"const": "a"}, "n": array(items=integer())})},
        },
        [{"k": "a", "n": [1]}, {"k": "a"}, {"k": "b"}, {"k": "c"}],
        [{}, {"k": "d"}, {"k": "b", "n": [1]}],
    ),
    Obeyed(
        "allOf",
        {"allOf": [record("a", properties={"a": integer(minimum=2)}), record(properties={"a": integer(maximum=3)})]},
        [{"a": 2}, {"a": 3}],
        [{"a": 1}, {"a": 4}, {}],
    ),
    Obeyed(
        "$ref",
        TREE,
        [{"name": "a", "children": [{"name": "b"}]}],
        [{"children": []}, {"name": "a", "children": [1]}],
        "recursive, too",
    ),
    Obeyed(
        "$ref",
        record("c", properties={"a/b": integer(), "c": {"$ref": "#/properties/a~1b", "minimum": 3}}),
        [{"c": 3}],
        [{"c": 2}, {"c": "x"}],
        "within the document; next to other keywords",
    ),
    Obeyed(
        "$anchor",
        record("a", properties={"a": {"$ref": "#letter"}}, **{"$defs": {"x": {"$anchor": "letter", **LETTER}}}),
        [{"a": "x"}],
        [{"a": 1}],
    ),
    Obeyed(
        "$id",
        record(
            "a",
            properties={"a": {"$ref": "urn:x#y"}},
            **{"$defs": {"x": {"$id": "urn:x", "$defs": {"y": {"$anchor": "y", **LETTER}}}}},
        ),
        [{"a": "x"}],
        [{}, {"a": 1}],
        "of a part; `id` in draft 4",
    ),
    Obeyed(
        "not",
        record("a", properties={"a": {"not": {"type": ["string", "number"]}}, "b": string(**{"not": {"const": "ab"}})}),
        [{"a": None}, {"a": [1], "b": "a"}, {"a": True, "b": "abc"}, {"a": {}, "b": ""}],
        [{"a": "x"}, {"a": 1}, {"a": None, "b": "ab"}],
        "of `type`, `enum`, `const`, `required`, `properties`, bounds, lengths, `allOf`, `anyOf`, `not`",
    ),
    Obeyed(
        "not",
        record("a", properties={"a": integer(), "b": LETTER}, **{"not": {"required": ["b"]}}),
        [{"a": 1}],
        [{"a": 1, "b": "x"}],
    ),
    Obeyed(
        "not",
        {"type": "number", "not": {"enum": [1, 2**53 + 1]}},
        [-1, 0, 2, 1.5, 2**60],
        [1],
    ),
    Obeyed(
        "if, then, else",
        record(
            "in",
            properties={"in": {"enum": ["US", "CA"]}, "zip": integer(), "code": LETTER},
            **{
                "if": {"properties": {"in": {"const": "US"}}},
                "then": {"required": ["zip"]},
                "else": {"required": ["code"]},
            },
        ),
        [{"in": "US", "zip": 1}, {"in": "CA", "code": "x"}],
        [{"in": "US", "code": "x"}, {"in": "CA", "zip": 1}, {"in": "US"}],
        "if `not` may have the condition",
    ),
    Obeyed(
        "dependentRequired, dependentSchemas, dependencies",
        record(properties={"a": LETTER, "b": integer(), "c": LETTER}, dependentRequired={"a": ["b"], "c": []}),
        [{}, {"b": 1}, {"a": "x", "b": 1}, {"c": "x"}],
        [{"a": "x"}, {"a": "x", "c": "y"}],
        "up to 8",
    ),
    Obeyed(
        "dependentRequired, dependentSchemas, dependencies",
        record(properties={"a": LETTER, "b": integer()}, dependentSchemas={"a": {"properties": {"b": {"minimum": 5}}}}),
        [{}, {"b": 1}, {"a": "x", "b": 5}, {"a": "x"}],
        [{"a": "x", "b": 1}],
    ),
    Obeyed(
        "dependentRequired, dependentSchemas, dependencies",
        record(properties={"a": LETTER, "b": integer()}, dependencies={"a": ["b"], "b": True}, **DRAFT_7),
        [{}, {"b": 1}, {"a": "x", "b": 1}],
        [{"a": "x"}],
    ),
    Obeyed(
        "unevaluatedProperties, unevaluatedItems",
        record(properties={"a": LETTER}, unevaluatedProperties=integer()),
        [{"a": "x", "b": 1}],
        [{"a": "x", "b": "y"}],
        "without other schemas for the same value",
    ),
    Obeyed(
        "unevaluatedProperties, unevaluatedItems",
        record(properties={"a": LETTER}, additionalProperties=integer(), unevaluatedProperties=False),
        [{"a": "x", "b": 1}],
        [{"b": "y"}],
    ),
    Obeyed(
        "unevaluatedProperties, unevaluatedItems",
        array(prefixItems=[LETTER], unevaluatedItems=False),
        [["x"], []],
        [["x", 1]],
    ),
    Obeyed(
        "title, description, default, examples, $comment, deprecated, readOnly, ...",
        integer(title="A", description="B", default="x", examples=[None], deprecated=True),
        [1],
        ["x"],
        "annotations, like all names that JSON Schema does not define",
    ),
]

LIMITED = (
    "not, if, then, else, oneOf, propertyNames, minProperties, patternProperties, multipleOf, dependentRequired, "
    "dependentSchemas, dependencies, unevaluatedProperties, unevaluatedItems"
)
REFUSED = [
    RefusedRow("contains", array(contains=integer()), "$.contains"),
    RefusedRow("uniqueItems", array(items=string(), uniqueItems=True), "$.uniqueItems"),
    RefusedRow("$dynamicRef", {"$dynamicRef": "#a"}, "$.$dynamicRef"),
    RefusedRow(LIMITED, record(properties={"a": {"not": {"pattern": "x"}}}), "$.properties.a.not", "in other cases"),
    RefusedRow(LIMITED, {"if": {"pattern": "x"}, "then": {"minLength": 2}}, "$.if"),
    RefusedRow(LIMITED, {"oneOf": [integer(), numeric()]}, "$.oneOf"),
    RefusedRow(LIMITED, {"oneOf": [string(pattern="a"), string(pattern="b")]}, "$.oneOf"),
    RefusedRow(LIMITED, record(propertyNames={"minLength": 2}), "$.propertyNames"),
    RefusedRow(LIMITED, record(minProperties=2), "$.minProperties"),
    RefusedRow(LIMITED, record(patternProperties={"^a": integer(), "b$": LETTER}), "$"),
    RefusedRow(LIMITED, numeric(multipleOf=1e-7), "$.multipleOf"),
    RefusedRow(LIMITED, record(dependentRequired={name: ["i"] for name in "abcdefghj"}), "$.dependentRequired"),
    RefusedRow(LIMITED, record(allOf=[record()], unevaluatedProperties=False), "$.unevaluatedProperties"),
    RefusedRow(
        "$ref",
        record(properties={"a": {"$ref": "https://example.org/x"}}),
        "$.properties.a.$ref",
        "to other documents: nothing is fetched",
    ),
    RefusedRow(
        "pattern",
        array(items=string(pattern="a(?=b)")),
        "$.items.pattern",
        "look-around, back references, word boundaries",
    ),
    RefusedRow("format", string(format="idn-email"), "$.format", "any other: a format is a demand, not an annotation"),
]


class Vocabulary:
    """The tokens of a model, and what grammars make of them."""

    def __init__(self) -> None:
        table = TokenTable(BACKEND)
        self._grammars = make_grammars()
        self._bytes = [table.bytes_of(token_id) for token_id in range(VOCAB_SIZE)]
        self._lengths = np.array([len(each) for each in self._bytes])
        self._eos = np.arange(VOCAB_SIZE) == EOS
        self._closing = [self._bytes.index(each) for each in CLOSING if each in self._bytes]
        self._words = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)

    def compile(self, schema: Any, *, is_lenient: bool = False) -> CompiledGrammar:
        return self._grammars.compile(Grammar("json_schema", json.dumps(schema), is_lenient=is_lenient))

    def accepts(self, compiled: CompiledGrammar, instance: Any) -> bool:
        matcher = compiled.matcher()
        text = json.dumps(instance, ensure_ascii=False)
        try:
            pushed(matcher, text)
        except GrammarViolation:
            return False
        matcher.fill_mask(self._words)
        return bool((self._allowed() & self._eos).any())

    def walk(self, compiled: CompiledGrammar, rng: random.Random) -> str:
        """Make an answer of tokens that are drawn among those that are allowed, and bring it to an end in time."""
        matcher = compiled.matcher()
        text = b""
        for num_tokens in range(MOST_TOKENS):
            if matcher.is_complete:
                break
            matcher.fill_mask(self._words)
            allowed = self._allowed()
            is_ending = num_tokens >= MOST_FREE_TOKENS
            may_end = bool((allowed & self._eos).any())
            choices = np.flatnonzero(allowed & ~self._eos)
            if may_end and (is_ending or not len(choices) or rng.random() < 0.3):
                break
            if is_ending:
                closing = [token_id for token_id in self._closing if allowed[token_id]]
                lengths = self._lengths[choices]
                choices = closing[:1] if closing and rng.random() < 0.8 else choices[lengths == lengths.min()]
            token_id = int(rng.choice(choices))
            matcher.push(token_id)
            text += self._bytes[token_id]
        return text.decode()

    def _allowed(self) -> Any:
        return np.unpackbits(self._words.view(np.uint8), bitorder="little")[: len(self._bytes)].astype(bool)


def failures(vocabulary: Vocabulary, row: Obeyed | RefusedRow, num_walks: int) -> Iterator[str]:
    """Yield what does not hold of a row."""
    try:
        compiled = vocabulary.compile(row.schema)
    except InvalidRequest as error:
        if isinstance(row, Obeyed) or f"{row.place} " not in f"{error.message.rstrip('.')} ":
            yield error.message
        return
    if isinstance(row, RefusedRow):
        yield "it is not refused"
        return
    for instance in row.valid:
        if instance_error(instance, row.schema) or not vocabulary.accepts(compiled, instance):
            yield f"{instance} is not accepted"
    for instance in row.invalid:
        if not instance_error(instance, row.schema) or vocabulary.accepts(compiled, instance):
            yield f"{instance} is accepted"
    for seed in range(num_walks):
        answer = vocabulary.walk(compiled, random.Random(seed))
        if error := error_of(answer, row.schema):
            yield f"the answer {answer[:200]} is not valid: {error[:200]}"


def tables() -> str:
    """Return a table of the obeyed keywords, and one of the refused ones; keywords without a note share a row."""
    found = []
    for title, group in (("obeyed", OBEYED), ("refused", REFUSED)):
        notes: dict[str, list[str]] = {}
        for row in group:
            notes.setdefault(row.keyword, []).extend([row.note] if row.note else [])
        bare = ", ".join(keyword for keyword, each in notes.items() if not each)
        rows = [(title, "which")]
        for keyword, each in [(bare, ["all"]), *((keyword, each) for keyword, each in notes.items() if each)]:
            names = ", ".join(name if name == "..." else f"`{name}`" for name in keyword.split(", "))
            rows.append((names, "; ".join(each)))
        found.append("\n".join(as_markdown(rows)))
    return "\n\n".join(found)
