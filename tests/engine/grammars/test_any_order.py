"""Tests of schemas with `strict: false`: open objects, and properties in any order."""

import json
import random
from typing import Any

import pytest

from oaiserve.engine.grammars.json_schema import rules
from oaiserve.engine.grammars.json_schema.prepare import prepare_leniently
from oaiserve.engine.grammars.json_schema.rules import as_rules
from oaiserve.engine.request import Grammar
from oaiserve.errors import InvalidRequest
from oaiserve.routes.chat.constraints import not_obeyed
from tests.engine.grammars.json_validity import error_of, instance_error
from tests.engine.grammars.keywords import DOG, OBEYED, TREE, Obeyed, Vocabulary, array, integer, record, string
from tests.engine.grammars.plain import GRAMMARS, is_refused, pushed

VOCABULARY = Vocabulary()
PAIR = record("a", "b", properties={"a": integer(), "b": string()})


def accepts(schema: Any, text: str) -> bool:
    matcher = GRAMMARS.compile(Grammar("json_schema", json.dumps(schema), is_lenient=True)).matcher()
    return not is_refused(text, matcher) and matcher.may_end


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (PAIR, '{"b": "x", "a": 1}'),
        (record("a", properties={"a": {}, "b": {}}), '{"a": 1, "c": [null], "b": "x", "d": {"a": 1}}'),
        (PAIR, '{\n  "b": "x",\n  "a": 1\n}'),
        ({**PAIR, "additionalProperties": integer()}, '{"b": "x", "a": 1, "c": 1}'),
        ({"type": "array", "items": PAIR, "minItems": 1, "maxItems": 2}, '[{"b": "x", "a": 1}, {"a": 1, "b": "x"}]'),
        ({"anyOf": [{"type": "null"}, PAIR]}, '{"b": "x", "a": 1}'),
        ({"properties": {"a": PAIR, "c": {}}}, '{"c": 5, "a": {"b": "x", "a": 1}}'),
        ({"properties": {"a": {}, "c": {}}}, "5"),
        (TREE, '{"children": [{"children": [], "name": "a"}], "name": "b"}'),
        (record(properties={"a": {}, "b": {}}, minProperties=1), '{"b": 1}'),
        (record("n_a", patternProperties={"^n_": integer()}, properties={"b": {}}), '{"b": 1, "n_a": 1, "n_x": 1}'),
        (record("\\", properties={'"': {}}), '{"\\"": 1, "\\\\": 1}'),
        (  # a search for many characters finds any of them
            record(patternProperties={"[a-z0-9_.:-]{1,255}": string()}),
            '{"first-child": "x", "second.child": "x", "third:child": "x", "fourth_child": "x", "fifth-child": "x"}',
        ),
    ],
)
def test_properties_come_in_any_order_and_others_after_required_ones(schema: Any, answer: str) -> None:
    assert accepts(schema, answer)


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (PAIR, '{"b": "x"}'),
        (PAIR, '{"b": "x", "b": "y", "a": 1}'),
        (PAIR, '{"b": 1'),
        (PAIR, '{"c'),  # not before the required ones
        ({**PAIR, "additionalProperties": False}, '{"b": "x", "c"'),
        ({**PAIR, "additionalProperties": False}, '{"b": "x", "a": 1,'),
        ({**PAIR, "additionalProperties": integer()}, '{"a": 1, "b": "x", "c": "x"'),
        ({"type": "array", "items": PAIR, "maxItems": 1}, '[{"b": "x", "a": 1},'),
        ({"type": "array", "items": PAIR, "minItems": 1}, "[]"),
        (record(properties={"a": {}, "b": {}}, minProperties=1), "{}"),
        (record(patternProperties={"^n_": integer()}, properties={"b": {}}), '{"n_x": "'),
    ],
)
def test_what_the_schema_forbids_is_not_written(schema: Any, answer: str) -> None:
    assert not accepts(schema, answer)


@pytest.mark.parametrize(
    "row",
    [row for row in OBEYED if not not_obeyed(json.dumps(row.schema))],
    ids=lambda row: f"{row.keyword} {row.note}".rstrip(),
)
def test_answers_are_valid_for_each_keyword(row: Obeyed) -> None:
    compiled = VOCABULARY.compile(row.schema, is_lenient=True)
    assert [each for each in row.valid if not VOCABULARY.accepts(compiled, each)] == []
    assert [each for each in row.invalid if VOCABULARY.accepts(compiled, each)] == []
    for seed in range(2):
        answer = VOCABULARY.walk(compiled, random.Random(seed))
        assert not error_of(answer, row.schema), answer


def test_order_and_names_are_fixed_unless_strict_is_false() -> None:
    strict = GRAMMARS.compile(Grammar("json_schema", json.dumps(PAIR)))
    assert is_refused('{"b"', strict.matcher())
    assert is_refused('{"a": 1, "b": "x",', strict.matcher())


def test_numbers_beyond_floats_are_exact_in_the_order_of_the_schema() -> None:
    schema = record("id", properties={"id": {"enum": [2**53 + 1, "x"]}, "n": {"const": 2**64}, "dog": DOG})
    compiled = GRAMMARS.compile(Grammar("json_schema", json.dumps(schema)))
    pushed(
        compiled.matcher(), '{"id": 9007199254740993, "n": 18446744073709551616, "dog": {"kind": "dog", "good": true}}'
    )
    pushed(compiled.matcher(), '{\n  "id": "x",\n  "dog": {')
    for wrong in ('{"id": 9007199254740992', '{"id": 9007199254740993,\n', '{"n"', '{"id": "x", "q"'):
        assert is_refused(wrong, compiled.matcher()), wrong


def test_large_numbers_are_exact_next_to_lists_and_objects() -> None:
    schema = {"enum": [2**53 + 1, [1], {"a": 1}]}
    compiled = GRAMMARS.compile(Grammar("json_schema", json.dumps(schema)))
    for answer in ("9007199254740993", "[1]", '{"a": 1}'):
        pushed(compiled.matcher(), answer)
    assert is_refused("9007199254740992", compiled.matcher())


def test_joined_schemas_with_large_numbers_allow_only_what_is_valid() -> None:
    rng = random.Random(7)
    numbers = [5, 2**53 - 1, 2**53 + 1, 2**53 + 2, 2**60 + 1, 2**60 + 2**10, -(2**60) - 1]
    num_compiled = 0
    for _ in range(200):
        parts = [
            {"enum": rng.sample([*numbers, "x", [2**53 + 1]], 4)},
            {rng.choice(["minimum", "exclusiveMaximum"]): rng.choice(numbers)},
            {"multipleOf": rng.choice([1, 3, 0.5])},
            {"type": rng.choice(["integer", "number", ["integer", "string"]])},
        ]
        kept = rng.sample(parts, 3)
        schema = rng.choice(
            [{"allOf": kept}, {**kept[0], "anyOf": kept[1:]}, {**kept[0], **kept[1], "allOf": kept[2:]}]
        )
        try:
            compiled = VOCABULARY.compile(schema)
        except InvalidRequest:
            assert not any(instance_error(number, schema) == "" for number in numbers[:2]), schema
            continue
        num_compiled += 1
        values = [*numbers, "x", [2**53 + 1], 2**53, 2**60]
        accepted = [value for value in values if VOCABULARY.accepts(compiled, value)]
        assert [value for value in accepted if instance_error(value, schema)] == [], schema
        if "minimum" not in json.dumps(schema) and "exclusive" not in json.dumps(schema):
            assert [value for value in values if not instance_error(value, schema)] == accepted, schema
    assert num_compiled > 100


def test_large_numbers_within_joined_objects_are_refused() -> None:
    joined = {"allOf": [{"properties": {"a": {"const": 2**53 + 1}}}, {"properties": {"b": {}}}]}
    with pytest.raises(InvalidRequest, match="within objects that are joined with others"):
        VOCABULARY.compile(joined)


def test_the_place_of_an_error_is_found_next_to_numbers_on_which_llguidance_crashes() -> None:
    impossible = {"type": "string", "pattern": "^a$", "minLength": 5}
    schema = record("a", properties={"n": {"enum": [-(2**63), None]}, "a": impossible})
    with pytest.raises(InvalidRequest, match=r"at \$\.properties\.a\."):
        VOCABULARY.compile(schema)
    assert VOCABULARY.compile(schema, is_lenient=True).left_out == ["pattern"]


NESTED = [  # a schema that states a number, and an instance with a number in its place
    (lambda number: array(items={"const": number}), lambda number: [number, number]),
    (lambda number: array(items={"enum": [number, -number + 3]}), lambda number: [-number + 3, number]),
    (lambda number: {"enum": [[number, [number]], [[[number]]]]}, lambda number: [[[number]]]),
    (lambda number: array(items=array(items=integer(enum=[number, 5]))), lambda number: [[], [5, number]]),
    (lambda number: array(prefixItems=[{"const": [number]}, {}]), lambda number: [[number], number]),
    (lambda number: array(items=record(properties={"a": {"const": number}})), lambda number: [{}, {"a": number}]),
    (lambda number: array(items={"anyOf": [string(), {"const": number}]}), lambda number: ["x", number]),
]


@pytest.mark.parametrize("number", [2**53 + 1, 2**53 + 2, 2**60 + 1, 2**63 - 1, 2**64, 10**30, -(2**53) - 1, -(2**63)])
@pytest.mark.parametrize("is_lenient", [False, True])
def test_large_numbers_in_lists_are_exact(number: int, is_lenient: bool) -> None:
    for schema_of, instance_of in NESTED:
        schema = schema_of(number)
        compiled = VOCABULARY.compile(schema, is_lenient=is_lenient)
        near = {near: VOCABULARY.accepts(compiled, instance_of(near)) for near in range(number - 2, number + 3)}
        assert [near for near, is_accepted in near.items() if is_accepted] == [number], schema
        assert not instance_error(instance_of(number), schema)


def test_a_schema_too_large_for_rules_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MOST_RULES", 2)
    assert as_rules(prepare_leniently(json.dumps(PAIR), is_open=True)[0], {}, in_order=False) == []
    assert accepts({**PAIR, "title": "large"}, '{"a": 1, "b": "x", "c": 1}')
    assert not accepts({**PAIR, "title": "large"}, '{"b": "x", "a": 1}')


def test_a_schema_that_cannot_be_prepared_is_free_json() -> None:
    schema, left_out = prepare_leniently(json.dumps({"type": "array", "items": {"$ref": "#/items"}}))
    assert (schema.document, left_out) == ({"type": "array"}, [""])
