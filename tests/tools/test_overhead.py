"""Paired runs: both sides run equally often, in turns, and their ratio has an interval."""

from __future__ import annotations

import math

import pytest

from tools.overhead import interval, measure_pairs


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
    assert interval([1.0]) == ""
