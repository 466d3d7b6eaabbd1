"""Tests of the reports that a request gets of its prompt, until its first token."""

from dataclasses import replace
from typing import Any

import pytest

from oaiserve.engine.request import PromptDone, PromptProgress, TokenPrompt
from tests.engine.doubles import Clock, Inbox, ScriptedRunner, make_engine, request


def reported(*, seconds_per_step: float = 1.0, prompts: tuple[int, ...] = (80,), **more: Any) -> list[PromptProgress]:
    """Return the reports of one request with prompts of these lengths, of which a step computes 16 tokens."""
    clock = Clock()
    engine = make_engine(ScriptedRunner(computing=lambda _: clock.move(seconds_per_step)), clock_ns=clock)
    prompts_of_tokens = tuple(TokenPrompt([number + 1] * length) for number, length in enumerate(prompts))
    one_request = replace(request(**more), prompts=prompts_of_tokens, reports_progress=True)
    with engine:
        events = list(engine.stream(one_request))
    assert len([event for event in events if isinstance(event, PromptDone)]) == len(prompts)
    results = [event for event in events if isinstance(event, PromptProgress)]
    assert [*map(type, events[: len(results)])] == [PromptProgress] * len(results)
    return results


def test_reports_come_when_a_prompt_enters_a_step_and_then_each_second() -> None:
    result = reported()
    assert [event.num_computed for event in result] == [0, 16, 32, 48, 64]
    assert [event.elapsed_ns for event in result] == [second * 10**9 for second in range(5)]
    assert [event.rest_ns for event in result] == [None, 4 * 10**9, 3 * 10**9, 2 * 10**9, 10**9]
    assert {(event.num_tokens, event.num_cached) for event in result} == {(80, 0)}
    assert all(event.times.scheduled is not None and event.times.first_token is None for event in result)
    assert [event.num_computed for event in reported(seconds_per_step=0.4)] == [0, 48]


def test_a_short_prompt_gets_none_however_slow_it_is() -> None:
    assert reported(prompts=(63,), seconds_per_step=9.0) == []


def test_choices_do_not_count_twice_and_prompts_do() -> None:
    result = reported(prompts=(80, 100), n=2)
    assert {event.num_tokens for event in result} == {180}
    assert [event.num_computed for event in result] == sorted(event.num_computed for event in result)


def test_the_first_report_leaves_before_the_step_is_computed() -> None:
    runner = ScriptedRunner(gated=True)
    with make_engine(runner) as engine:
        inbox = Inbox()
        engine.submit(replace(request(prompt_len=80), reports_progress=True), inbox)
        assert [type(event) for event in inbox.wait()] == [PromptProgress]
        runner.permit(1000)


@pytest.mark.usefixtures("overlap")
def test_cached_tokens_are_told_apart() -> None:
    with make_engine() as engine:
        list(engine.stream(request(prompt_len=33)))
        one_request = replace(request("again", prompt_len=120), reports_progress=True)
        (first, *_) = [event for event in engine.stream(one_request) if isinstance(event, PromptProgress)]
    assert (first.num_tokens, first.num_cached, first.num_computed) == (120, 32, 32)
