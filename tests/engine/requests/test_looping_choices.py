"""Choices in a loop: they are noted in the account, and end where the request asks for it."""

from typing import Any

import pytest

from oaiserve.engine.request import Aborted, Event, Finished, Grammar, Reasoning, TokenChunk
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.types.loop_rule import USUAL, LoopRule
from oaiserve.facts.record import EngineAccount
from tests.engine.doubles import (
    EOS,
    Inbox,
    ScriptedRunner,
    letter_id,
    make_engine,
    request,
    wait_until_idle,
)

pytestmark = pytest.mark.usefixtures("overlap")

A, B, X = map(letter_id, "abx")
TWICE_THREE = LoopRule(max_pattern_size=4, min_count=3)


def alternating(sequence: Sequence) -> int:
    return (A, B)[sequence.num_generated % 2]


def answered(
    token_of: Any = alternating, *, kv_blocks: int = 256, **params: object
) -> tuple[TokenChunk, EngineAccount]:
    """Return the last chunk of the answer, and the account."""
    with make_engine(ScriptedRunner(token_of), kv_blocks=kv_blocks) as engine:
        *_, last, finished = engine.stream(request(**params))
    assert isinstance(finished, Finished)
    assert isinstance(last, TokenChunk)
    return last, finished.account


def loop_of(account: EngineAccount) -> tuple[int, int, int]:
    return account.num_loops, account.loop_tokens, account.loop_period_tokens


def test_choice_ends_where_its_loop_rule_is_met() -> None:
    last, account = answered(max_tokens=50, loop_rule=TWICE_THREE)
    assert (last.finish_reason, last.stop_reason) == ("repetition", "repetition_detected")
    assert account.longest_choice_tokens == 6
    assert loop_of(account) == (0, 0, 0)  # for the server, so few tokens are no loop


def test_choice_in_a_loop_goes_on_without_a_rule_and_is_noted() -> None:
    last, account = answered(max_tokens=400)
    assert (last.finish_reason, last.stop_reason) == ("length", None)
    assert loop_of(account) == (1, 400, 2)


def test_usual_rule_ends_a_choice_that_is_noted() -> None:
    last, account = answered(lambda s: alternating(s) if s.num_generated > 20 else X, max_tokens=500, loop_rule=USUAL)
    assert last.finish_reason == "repetition"
    assert 300 <= account.loop_tokens < account.longest_choice_tokens < 360
    assert (account.num_loops, account.loop_period_tokens) == (1, 2)


def test_end_token_is_not_a_part_of_the_loop() -> None:
    _, account = answered(lambda s: EOS if s.num_generated == 350 else alternating(s), max_tokens=400)
    assert loop_of(account) == (1, 350, 2)


def test_loop_before_other_tokens_is_not_noted() -> None:
    _, account = answered(lambda s: alternating(s) if s.num_generated < 350 else X, max_tokens=355)
    assert loop_of(account) == (0, 0, 0)


def test_account_has_the_longest_loop_of_all_choices() -> None:
    def token_of(sequence: Sequence) -> int:
        return A if sequence.index and sequence.num_generated >= 10 else alternating(sequence)

    _, account = answered(token_of, n=2, max_tokens=320, kv_blocks=400)
    assert loop_of(account) == (2, 320, 2)


def test_loop_of_an_aborted_request_is_noted() -> None:
    inbox = Inbox()
    runner = ScriptedRunner(alternating, gated=True)
    with make_engine(runner, kv_blocks=256) as engine:
        engine.submit(request(max_tokens=900), inbox)
        runner.permit(330)
        for _ in range(331):
            runner.started.get()
        engine.abort("r")
        runner.permit(900)
        terminal = inbox.wait_terminal("r")["r"]
        wait_until_idle(engine)
    assert isinstance(terminal, Aborted)
    assert terminal.account.num_loops == 1
    assert terminal.account.loop_tokens >= 320


def test_choice_is_not_ended_before_min_tokens() -> None:
    last, account = answered(max_tokens=50, min_tokens=21, loop_rule=TWICE_THREE)
    assert last.finish_reason == "repetition"
    assert account.longest_choice_tokens == 21


def test_limit_of_tokens_comes_before_the_loop() -> None:
    last, _ = answered(max_tokens=6, loop_rule=TWICE_THREE)
    assert (last.finish_reason, last.stop_reason) == ("length", None)


def test_what_a_grammar_constrains_is_no_loop() -> None:
    last, account = answered(max_tokens=400, loop_rule=TWICE_THREE, grammar=Grammar("regex", "(ab)*"))
    assert last.finish_reason == "length"
    assert loop_of(account) == (0, 0, 0)


def test_part_that_a_grammar_constrains_is_no_loop_and_the_text_after_it_may_be_one() -> None:
    call = [*[A, B] * 20, letter_id("z")]
    lead = letter_id("y")

    def token_of(sequence: Sequence) -> int:
        number = sequence.num_generated
        return lead if number == 0 else call[number - 1] if number <= len(call) else alternating(sequence)

    grammar = Grammar("lark", 'start: "A" /(ab)*/ "z"', leads=("y",))
    last, account = answered(token_of, max_tokens=100, loop_rule=TWICE_THREE, grammar=grammar)
    assert last.finish_reason == "repetition"
    assert len(call) + 6 < account.longest_choice_tokens < len(call) + 12


def test_reasoning_before_a_grammar_may_be_a_loop() -> None:
    params = {"grammar": Grammar("regex", "(ab)*"), "reasoning": Reasoning("z")}
    last, account = answered(max_tokens=50, loop_rule=TWICE_THREE, **params)
    assert last.finish_reason == "repetition"
    assert account.longest_choice_tokens == 6


def test_choice_ends_at_the_same_token_whatever_its_chunks_are() -> None:
    def events(**params: object) -> list[Event]:
        with make_engine(ScriptedRunner(alternating), kv_blocks=256) as engine:
            return list(engine.stream(request(max_tokens=500, loop_rule=USUAL, **params)))

    usages = [events(**params)[-1].usage.completion_tokens for params in ({}, {"logprobs": 0}, {"stop": ("q",)})]
    assert len(set(usages)) == 1
    assert usages[0] >= 300
