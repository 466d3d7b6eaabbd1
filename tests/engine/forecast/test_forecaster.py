"""Requests of an engine are forecast when their prompts are known, once enough of them have been compared."""

import gc
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, cycle
from operator import le

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine import loop
from oaiserve.engine.engine import Engine
from oaiserve.engine.forecast.calibration import ENOUGH
from oaiserve.engine.forecast.forecaster import MOST_OPEN, PACES, Ended, Forecaster, _Pace
from oaiserve.engine.request import Aborted, Finished, PromptDone, Request, SamplingParams, TokenPrompt
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.forecast import NO_FORECAST
from oaiserve.facts.open_row import OpenRow
from oaiserve.facts.times import RequestTimes
from tests.engine.doubles import Inbox, make_engine
from tests.engine.forecast.forecasters import make_forecaster, question


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
        for number in range(ENOUGH + 1):
            assert answer(engine, f"{number}")[1].account.forecast == NO_FORECAST


def test_every_end_of_a_request_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    forecasters: list[Forecaster] = []
    monkeypatch.setattr(loop, "Forecaster", lambda *parts: forecasters.append(Forecaster(*parts)) or forecasters[-1])
    with make_engine(tokenize_workers=0, clock_ns=count(0, 1_000_000).__next__) as engine:
        for number in range(20):
            answer(engine, f"{number}", 60)
        assert engine.step_cost is not None, "nothing is forecast yet"
        inbox = Inbox()
        engine.submit(Request("long", (TokenPrompt([5, 6]),), SamplingParams(max_tokens=200, ignore_eos=True)), inbox)
        engine.abort("long")
        assert isinstance(inbox.wait_terminal("long")["long"], Aborted)
        answer(engine, "one")
        answer(engine, "more")
        (forecaster,) = forecasters
        assert {*forecaster.open_now(0, [*map(str, range(20)), "long", "one", "more"])} <= {"more"}


def test_a_request_beside_many_open_ones_has_no_forecast_until_one_of_them_ends() -> None:
    forecaster = make_forecaster(EngineNumbers)
    for number in range(MOST_OPEN):
        forecaster.forecast(question(f"{number}"), number)
    open_ids = [f"{number}" for number in range(MOST_OPEN + 2)]
    forecaster.forecast(question(f"{MOST_OPEN}"), MOST_OPEN)
    assert len(forecaster.open_now(0, open_ids)) == MOST_OPEN

    forecaster.ended.append(Ended("0", RequestTimes()))
    forecaster.forecast(question(f"{MOST_OPEN + 1}"), MOST_OPEN)

    assert f"{MOST_OPEN + 1}" in forecaster.open_now(0, open_ids)


def test_a_forecast_keeps_no_prompt() -> None:
    class Ids(list[int]):
        """Token ids with weak references."""

    ids = Ids([5] * 30)
    is_alive = weakref.ref(ids)
    forecaster = make_forecaster(EngineNumbers)
    forecaster.forecast(question("r", prompts=[ids]), 0)
    del ids
    gc.collect()
    assert is_alive() is None
    assert "r" in forecaster.open_now(0, ["r"])


def test_open_requests_show_what_was_promised_and_how_it_looks_now() -> None:
    clock = count(0, 1_000_000).__next__
    with make_engine(tokenize_workers=0, clock_ns=clock) as engine:
        for number in range(ENOUGH + 40):
            answer(engine, f"{number}", 60)
        asked = Request("long", (TokenPrompt([5, 6, 7]),), SamplingParams(max_tokens=60, ignore_eos=True))
        row: OpenRow | None = None
        while row is None or row.end_now_ns is None:  # the engine may have answered it all before it is looked at
            events = engine.stream(replace(asked, received_ns=clock()))
            next(events)
            row = engine.open_requests(0).get("long")
            events.close()
        assert row.forecast["is_calibrated"]
        assert row.elapsed_ns < row.end_now_ns
        assert row.end_now_ns == pytest.approx(row.forecast["end_ns"], rel=0.5)


TIMES_NS = st.lists(st.integers(1, 10**12), min_size=1, max_size=9)


@settings(max_examples=20, deadline=None)
@given(first_tokens_ns=TIMES_NS, ends_ns=TIMES_NS, now_ns=st.integers(0, 10**12))
def test_no_estimate_has_its_end_before_its_first_token(
    first_tokens_ns: list[int], ends_ns: list[int], now_ns: int
) -> None:
    """Whatever came of earlier requests: first tokens and ends are learnt apart."""
    forecaster = make_forecaster(steps_go_on().__next__)
    for _, first_ns, end_ns in zip(range(ENOUGH + 1), cycle(first_tokens_ns), cycle(ends_ns), strict=False):
        forecaster.forecast(question("r"), 0)
        forecaster.ended.append(Ended("r", RequestTimes(received=0, first_token=first_ns, last_token=end_ns)))
    forecaster.forecast(question("r"), 0)
    now = forecaster.open_now(now_ns, ["r"])["r"]
    assert now.first_token_now_ns is not None
    assert now.end_now_ns is not None
    assert now_ns <= now.first_token_now_ns <= now.end_now_ns
    assert now.promised.is_calibrated
    assert all(map(le, now.promised.first_token_interval_ns, now.promised.end_interval_ns))


def steps_go_on() -> Iterator[EngineNumbers]:
    """Yield numbers each of which is a step of one sequence later."""
    for number in count():
        times = {"model_ns": 900_000 * number, "idle_with_work_ns": 100_000 * number}
        yield EngineNumbers(num_steps=number, num_step_sequences=number, **times)


def test_the_end_is_forecast_once_nearly_all_answers_end_at_their_limit() -> None:
    forecaster = make_forecaster(EngineNumbers)

    def has_end(limit: int) -> bool:
        forecaster.forecast(question("r", limit=limit, ends_early=True), 0)
        return forecaster.open_now(0, ["r"])["r"].end_now_ns is not None

    assert not has_end(60)
    for num_tokens, limit in ((60, 60), (10, 61)):
        for _ in range(200):
            forecaster.forecast(question("r", limit=limit, ends_early=True), 0)
            times = RequestTimes(received=0, first_token=1)
            forecaster.ended.append(Ended("r", times, num_tokens, is_whole=True))
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
