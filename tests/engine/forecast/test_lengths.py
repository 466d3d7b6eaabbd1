"""The learnt lengths of answers, compared with those that were drawn."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.forecast.lengths import Lengths

CLASSES = ((), ("chat", "key"))


def test_the_learnt_distribution_is_that_of_the_answers_although_limits_cut_some_of_them() -> None:
    rng = random.Random(1)
    lengths = Lengths()
    drawn = [round(rng.lognormvariate(5, 0.6)) for _ in range(400)]
    for length in drawn:
        limit = rng.choice([100, 200, 400, 10_000])  # a quarter of the answers at least is cut at 100 tokens
        lengths.observe(CLASSES, min(length, limit), has_ended=length < limit)
    curve = lengths.curve(CLASSES)
    whole = sorted(drawn)
    for level in (0.25, 0.5, 0.75, 0.9):
        assert curve.at(level, 10_000) == pytest.approx(whole[int(level * len(whole))], rel=0.25)


def test_a_class_of_its_own_is_learnt_from_few_answers_and_leans_on_the_wider_one() -> None:
    lengths = Lengths()
    for _ in range(200):
        lengths.observe(((), "short"), 10, has_ended=True)
    assert lengths.curve(((), "new")).at(0.5, 1000) == 10
    for _ in range(30):
        lengths.observe(((), "long"), 500, has_ended=True)
    assert lengths.curve(((), "long")).at(0.75, 1000) == pytest.approx(500, rel=0.1)


@given(
    st.lists(st.tuples(st.integers(1, 10**5), st.booleans()), max_size=30),
    st.floats(0, 1),
    st.integers(1, 10**5),
    st.integers(0, 10**5),
)
def test_a_length_is_beyond_what_is_there_and_within_the_limit(
    answers: list[tuple[int, bool]], level: float, limit: int, so_far: int
) -> None:
    lengths = Lengths()
    for length, has_ended in answers:
        lengths.observe(CLASSES, length, has_ended=has_ended)
    length = lengths.curve(CLASSES).at(level, limit, so_far)
    assert min(so_far + 1, limit) <= length <= limit or so_far == length == 0
    assert length <= lengths.curve(CLASSES).at(1.0, limit, so_far)
