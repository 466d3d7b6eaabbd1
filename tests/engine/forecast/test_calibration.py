"""Intervals hold as often as they say, whatever the errors of the forecasts are like."""

import random
from collections.abc import Callable
from math import exp

import pytest

from oaiserve.engine.forecast.calibration import ENOUGH, Calibration


@pytest.mark.parametrize(
    "error",
    [
        lambda rng, _: rng.gauss(0.5, 0.3),  # errors of one kind, not around 0
        lambda rng, number: rng.gauss(0, 0.1) + number / 2000,  # errors that drift
        lambda rng, number: rng.gauss(0, 0.1 if number % 1000 < 500 else 0.8),  # errors that jump
        lambda rng, _: rng.gauss(-0.7, 0.01) if rng.random() < 0.3 else rng.expovariate(3),  # errors of two kinds
    ],
)
def test_nine_in_ten_intervals_hold_and_half_of_the_medians_are_too_low(
    error: Callable[[random.Random, int], float],
) -> None:
    rng = random.Random(2)
    calibration = Calibration()
    inside = above = num = 0
    for number in range(6000):
        raw = 1e8, 1.2e8, 2e8
        came = raw[1] * exp(error(rng, number))
        told = calibration.calibrated(raw)
        if calibration.is_enough:
            num += 1
            inside += told[0] <= came <= told[2]
            above += came > told[1]
        calibration.learn(raw, told, came)
    assert inside / num == pytest.approx(0.9, abs=0.02)
    assert above / num == pytest.approx(0.5, abs=0.03)


def test_it_says_when_it_knows_enough() -> None:
    calibration = Calibration()
    for number in range(ENOUGH):
        assert not calibration.is_enough, number
        calibration.learn((1e6,) * 3, (1e6,) * 3, 2e6)
    assert calibration.is_enough
    assert calibration.calibrated((1e6, 1e6, 1e6))[1] == pytest.approx(2e6)
