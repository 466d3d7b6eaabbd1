"""Forecasts of simulated requests, whose steps and answers scatter, against what came of them."""

import pytest

from tools.forecasts import Promised, Simulation, promises


@pytest.fixture(scope="module")
def promised() -> list[Promised]:
    simulation = Simulation("steady", 1400, seed=3)
    served = simulation.run(simulation.arrivals()).served
    return [one for one in promises(served) if one.forecast.is_calibrated]


def test_nine_in_ten_first_tokens_come_within_their_intervals(promised: list[Promised]) -> None:
    assert len(promised) > 1000
    held = [one.forecast.first_token_low_ns <= one.came_ns[0] <= one.forecast.first_token_high_ns for one in promised]
    assert sum(held) / len(held) == pytest.approx(0.9, abs=0.05)


def test_the_first_token_is_nearer_to_its_forecast_than_to_any_constant(promised: list[Promised]) -> None:
    came = sorted(one.came_ns[0] for one in promised)
    usual = came[len(came) // 2]
    wrong = sorted(abs(one.forecast.first_token_ns / one.came_ns[0] - 1) for one in promised)
    wrong_by_constant = sorted(abs(usual / ns - 1) for ns in came)
    half = len(promised) // 2
    assert wrong[half] < 0.25 * wrong_by_constant[half]


def test_ends_are_forecast_for_answers_that_run_to_their_limit(promised: list[Promised]) -> None:
    ends = [one for one in promised if one.forecast.has_end]
    assert len(ends) > 100
    assert sum(one.at_limit for one in ends) > 0.9 * len(ends)
    held = [one.forecast.end_low_ns <= one.came_ns[1] <= one.forecast.end_high_ns for one in ends]
    assert sum(held) / len(held) == pytest.approx(0.9, abs=0.08)  # three standard deviations of so few
    wrong = sorted(abs(one.forecast.end_ns / one.came_ns[1] - 1) for one in ends)
    assert wrong[len(ends) // 2] < 0.2
