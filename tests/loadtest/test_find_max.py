"""The search for the highest rate, on simulated servers: functions from a rate to the share of good requests."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.find_max import (
    Measure,
    Plan,
    RateResult,
    Trial,
    find_max,
    least_requests,
    most_misses,
    render_plan,
    render_result,
    render_search,
)
from loadtest.intervals import wilson_interval
from loadtest.prompts import Workload
from loadtest.search import Search

PLAN = Plan(attainment=0.95, num_requests=200, trial_seconds=0, most_trials=3)
EASY = replace(PLAN, attainment=0.9, num_requests=100)


def server(share_good: Callable[[float], float], num_requests: int = 200, seed: int = 0) -> Measure:
    rng = random.Random(seed)

    def measure(rate: float, number: int, may_miss: int) -> Trial:
        return Trial(sum(rng.random() < share_good(rate) for _ in range(num_requests)), num_requests)

    return measure


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.3, 95.0])
@pytest.mark.parametrize("first", [0.5, 8.0, 60.0])
def test_a_sharp_limit_lies_within_the_bracket(limit: float, first: float) -> None:
    bracket = find_max(server(lambda rate: 1.0 if rate <= limit else 0.2), first, PLAN, precision=0.05)
    assert bracket.holds is not None
    assert bracket.fails is not None
    assert bracket.holds <= limit < bracket.fails <= bracket.holds * 1.05
    assert len(bracket.steps) < 20


def test_a_soft_limit_is_found_on_the_safe_side() -> None:
    bracket = find_max(
        server(lambda rate: max(0.0, 1 - rate / 100)), 1.0, replace(PLAN, attainment=0.9), precision=0.05
    )
    assert bracket.holds is not None
    assert 3 < bracket.holds < 10.5


def test_an_undecided_rate_is_tried_again_until_it_cannot_hold() -> None:
    plan = replace(PLAN, num_requests=100, most_trials=4)
    bracket = find_max(lambda rate, number, may_miss: Trial(97, 100), 1.0, plan)
    first = bracket.steps[0]
    assert (first.reason, first.num_judged, first.holds) == ("dropped", 400, False)
    assert bracket.holds is None


def test_a_rate_that_can_no_longer_hold_is_not_tried_again() -> None:
    allowed = []

    def measure(rate: float, number: int, may_miss: int) -> Trial:
        allowed.append(may_miss)
        return Trial(196, 200)

    bracket = find_max(measure, 1.0, replace(PLAN, attainment=0.97))
    first = bracket.steps[0]
    assert (first.reason, first.num_judged, first.holds) == ("dropped", 600, False)
    assert allowed[:3] == [9, 5, 1]  # a third trial may miss one at most, and has missed four
    dropped = find_max(lambda rate, number, may_miss: Trial(20, 21 + may_miss), 1.0, replace(PLAN, attainment=0.97))
    assert dropped.steps[0].num_judged == 30, "after a trial with a miss too many there is no other"


@pytest.mark.parametrize(("attainment", "least"), [(0.5, 4), (0.8, 16), (0.95, 73), (0.99, 381)])
def test_a_decision_needs_enough_requests(attainment: float, least: int) -> None:
    assert least_requests(attainment) == least
    assert wilson_interval(least, least)[0] >= attainment > wilson_interval(least - 1, least - 1)[0]
    assert (most_misses(least, attainment), most_misses(least - 1, attainment)) == (0, -1)
    most = most_misses(3 * least, attainment)
    low, lower = (wilson_interval(3 * least - misses, 3 * least)[0] for misses in (most, most + 1))
    assert low >= attainment > lower


def test_each_turn_of_a_conversation_may_miss_or_keep_the_limits(tmp_path: Path) -> None:
    search = Search(slo="ttft:1s")
    assert search.plan(Workload()).most_misses(1) == most_misses(3 * 73, 0.95)
    of_conversations = search.plan(Workload(turns=5))
    assert of_conversations.most_misses(1) == most_misses(3 * 73 * 5, 0.95)
    assert "A rate holds after 365 without a miss" in render_plan(of_conversations, "ttft:1s", 1, 1800)
    file = tmp_path / "sessions.jsonl"
    rows = [{"session_id": str(number), "input_length": 8} for number in (*range(73), 7, 7)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert search.plan(Workload(requests=file)).turns == 3


def test_the_plan_says_how_many_requests_and_how_long() -> None:
    plan = Plan(attainment=0.95, num_requests=73, trial_seconds=10, most_trials=3)
    assert (plan.requests_of_trial(1), plan.requests_of_trial(20), plan.seconds_at(20)) == (73, 200, 30)
    text = render_plan(plan, "ttft:1s", first_rate=0.5, max_seconds=1800)
    assert "the highest rate at which 95% of the requests keep ttft:1s." in text
    assert "at least 73 requests. A rate holds after 73 without a miss, or after up to 219 with at most 4;" in text
    assert "it is dropped at miss 5. " in text
    assert "At 0.5 requests/s that takes at most 438 s, and the whole search at most 30 min" in text


def test_a_result_names_the_limits_that_were_missed() -> None:
    trial = Trial(10, 20, num_failed=2, missed={"ttft": 7, "tpot": 0, "itl": 1}, p95={"ttft": 4.321, "tpot": 0.01})
    bracket = find_max(lambda rate, number, may_miss: trial, 2.0, PLAN)
    line = "        2 requests/s: misses    10 of 20 good (29.9% .. 70.1%): "
    assert render_result(bracket.steps[0]) == line + "ttft missed by 7 (p95 4.32 s), itl missed by 1, 2 failed"


def test_a_rate_at_which_requests_pile_up_fails_even_if_all_are_good() -> None:
    bracket = find_max(lambda rate, number, may_miss: Trial(100, 100, oversaturated=rate > 4), 1.0, EASY)
    assert (bracket.holds is not None, bracket.steps[3].reason) == (True, "piles up")
    assert bracket.fails is not None
    assert 4 < bracket.fails < 4.5


def test_a_trial_that_says_nothing_ends_the_search() -> None:
    bracket = find_max(lambda rate, number, may_miss: Trial(100, 100, problem="died" * (rate > 2)), 1.0, EASY)
    assert (bracket.holds, bracket.fails, bracket.problem) == (2.0, None, "died")
    assert "no limit was found above" in render_search(bracket, "ttft:1s")


def test_each_result_is_reported_as_soon_as_it_is_decided() -> None:
    reported: list[RateResult] = []
    trial = Trial(100, 100)
    bracket = find_max(
        lambda rate, number, may_miss: replace(trial, oversaturated=rate > 1), 1.0, EASY, on_result=reported.append
    )
    assert reported == bracket.steps
    assert render_result(reported[0]) == "        1 requests/s: holds     100 of 100 good (96.3% .. 100.0%)"


def test_the_search_ends_if_every_rate_holds_or_every_rate_fails() -> None:
    assert find_max(server(lambda rate: 1.0), 1.0, PLAN).fails is None
    hopeless = find_max(server(lambda rate: 0.0), 1.0, PLAN)
    assert hopeless.holds is None
    assert "no rate that was tried" in render_search(hopeless, "ttft:1s")


def test_trials_are_numbered_over_all_rates() -> None:
    numbers = []

    def measure(rate: float, number: int, may_miss: int) -> Trial:
        numbers.append(number)
        return Trial(95, 100, oversaturated=rate > 4)

    find_max(measure, 1.0, EASY)
    assert numbers == list(range(len(numbers)))
