"""Paired runs: both sides run equally often, in turns, and the interval of their ratio is that of the logarithms."""

from __future__ import annotations

import math
import random

import pytest

from tools.paired import Slices, interval, measure_pairs, trimmed_interval


def test_sides_take_turns_with_a_seed_each_and_the_first_pair_does_not_count() -> None:
    runs: list[tuple[str, int]] = []

    def run(side: str, seed: int) -> int:
        runs.append((side, seed))
        return seed

    pairs = measure_pairs(lambda seed: run("with", seed), lambda seed: run("without", seed), 3)
    assert [side for side, _ in runs] == ["without", "with", "with", "without", "without", "with", "with", "without"]
    assert len({seed for _, seed in runs}) == len(runs)
    assert pairs == [(2, 3), (5, 4), (6, 7)]


def test_an_interval_is_symmetric_around_the_geometric_mean() -> None:
    mean, low, high = (float(word.strip("()")) for word in interval([1.0, 1.21]).replace("to ", "").split())
    assert mean == pytest.approx(1.1, abs=1e-4)
    assert math.log(high / mean) == pytest.approx(1.96 * math.log(1.1), rel=1e-3)
    assert math.log(mean / low) == pytest.approx(1.96 * math.log(1.1), rel=1e-3)
    assert interval([1.0, 1.0]) == "1.0000 (1.0000 to 1.0000)"
    assert interval([1.0]) == ""


def test_slices_find_what_is_added_to_steps_and_drop_pairs_that_are_interrupted() -> None:
    slices, now_ns, with_it = Slices(size=5, seed=3), 0, True
    order: list[bool] = []
    for number in range(200):
        if number == 57:  # in the middle of a pair, and the first step behind it is much longer
            slices.interrupted()
            now_ns += 10**9
        with_it = slices.ended(now_ns)
        order.append(with_it)
        now_ns += 1000 + 100 * with_it + (700 if number % 5 == 3 else 0)  # one slow step in each slice
    assert slices.medians == [(1100, 1000)] * (5 + 14)  # of 10 steps each: 56 before, and 142 behind
    assert slices.means == [(1240, 1140)] * 19
    firsts = order[:50:10]
    assert len(set(firsts)) == 2
    assert order[:50] == [side for first in firsts for side in [first] * 5 + [not first] * 5]


def test_a_trimmed_interval_holds_the_ratio_whatever_slowed_down_some_of_the_pairs() -> None:
    generator = random.Random(1)
    pairs = [(1.01 * generator.gauss(100, 1), generator.gauss(100, 1)) for _ in range(200)]
    pairs[::40] = [(900.0, 100.0)] * 5
    ratio, low, high = trimmed_interval(pairs)
    assert low < 1.01 < high
    assert low < ratio < high
    assert high - low < 0.006
    assert trimmed_interval([(2.0, 1.0)] * 4) == pytest.approx((2.0, 2.0, 2.0))
