"""Requests of an engine are forecast when their prompts are known, once enough of them have been compared."""

import random
from dataclasses import replace
from itertools import count
from operator import le
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.engine import Engine
from oaiserve.engine.forecast.calibration import ENOUGH
from oaiserve.engine.forecast.forecaster import PACES, Asked, Forecaster, _Pace
from oaiserve.engine.request import Aborted, Finished, PromptDone, Request, SamplingParams, TokenPrompt
from oaiserve.explain.step_cost import KNOTS, StepCost
from oaiserve.facts.forecast import NO_FORECAST
from oaiserve.facts.open_row import OpenRow
from tests.engine.doubles import Inbox, make_engine


def answer(engine: Engine, request_id: str, num_tokens: int = 3) -> tuple[PromptDone, Finished]:
    asked = Request(request_id, (TokenPrompt([5, 6, 7]),), SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    events = list(engine.stream(asked))
    prompt = events[0]
    end = events[-1]
    assert isinstance(prompt, PromptDone)
    assert isinstance(end, Finished)
    return prompt, end


def test_nothing_is_promised_before_enough_requests_were_compared_and_then_each_account_has_its_forecast() -> None:
    with make_engine(tokenize_workers=0, clock_ns=count(0, 1_000_000).__next__) as engine:
        told = [answer(engine, f"{number}") for number in range(ENOUGH + 40)]
        assert all(prompt.forecast == NO_FORECAST for prompt, _ in told[:ENOUGH])
        prompt, end = told[-1]
        forecast = end.account.forecast
        assert forecast.is_calibrated
        assert forecast == prompt.forecast
        assert 0 < forecast.first_token_low_ns <= forecast.first_token_ns <= forecast.first_token_high_ns
        assert forecast.first_token_ns <= forecast.end_ns <= forecast.end_high_ns


def test_without_explain_nothing_is_forecast() -> None:
    with make_engine(tokenize_workers=0, explain=False) as engine:
        assert engine._loop.forecaster is None
        assert answer(engine, "r")[1].account.forecast == NO_FORECAST


def test_every_end_of_a_request_leaves_nothing_behind() -> None:
    with make_engine(tokenize_workers=0) as engine:
        forecaster = engine._loop.forecaster
        for number in range(20):
            answer(engine, f"{number}")
        inbox = Inbox()
        engine.submit(Request("long", (TokenPrompt([5, 6]),), SamplingParams(max_tokens=200, ignore_eos=True)), inbox)
        engine.abort("long")
        assert isinstance(inbox.wait_terminal("long")["long"], Aborted)
        answer(engine, "one")
        answer(engine, "more")
        assert {*forecaster._open} <= {"more"}
        assert not any(opened.asked.prompts for opened in forecaster._open.values())


def test_open_requests_show_what_was_promised_and_how_it_looks_now() -> None:
    with make_engine(tokenize_workers=0, clock_ns=count(0, 1_000_000).__next__) as engine:
        for number in range(ENOUGH + 40):
            answer(engine, f"{number}", 60)
        asked = Request("long", (TokenPrompt([5, 6, 7]),), SamplingParams(max_tokens=60, ignore_eos=True))
        row: OpenRow | None = None
        while row is None or row.end_now_ns is None:  # the engine may have answered it all before it is looked at
            events = engine.stream(replace(asked, received_ns=engine._clock_ns()))
            next(events)
            row = engine.open_requests(0).get("long")
            events.close()
        assert row.forecast["is_calibrated"]
        assert row.elapsed_ns < row.end_now_ns
        assert row.end_now_ns == pytest.approx(row.forecast["end_ns"], rel=0.5)


@pytest.fixture(scope="module")
def forecaster() -> Forecaster:
    """Return the forecaster of an engine that is not started, with a cost and a forecast of the request "r"."""
    found: Forecaster = make_engine(tokenize_workers=0)._loop.forecaster
    found._cost = lambda: StepCost(tuple(1e6 * rows for rows in KNOTS))
    found._steps = lambda now_ns: (1e6, 1e5, 1.0)  # type: ignore[method-assign]
    asked = Asked("r", "", "chat", None, [[5] * 30], 9, True, False, 1, "", received_ns=0)
    assert found.forecast(asked, 0) == NO_FORECAST
    return found


@given(st.lists(st.floats(1, 1e12), min_size=12, max_size=12), st.integers(0, 10**12))
def test_no_estimate_has_its_end_before_its_first_token(
    forecaster: Forecaster, times: list[float], now_ns: int
) -> None:
    opened = forecaster._open["r"]
    assert len(opened.kinds) == 2, "its answer cannot end before its limit"
    threes = [sorted(times[at : at + 3]) for at in (0, 3, 6, 9)]
    raw = tuple(map(tuple, threes[:2]))
    told = tuple(map(tuple, threes[2:]))
    kinds = (SimpleNamespace(is_enough=True),) * 2
    with patch.dict(forecaster._open, r=replace(opened, raw=raw, told=told, kinds=kinds)):
        now = forecaster.open_now(now_ns, ["r"])["r"]
    assert now.first_token_now_ns is not None
    assert now.end_now_ns is not None
    assert now_ns <= now.first_token_now_ns <= now.end_now_ns
    assert now.promised.is_calibrated
    assert all(map(le, now.promised.first_token_interval_ns, now.promised.end_interval_ns))


def test_the_end_is_forecast_once_nearly_all_answers_end_at_their_limit(forecaster: Forecaster) -> None:
    asked = Asked("short", "", "chat", None, [[5] * 30], 60, True, True, 1, "", received_ns=0)

    def has_end(limit: int) -> bool:
        forecaster.forecast(asked._replace(limit=limit), 0)
        return len(forecaster._open["short"].kinds) == 2

    assert not has_end(60)
    assert forecaster.open_now(0, ["short"])["short"].end_now_ns is None
    for number_of_tokens, limit in ((60, 60), (10, 61)):
        classes = asked._replace(limit=limit).classes
        for _ in range(200):
            forecaster._lengths.observe(classes[2:], number_of_tokens, has_ended=number_of_tokens < limit)
    assert has_end(60)
    assert not has_end(61)


def test_a_burst_is_known_by_its_last_gaps_and_a_steady_rate_by_many() -> None:
    rng = random.Random(1)
    steady, bursts = ([_Pace(number) for number in PACES] for _ in range(2))
    for number in range(4000):
        for paces, mean in ((steady, 1.0), (bursts, 0.1 if number % 100 < 50 else 10.0)):
            gap = rng.expovariate(1 / mean)
            for pace in paces:
                pace.learn(gap)
    assert max(steady, key=lambda pace: pace.fit).most in PACES[2:]
    assert max(bursts, key=lambda pace: pace.fit).most in PACES[:2]
