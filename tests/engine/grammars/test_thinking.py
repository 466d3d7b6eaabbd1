"""Reasoning ends where its closing text comes, or is forced to come; no grammar begins before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.grammars.constraint import Constraint
from oaiserve.engine.grammars.grammar import GrammarViolation
from oaiserve.engine.grammars.thinking import Thinking
from oaiserve.engine.request import Grammar, Reasoning, SamplingParams
from oaiserve.engine.text.detokenize import TokenTable
from tests.engine.grammars.plain import BACKEND, EOS, VOCAB_SIZE, allowed_ids, ids, make_grammars, mask_of, pushed

STOP = BACKEND.token_to_id("|")
TABLE = TokenTable(BACKEND)
GRAMMARS = make_grammars()
ALL = set(range(VOCAB_SIZE))


def made(reasoning: Reasoning, choices: str = "", **params: object) -> Constraint:
    """Return the constraint of an answer with this reasoning, and with choices as a grammar after it."""
    matcher = GRAMMARS.compile(Grammar("choice", choices)).matcher() if choices else None
    ends = frozenset([EOS]), frozenset([EOS, STOP])
    thinking = Thinking(reasoning, TABLE, ids(reasoning.closing))
    return Constraint(matcher, SamplingParams(**params), thinking=thinking, eos_token_ids=ends[0], stop_ids=ends[1])


def allowed(constraint: Constraint) -> set[int]:
    words = mask_of(GRAMMARS.compile(Grammar("choice", '["a"]')).matcher(), len(ALL))
    constraint.fill_masks(words[None], 0, ())
    return set(allowed_ids(words))


def test_anything_but_an_end_may_come_before_the_grammar_behind_the_reasoning() -> None:
    constraint = made(Reasoning("</think>"), '["yes", "no"]')
    assert allowed(pushed(constraint, "hello yes </thin</thin")) == ALL - {EOS, STOP}
    assert not pushed(constraint, "k>").is_complete
    assert allowed(constraint) == {*ids("y"), *ids("n")}
    assert pushed(constraint, "yes").is_complete


@pytest.mark.parametrize(
    ("choice", "closing", "token", "rest"),
    [
        ("ords too", "wo w", "two words", " too"),  # the text is within the token, whose end begins the answer
        ("words", "two", "two words", ""),  # White space after the text is not part of the answer.
        ("a", "<|im_start|>", "<|im_start|>", "a"),
        ("a", "|", "|", "a"),
    ],
)
def test_reasoning_may_end_within_a_token(choice: str, closing: str, token: str, rest: str) -> None:
    constraint = made(Reasoning(closing), f'["{choice}"]')
    constraint.push(BACKEND.token_to_id(token))
    assert pushed(constraint, rest).is_complete


def test_the_rest_of_the_last_token_must_begin_the_answer() -> None:
    with pytest.raises(GrammarViolation):
        made(Reasoning("two"), '["no"]').push(BACKEND.token_to_id("two words"))


@pytest.mark.parametrize(
    ("closing", "text", "token", "rest"),
    [("<i>h", "<i>", "he", "e"), ("<i>h", "<<i>", "hell", "ell"), ("two", "", "two words", "words")],
)
def test_no_token_ends_the_reasoning_and_begins_what_the_grammar_forbids(
    closing: str, text: str, token: str, rest: str
) -> None:
    token_id = BACKEND.token_to_id(token)
    assert token_id in allowed(pushed(made(Reasoning(closing), f'["{rest}"]'), text))
    assert token_id not in allowed(pushed(made(Reasoning(closing), '["no"]'), text))
    assert ids("h")[0] in allowed(pushed(made(Reasoning(closing), '["no"]'), text))


def test_no_token_of_a_draft_ends_the_reasoning_and_begins_what_the_grammar_forbids() -> None:
    constraint = made(Reasoning("<h"), '["no"]')
    rows = np.zeros((4, -(-VOCAB_SIZE // 32)), np.uint32)
    constraint.fill_masks(rows, 0, ids("a<a"))
    assert [BACKEND.token_to_id("he") in allowed_ids(words) for words in rows] == [True, True, False, True]


@given(st.lists(st.sampled_from(range(VOCAB_SIZE)), min_size=1, max_size=8), st.sampled_from(["he", "h", " w", "o w"]))
def test_any_token_that_may_come_in_the_reasoning_may_be_pushed(token_ids: list[int], closing: str) -> None:
    constraint = made(Reasoning(closing), '["e", "or"]')
    for token_id in token_ids:
        if token_id in allowed(constraint):
            constraint.push(token_id)


@pytest.mark.parametrize("budget", [0, 1, 3])
@pytest.mark.parametrize("choices", ["", '["yes"]'])
@pytest.mark.parametrize("opening", ["", "<think>"])
def test_the_end_is_forced_when_the_budget_is_spent(budget: int, choices: str, opening: str) -> None:
    constraint = made(Reasoning("</think>", opening, budget), choices)
    pushed(constraint, opening)
    for _ in range(budget):
        assert constraint.is_free is (not choices)
        assert constraint.forced_ids() == []
        pushed(constraint, "x")
    closing = ids("</think>")
    assert not constraint.is_free
    assert constraint.forced_ids() == closing
    assert constraint.possible([*closing, *ids("x")]) == closing[:-1]  # A mask for the draw after them is known.
    for number, token_id in enumerate(closing):
        assert allowed(constraint) == {token_id}
        assert constraint.forced_ids() == closing[number:]
        constraint.push(token_id)
    assert constraint.is_free is (not choices)
    assert pushed(constraint, "yes").is_complete is bool(choices)


def test_an_answer_without_the_opening_text_has_no_budget() -> None:
    constraint = pushed(made(Reasoning("</think>", "<think>", 1)), "<thin air, and so on")
    assert (constraint.is_free, constraint.forced_ids()) == (True, [])


def test_no_id_is_forced_where_log_probabilities_are_asked_for() -> None:
    constraint = made(Reasoning("</think>", budget=0), logprobs=0)
    assert (constraint.forced_ids(), allowed(constraint)) == ([], {ids("</think>")[0]})


pieces = st.text("</think>ax ", max_size=30)


@given(text=pieces, draft=pieces, budget=st.none() | st.integers(0, 20), opening=st.sampled_from(["", "<think>"]))
def test_the_possible_part_of_a_draft_stays_within_the_reasoning_and_its_budget(
    text: str, draft: str, budget: int | None, opening: str
) -> None:
    thinking = Thinking(Reasoning("</think>", opening, budget), TABLE, ids("</think>"))
    for token_id in ids(text):
        thinking.push(token_id)
        if thinking.is_over:
            return
    was_forced = bool(thinking.forced_ids)
    number = thinking.num_possible(ids(draft))
    for token_id in ids(draft)[:number]:
        assert not was_forced or thinking.forced_ids[0] == token_id
        assert was_forced or not thinking.forced_ids
        thinking.push(token_id)
        assert opening or not thinking.is_over
    assert was_forced or opening or not thinking.forced_ids
