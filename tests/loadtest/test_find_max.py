"""The search for the highest rate, on simulated servers: functions from a rate to the share of good requests."""

import random
from collections.abc import Callable

import pytest

from loadtest.find_max import RateResult, Trial, find_max, render_result, render_search


def server(
    share_good: Callable[[float], float], num_requests: int = 200, seed: int = 0
) -> Callable[[float, int], Trial]:
    rng = random.Random(seed)

    def measure(rate: float, number: int) -> Trial:
        return Trial(sum(rng.random() < share_good(rate) for _ in range(num_requests)), num_requests)

    return measure


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.3, 95.0])
@pytest.mark.parametrize("first", [0.5, 8.0, 60.0])
def test_a_sharp_limit_lies_within_the_bracket(limit: float, first: float) -> None:
    bracket = find_max(server(lambda rate: 1.0 if rate <= limit else 0.2), first, precision=0.05)
    assert bracket.holds is not None
    assert bracket.fails is not None
    assert bracket.holds <= limit < bracket.fails <= bracket.holds * 1.05
    assert len(bracket.steps) < 20


def test_a_soft_limit_is_found_on_the_safe_side() -> None:
    bracket = find_max(server(lambda rate: max(0.0, 1 - rate / 100)), 1.0, attainment=0.9, precision=0.05)
    assert bracket.holds is not None
    assert 3 < bracket.holds < 10.5


def test_an_undecided_rate_is_tried_again_and_then_counts_as_failed() -> None:
    bracket = find_max(lambda rate, number: Trial(95, 100), 1.0, attainment=0.95, most_trials=4)
    first = bracket.steps[0]
    assert (first.reason, first.num_judged, first.holds) == ("undecided", 400, False)
    assert bracket.holds is None


def test_a_rate_at_which_requests_pile_up_fails_even_if_all_are_good() -> None:
    bracket = find_max(lambda rate, number: Trial(100, 100, oversaturated=rate > 4), 1.0, attainment=0.9)
    assert (bracket.holds is not None, bracket.steps[3].reason) == (True, "piles up")
    assert bracket.fails is not None
    assert 4 < bracket.fails < 4.5


def test_a_trial_that_says_nothing_ends_the_search() -> None:
    bracket = find_max(lambda rate, number: Trial(100, 100, problem="died" * (rate > 2)), 1.0, attainment=0.9)
    assert (bracket.holds, bracket.fails, bracket.problem) == (2.0, None, "died")
    assert "no limit was found above" in render_search(bracket, "ttft:1s", 0.9)


def test_each_result_is_reported_as_soon_as_it_is_decided() -> None:
    reported: list[RateResult] = []
    bracket = find_max(lambda rate, number: Trial(100, 100, oversaturated=rate > 1), 1.0, on_result=reported.append)
    assert reported == bracket.steps
    assert render_result(reported[0]) == "        1 requests/s: holds     100 of 100 good (96.3% .. 100.0%)"


def test_the_search_ends_if_every_rate_holds_or_every_rate_fails() -> None:
    assert find_max(server(lambda rate: 1.0), 1.0).fails is None
    hopeless = find_max(server(lambda rate: 0.0), 1.0)
    assert hopeless.holds is None
    assert "no rate that was tried" in render_search(hopeless, "ttft:1s", 0.95)


def test_trials_are_numbered_over_all_rates() -> None:
    numbers = []

    def measure(rate: float, number: int) -> Trial:
        numbers.append(number)
        return Trial(90, 100, oversaturated=rate > 4)

    find_max(measure, 1.0, attainment=0.9)
    assert numbers == list(range(len(numbers)))
