"""The summary of the engine's account that log, spans and recent requests show."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.facts.record import Cause, EngineAccount
from oaiserve.telemetry.record_facts import MOST_SORTED, Steps, TokenGaps, phase_row, steps_of, token_gaps

NS = st.integers(0, 10**12)


def nearest_rank(values: list[int], percent: int) -> int:
    """Return the nearest rank by its definition: the least value that at least `percent` of them do not exceed."""
    return next(x for x in sorted(values) if 100 * sum(other <= x for other in values) >= percent * len(values))


@given(st.lists(NS, min_size=1, max_size=300))
def test_percentiles_are_the_nearest_rank(values: list[int]) -> None:
    expected = TokenGaps(len(values), nearest_rank(values, 50), nearest_rank(values, 99), max(values))
    assert token_gaps(array("q", values)) == expected
    assert token_gaps(array("q")) is None


@given(st.integers(MOST_SORTED + 1, 5 * MOST_SORTED), st.data())
def test_percentiles_of_many_gaps_come_from_a_sample_but_the_maximum_is_exact(number: int, data: st.DataObject) -> None:
    gaps_ns = array("q", range(number))
    gaps_ns[data.draw(st.integers(0, number - 1))] = 10 * number
    gaps = token_gaps(gaps_ns)
    assert (gaps.number, gaps.max_ns) == (number, 10 * number)
    assert gaps.p50_ns == pytest.approx(number / 2, rel=0.01)
    assert gaps.p99_ns == pytest.approx(number * 0.99, rel=0.01)


def test_steps_range_from_the_first_to_the_last(make_record) -> None:
    account = EngineAccount(first_step=7, num_steps=4, model_ns=440_000_001, num_step_sequences=10, num_step_tokens=50)
    record = make_record(account=account)
    between_ns = record.times.last_token - record.times.scheduled - 440_000_001
    steps = steps_of(record)
    assert steps == Steps(7, 4, 2.5, 12.5, 440_000_001, between_ns)
    assert account.steps == range(7, 11)
    assert steps_of(make_record(6, account=account)).between_ns is None  # it had no last token
    assert steps_of(make_record(4)) is None
    assert not EngineAccount().steps


def test_row_of_a_phase_adds_up_its_causes_and_names_the_largest_of_the_rest() -> None:
    causes_ns = {
        Cause.ALONE: 10,
        Cause.NEIGHBOUR_DECODES: 1,
        Cause.NEIGHBOUR_PROMPTS: 2,
        Cause.NEIGHBOUR_MEDIA: 3,
        Cause.MACHINE: 50,
        Cause.HOST: 4,
        Cause.UNEXPLAINED: 30,
    }
    assert phase_row("decode", 100, causes_ns) == ["decode", 100, 10, 16, 66, "unexplained"]


def test_row_of_a_phase_without_causes_has_no_sums() -> None:
    assert phase_row("decode", 100, {}) == ["decode", 100]


def test_row_of_a_phase_has_the_time_of_the_machine_where_the_rest_is_not_known_yet() -> None:
    causes_ns = {Cause.MACHINE: 40, Cause.HOST: 10, Cause.NOT_KNOWN_YET: 50}
    assert phase_row("decode", 100, causes_ns) == ["decode", 100, 0, 0, 40, "not_known_yet"]
