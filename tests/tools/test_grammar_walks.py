"""Answers that are drawn under grammars are valid, or the beginnings of valid ones. The tool does this at length."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Grammar, TokenPrompt
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.prepare import prepare
from tests.engine.doubles import EOS, TOKENIZER
from tests.engine.model.runners import eager_runner
from tests.models.decoders import FAMILIES, random_model
from tools.grammar_coverage import Vocabulary
from tools.grammar_schemas import SCHEMAS
from tools.grammar_walks import CASES, Answer, Case, choice_case, error_in, outcomes, regex_case, schema_case
from tools.json_validity import error_of

NUM_SEEDS, MAX_TOKENS = 4, 40
PROMPT = TokenPrompt([5, 9, 3])
FEW = [
    "zod: a user",
    "agents: a plan",
    "strict: a linked list",
    "values: enum of all types",
    "numbers: multiples",
    "lists: different values",
    "objects: one property at least",
    "objects: keys and values beyond ASCII",
    "joined: any of beside properties",
    "recursive: expressions",
    "choice: beginnings of each other",
    "regex: a number plate",
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = copy.deepcopy(FAMILIES["llama"])  # a model changes its config
    config.vocab_size = TOKENIZER.vocab_size
    loaded = prepare(random_model(config))
    with Engine(
        ServedModel(
            tokenizer=TOKENIZER,
            runner=eager_runner(loaded, num_blocks=200, block_size=4),
            num_blocks=200,
            max_model_len=64,
            vocab_size=loaded.vocab_size,
            eos_token_ids=frozenset([EOS]),
        ),
        EngineOptions(block_size=4, max_running=16, max_step_tokens=24),
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def vocabulary(engine: Engine) -> Vocabulary:
    return Vocabulary(TOKENIZER.backend, engine.vocab_size, frozenset([EOS]))


def test_answers_of_a_random_model_are_valid_or_the_beginnings_of_valid_ones(
    engine: Engine, vocabulary: Vocabulary
) -> None:
    cases = [case for case in CASES if case.name in FEW]
    assert len(cases) == len(FEW)
    found = outcomes(engine, vocabulary, cases, PROMPT, NUM_SEEDS, MAX_TOKENS)
    assert [failure for each in found.values() for failure in each.failures] == []
    assert sum(each.num_finished + each.num_cut for each in found.values()) == len(FEW) * NUM_SEEDS
    assert sum(each.num_finished > 0 for each in found.values()) > 3
    assert sum(each.num_cut > 0 for each in found.values()) > 3


def test_wrong_answers_are_found(engine: Engine, vocabulary: Vocabulary) -> None:
    wide, narrow = {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "integer", "minimum": 10}
    right = schema_case("digit", wide)
    ignored = replace(right, name="ignored", error_of=schema_case("", narrow).error_of)
    cut = Case("cut", Grammar("regex", "[ab]{100}"), regex_case("", "[a]{100}").error_of)
    refused = Case("refused", Grammar("regex", "[ab]{200}"), lambda _: "")
    found = outcomes(engine, vocabulary, [right, ignored, cut], PROMPT, NUM_SEEDS, MAX_TOKENS)
    assert [len(each.failures) for each in found.values()] == [0, NUM_SEEDS, NUM_SEEDS]
    compiled = vocabulary.compile_grammar(refused.grammar)
    not_of_the_grammar = Answer("xy", TOKENIZER.backend.encode("xy").ids)
    assert "does not go on" in error_in(not_of_the_grammar, refused, vocabulary, compiled)


def test_there_are_forty_schemas() -> None:
    assert len(SCHEMAS) == 40
    assert all(json.loads(json.dumps(schema)) == schema for schema in SCHEMAS.values())


@pytest.mark.parametrize(
    ("text", "schema", "says"),
    [
        ('"x"', {"type": "integer"}, "is not of type"),
        ("{", {}, "Expecting"),
        ("NaN", {}, "no JSON"),
        ("19.99", {"multipleOf": 0.01}, ""),
        ("19.995", {"multipleOf": 0.01}, "not a multiple"),
        ('"2024-02-30"', {"format": "date"}, "is not a 'date'"),
        ('"P1Y1D"', {"format": "duration"}, "is not a 'duration'"),
        ('"a..b"', {"format": "hostname"}, "is not a 'hostname'"),
        ('"123e4567-e89b-12d3-a456-426614174000"', {"format": "uuid4"}, "is not a 'uuid4'"),
        ('"_-8="', {"format": "base64"}, "is not a 'base64'"),
        ("2.5", {"format": "date"}, ""),
    ],
)
def test_the_reference_says_what_is_wrong(text: str, schema: object, says: str) -> None:
    error = error_of(text, schema)
    assert says in error
    assert bool(error) == bool(says)


def test_a_choice_is_one_of_the_list() -> None:
    case = choice_case("", ["a", "ab"])
    assert [bool(case.error_of(text)) for text in ("a", "ab", "b", "")] == [False, False, True, True]
