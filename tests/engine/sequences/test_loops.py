"""Loops at the end of a text, next to a plain definition of them, and texts with repetitions that are no loop."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.sequences.loops import MOST_BETWEEN_CHECKS, Loop, LoopWatch, loop_at_end
from oaiserve.engine.types.loop_rule import USUAL, LoopRule


def plain_loop(token_ids: list[int], rule: LoopRule) -> Loop | None:
    for period in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        length = period
        while length < len(token_ids) and token_ids[-length - 1] == token_ids[-length - 1 + period]:
            length += 1
        if min(length, len(token_ids)) >= max(rule.min_count * period, rule.min_length):
            return Loop(period, length)
    return None


@st.composite
def rules(draw: st.DrawFn) -> LoopRule:
    longest = draw(st.integers(1, 9))
    return LoopRule(
        longest, draw(st.integers(1, longest)), draw(st.integers(2, 5)), draw(st.sampled_from((0, 0, 3, 10, 24)))
    )


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """Return ids that repeat each other in parts, several times in a row, some of them of bytes that are all zero."""
    letters = st.integers(0, draw(st.integers(1, 3)))
    parts = draw(st.lists(st.tuples(st.lists(letters, max_size=9), st.integers(1, 7)), max_size=4))
    return [token_id for part, times in parts for token_id in part * times]


@given(texts(), rules())
def test_loop_is_the_one_of_the_plain_definition(token_ids: list[int], rule: LoopRule) -> None:
    assert loop_at_end(token_ids, rule) == plain_loop(token_ids, rule)


@given(texts(), rules())
def test_watch_finds_a_loop_at_its_first_check_that_has_one(token_ids: list[int], rule: LoopRule) -> None:
    watch = LoopWatch(rule)
    found = next((number for number, token_id in enumerate(token_ids, 1) if watch.push(token_id)), None)
    shortest = rule.least_length(rule.min_pattern_size)
    interval = min(max(1, shortest // 4), MOST_BETWEEN_CHECKS)
    checks = range(shortest, len(token_ids) + 1, interval)
    assert found == next((number for number in checks if plain_loop(token_ids[:number], rule)), None)


@pytest.mark.parametrize("period", [1, 2, 18, 75, 511, 512])
def test_a_usual_loop_is_noted_from_its_least_length_on(period: int) -> None:
    least = max(4 * period, 300)
    token_ids = [*range(1000, 1050), *(number % period for number in range(least))]
    assert loop_at_end(token_ids) == Loop(period, least)
    assert loop_at_end(token_ids[:-1]) is None


def test_a_longer_period_than_the_longest_is_no_loop() -> None:
    assert loop_at_end([number % 513 for number in range(5130)]) is None


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, 2] * 100,  # "ha " a hundred times
        [token_id for row in range(200) for token_id in (5, 6, 7, 1000 + row, 8)],  # a table whose rows have numbers
        [token_id for row in range(30) for token_id in (5, 6, 7, 8, 9, 10, 11, 12, 13)],  # thirty equal rows
        [token_id for row in range(14) for token_id in [*[1, 2] * 7, 3 + row % 2, 4]],
        [*[1] * 299, 2],
        list(accumulate(range(600))),
        [],
    ],
)
def test_repeated_rows_are_no_loop(token_ids: list[int]) -> None:
    assert loop_at_end(token_ids, USUAL) is None
    watch = LoopWatch(USUAL)
    assert not any(map(watch.push, token_ids))


def test_a_long_text_of_one_token_and_its_end_take_few_searches() -> None:
    """A run excludes the periods that it could have, so the periods are not tried one by one."""
    rule = LoopRule(max_pattern_size=1024, min_pattern_size=1, min_count=200)
    token_ids = [*range(2, 30_000), *[0] * 150, 1, *[0] * 150]
    assert loop_at_end(token_ids, rule) is None
