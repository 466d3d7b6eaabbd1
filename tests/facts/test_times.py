"""The phases of a request are contiguous, wherever the request ended."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.facts.times import PHASES, STAMPS, RequestTimes


@st.composite
def ended_times(draw: st.DrawFn) -> RequestTimes:
    """Draw the stamps of a request that ended in any phase, with phases of any length from 0 on."""
    num_phases = draw(st.integers(1, len(PHASES)))
    gaps = draw(st.lists(st.integers(0, 10**15), min_size=num_phases + 1, max_size=num_phases + 1))
    *reached, responded = accumulate(gaps)
    return RequestTimes(**dict(zip(STAMPS, reached, strict=False)), responded=responded)


@given(ended_times())
def test_phases_are_contiguous_in_order_and_add_up_to_the_duration_exactly(times: RequestTimes) -> None:
    phases = times.phases()
    assert [phase.name for phase in phases] == list(PHASES[: len(phases)])
    assert all(left.end_ns == right.start_ns for left, right in pairwise(phases))
    assert (phases[0].start_ns, phases[-1].end_ns) == (times.received, times.responded)
    assert sum(phase.duration_ns for phase in phases) == times.duration_ns
    before_first = None if times.first_token is None else sum(phase.duration_ns for phase in phases[:5])
    assert times.time_to_first_token_ns == before_first


def test_a_request_that_ended_early_ends_the_phase_it_was_in() -> None:
    times = RequestTimes(received=10, submitted=20, tokenize_started=50, responded=90)
    assert [(phase.name, phase.duration_ns) for phase in times.phases()] == [
        ("receive", 10),
        ("tokenize_wait", 30),
        ("tokenize", 40),
    ]


def test_time_per_output_token_spreads_decode_over_the_tokens_after_the_first() -> None:
    times = RequestTimes(first_token=100, last_token=400)
    assert times.time_per_output_token_ns(4) == 100
    assert times.time_per_output_token_ns(1) == 300
    assert RequestTimes(first_token=100).time_per_output_token_ns(4) is None


def test_phases_of_a_request_that_has_not_ended_are_an_error() -> None:
    with pytest.raises(ValueError, match="has ended"):
        RequestTimes(received=1).phases()
    with pytest.raises(ValueError, match="has ended"):
        _ = RequestTimes(received=1).duration_ns
