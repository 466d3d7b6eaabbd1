import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.intervals import mean_interval, percentile, ratio_interval, wilson_interval


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_equal_those_of_numpy(values: list[float], q: float) -> None:
    assert percentile(sorted(values), q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-6)


def test_the_mean_of_repeats_has_students_interval() -> None:
    low, high = mean_interval([10.0, 11.0, 12.0]) or (0, 0)
    assert (low, high) == (pytest.approx(11 - 4.303 / math.sqrt(3)), pytest.approx(11 + 4.303 / math.sqrt(3)))
    assert mean_interval([10.0]) is None


def test_about_95_of_100_intervals_contain_the_true_mean() -> None:
    rng = random.Random(0)
    hits = 0
    for _ in range(1000):
        low, high = mean_interval([rng.gauss(5, 2) for _ in range(4)]) or (0, 0)
        hits += low <= 5 <= high
    assert hits == pytest.approx(950, abs=25)


def test_the_interval_of_a_ratio_needs_repeats_and_excludes_1_only_for_a_real_difference() -> None:
    assert ratio_interval([1.0], [2.0, 2.0]) is None
    low, high = ratio_interval([10.0, 10.1, 9.9], [20.0, 20.2, 19.8]) or (0, 0)
    assert 1.9 < low < 2 < high < 2.1
    low, high = ratio_interval([10.0, 14.0, 6.0], [11.0, 7.0, 13.0]) or (0, 0)
    assert low < 1 < high
    assert ratio_interval([1.0, 1.0], [2.0, 2.0]) == (pytest.approx(2), pytest.approx(2))


def test_wilson_intervals_have_known_values() -> None:
    assert wilson_interval(0, 0) == (0, 1)
    assert wilson_interval(81, 263) == (pytest.approx(0.2553, abs=1e-3), pytest.approx(0.3662, abs=1e-3))
    assert wilson_interval(10, 10)[1] == pytest.approx(1)
