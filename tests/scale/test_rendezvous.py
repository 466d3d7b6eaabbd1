"""Rendezvous hashing: a fair order for each key, in which little moves."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.scale.router import order, score, seed_of

NAMES = [f"10.0.0.{number}:8000" for number in range(16)]
numbers = st.integers(0, 2**64 - 1)


def ranked(key: int, names: list[str]) -> list[str]:
    return [names[position] for position in order(key, np.array([seed_of(name) for name in names], np.uint64))]


@given(key=numbers, seeds=st.lists(numbers, min_size=1, max_size=20, unique=True))
def test_the_order_is_that_of_the_scores(key: int, seeds: list[int]) -> None:
    expected = sorted(range(len(seeds)), key=lambda position: -score(key, seeds[position]))
    assert order(key, np.array(seeds, np.uint64)) == expected


def test_each_replica_is_first_for_its_share_of_keys() -> None:
    first = Counter(ranked(key, NAMES)[0] for key in range(4000))
    assert len(first) == len(NAMES)
    assert all(abs(number - 250) < 70 for number in first.values()), first  # 4.6 standard deviations


def test_what_is_first_with_one_is_second_with_all_others() -> None:
    second = Counter(names[1] for names in (ranked(key, NAMES) for key in range(8000)) if names[0] == NAMES[0])
    assert len(second) == len(NAMES) - 1
