"""Tests of negations, conditions and dependencies: what is allowed is valid, and little that is valid is missing."""

import random
from typing import Any

import pytest

from oaiserve.engine.grammars.json_schema import conditions, prepare
from oaiserve.errors import InvalidRequest
from tests.engine.grammars.json_validity import error_of, instance_error
from tests.engine.grammars.keywords import Vocabulary

VOCABULARY = Vocabulary()
TYPE_SETS = ["string", "number", "integer", "object", "array", "null", "boolean", ["string", "null"]]


def value(rng: random.Random, depth: int) -> Any:
    scalar = rng.choice(["", "a", "ab", "é", 'x"', 0, 1, 2, -1, 1.5, True, False, None])
    inner = (value(rng, depth - 1) for _ in range(2)) if depth else ()
    return rng.choice([scalar, scalar, [*inner] if rng.random() < 0.5 else {"a": scalar, "b": 1}])


def simple_schema(rng: random.Random) -> Any:
    bound = rng.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
    length = rng.choice(["minLength", "maxLength", "minItems", "maxItems"])
    return rng.choice(
        [
            {"type": rng.choice(TYPE_SETS)},
            {"const": value(rng, 1)},
            {"enum": [value(rng, 1), value(rng, 0)]},
            {"required": rng.sample("abc", 2)},
            {bound: rng.choice([0, 1, 1.5])},
            {length: rng.randint(0, 2)},
            {"properties": {"a": {"const": value(rng, 0)}}},
            rng.choice([True, False, {}]),
        ]
    )


def schema(rng: random.Random, depth: int) -> dict[str, Any]:
    inner = [schema(rng, depth - 1) if depth else simple_schema(rng) for _ in range(3)]
    condition = {"if": inner[0], "then": inner[1], "else": inner[2]}
    return rng.choice(
        [
            {"not": inner[0]},
            {"oneOf": inner[: rng.randint(2, 3)]},
            {"not": {"allOf": inner[:2]}},
            {"not": {"anyOf": inner[:2]}},
            condition,
            {keyword: condition[keyword] for keyword in ("if", rng.choice(["then", "else"]))},
            {"dependentSchemas": {"a": inner[0]}, "dependentRequired": {"b": ["a"], "c": ["b"]}},
            {"type": "object", "properties": {"a": inner[0]}, "unevaluatedProperties": inner[1]},
        ]
    )


@pytest.mark.parametrize("seed", range(4))
def test_what_is_allowed_under_conditions_is_valid(seed: int) -> None:
    rng = random.Random(seed)
    num_compiled = num_valid = num_accepted = 0
    for _ in range(50):
        conditional = schema(rng, rng.randint(0, 1))
        try:
            compiled = VOCABULARY.compile(conditional)
        except InvalidRequest:
            continue
        num_compiled += 1
        for instance in [value(rng, 2) for _ in range(8)]:
            error = instance_error(instance, conditional)
            is_accepted = VOCABULARY.accepts(compiled, instance)
            assert not (is_accepted and error), (conditional, instance)
            num_valid += not error
            num_accepted += is_accepted
        answer = VOCABULARY.walk(compiled, rng)
        assert not error_of(answer, conditional), (conditional, answer)
    assert num_compiled > 20
    assert num_accepted > 0.7 * num_valid


def test_no_keyword_is_forgotten_in_a_negation() -> None:
    known = {*prepare._CHECKED, *prepare.REFUSED, *prepare._APPLICATORS, "propertyNames"}
    assert known <= {*conditions._NEGATED, *conditions._NOT_NEGATED, "const", "enum"}


@pytest.mark.parametrize(
    "values", [["x" * 150], ["x" * 200_000], [f"{number:020}" for number in range(8_000)], [*range(30_000)]]
)
def test_the_negation_of_long_texts_and_many_values_is_refused_by_its_place(values: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"'not' at \$\.not"):
        VOCABULARY.compile({"not": {"enum": values}})
