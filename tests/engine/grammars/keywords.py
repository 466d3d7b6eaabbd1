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
    Obeyed("minItems", array(items=integer(), minItems=2), [[1, 2], [1, 2, 3]], [[], [1]]),
    Obeyed("maxItems", array(items=integer(), maxItems=2), [[], [1, 2]], [[1, 2, 3]]),
    Obeyed("minLength", string(minLength=2), ["ab", "é😀"], ["", "a", "😀"], "in characters"),
    Obeyed("maxLength", string(maxLength=2), ["", "😀é"], ["abc"]),
    Obeyed("pattern", string(pattern="^[a-c]+\\d$"), ["ab1", "c0"], ["1", "xab1", "ab1x"]),
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
    Obeyed("format", string(format="hostname"), ["a-b.example.org"], ["-a", "a..b"], "`hostname`"),
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
    Obeyed("minimum", integer(minimum=-3), [-3, 0, 12], [-4, -30]),
    Obeyed(
        "minimum",
        integer(minimum=-(2**63), maximum=2**63 - 1),
        [2**53 - 1, 0, 1 - 2**53],
        [2**63, -(2**63) - 1],
        "bounds beyond 2^53 - 1 are obeyed as if they were that",
    ),
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
        "if the schemas exclude each other: by type, `const` or `enum`, or by those of a required property",
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
        "title, description, default, examples, $comment, deprecated, readOnly, ...",
        integer(title="A", description="B", default="x", examples=[None], deprecated=True),
        [1],
        ["x"],
        "annotations, like all names that JSON Schema does not define",
    ),
]

REFUSED = [
    RefusedRow("not", record(properties={"a": {"not": integer()}}), "$.properties.a.not"),
    RefusedRow("if, then, else", {"if": integer(), "then": {"minimum": 1}}, "$.if"),
    RefusedRow("contains", array(contains=integer()), "$.contains"),
    RefusedRow("uniqueItems", array(items=string(), uniqueItems=True), "$.uniqueItems"),
    RefusedRow("propertyNames", record(propertyNames={"minLength": 2}), "$.propertyNames", "with anything else"),
    RefusedRow("dependentRequired", record(dependentRequired={"a": ["b"]}), "$.dependentRequired"),
    RefusedRow("dependentSchemas", record(dependentSchemas={"a": {}}), "$.dependentSchemas"),
    RefusedRow("dependencies", record(dependencies={"a": ["b"]}), "$.dependencies"),
    RefusedRow("unevaluatedProperties", record(unevaluatedProperties=False), "$.unevaluatedProperties"),
    RefusedRow("unevaluatedItems", array(unevaluatedItems=False), "$.unevaluatedItems"),
    RefusedRow("$dynamicRef", {"$dynamicRef": "#a"}, "$.$dynamicRef"),
    RefusedRow(
        "$ref",
        record(properties={"a": {"$ref": "https://example.org/x"}}),
        "$.properties.a.$ref",
        "to other documents: nothing is fetched",
    ),
    RefusedRow("oneOf", {"oneOf": [integer(), numeric()]}, "$.oneOf", "if two of its schemas may both be valid"),
    RefusedRow(
        "pattern",
        array(items=string(pattern="a(?=b)")),
        "$.items.pattern",
        "look-around, back references, word boundaries",
    ),
    RefusedRow("format", string(format="idn-email"), "$.format", "any other: a format is a demand, not an annotation"),
    RefusedRow("multipleOf", numeric(multipleOf=1e-7), "$.multipleOf", "more decimal places"),
    RefusedRow("minProperties", record(minProperties=2), "$.minProperties", "above that"),
    RefusedRow(
        "patternProperties",
        record(patternProperties={"^a": integer(), "b$": LETTER}),
        "$",
        "if a name can match two of the patterns",
    ),
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

    def compile(self, schema: Any) -> CompiledGrammar:
        return self._grammars.compile(Grammar("json_schema", json.dumps(schema)))

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


def table() -> str:
    """Return the table of keywords, those that are obeyed first; keywords without a note share a row."""
    rows = [("keyword", "", "")]
    for title, group in (("obeyed", OBEYED), ("refused", REFUSED)):
        notes: dict[str, list[str]] = {}
        for row in group:
            notes.setdefault(row.keyword, []).extend([row.note] if row.note else [])
        bare = ", ".join(keyword for keyword, each in notes.items() if not each)
        for keyword, each in [(bare, []), *((keyword, each) for keyword, each in notes.items() if each)]:
            names = ", ".join(name if name == "..." else f"`{name}`" for name in keyword.split(", "))
            rows.append((names, title, "; ".join(each)))
    return "\n".join(as_markdown(rows))
