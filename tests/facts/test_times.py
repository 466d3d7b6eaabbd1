"""The phases of a request, where it ended early or has not ended. `tests/e2e/test_delays.py` has all others."""

import pytest

from oaiserve.facts.times import RequestTimes, WallClock, duration


def test_a_request_that_ended_early_ends_the_phase_it_was_in() -> None:
    times = RequestTimes(received=10, submitted=20, tokenize_started=50, responded=90)
    assert [(phase.name, phase.duration_ns) for phase in times.phases()] == [
        ("receive", 10),
        ("tokenize_wait", 30),
        ("tokenize", 40),
    ]


def test_only_a_request_with_images_or_sounds_has_the_phase_that_encodes_them_also_if_it_ends_there() -> None:
    stamps = {"received": 10, "submitted": 20, "tokenize_started": 50, "tokenized": 60}
    text = RequestTimes(**stamps, scheduled=75, responded=90)
    assert [phase.name for phase in text.phases()] == ["receive", "tokenize_wait", "tokenize", "queue", "prefill"]
    left = RequestTimes(**stamps, responded=90, has_media=True)
    assert left.phases()[3:] == [("encode_media", 60, 90)]
    whole = RequestTimes(**stamps, media_encoded=70, scheduled=75, responded=90, has_media=True)
    assert whole.phases()[3:] == [("encode_media", 60, 70), ("queue", 70, 75), ("prefill", 75, 90)]
    assert [phase.end_ns for phase in whole.phases()[:-1]] == [phase.start_ns for phase in whole.phases()[1:]]


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


def test_wall_clock_follows_a_step_of_the_clock_and_a_sleep_of_the_machine_but_no_slow_reading() -> None:
    wall_ns = [50 * 10**9]
    clock_ns = [10**9]
    offset_ns = WallClock(lambda: wall_ns[0], lambda: clock_ns[0])
    assert offset_ns() == 49 * 10**9
    wall_ns[0] += WallClock.LEAST_STEP_NS - 1
    assert offset_ns() == 49 * 10**9
    wall_ns[0] = 8 * 3600 * 10**9  # The monotonic clock stands still while the machine sleeps.
    assert offset_ns() == wall_ns[0] - clock_ns[0]
    wall_ns[0] = 20 * 10**9  # It was set back.
    assert offset_ns() == 19 * 10**9


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (0, "0"),
        (50, "0.05 µs"),
        (999_400, "999 µs"),
        (999_600, "1 ms"),
        (24_316_000, "24.3 ms"),
        (1_308_000_000, "1.31 s"),
        (999.6e9, "16.7 min"),
        (60_000e9, "1000 min"),
    ],
)
def test_times_for_people_have_three_significant_digits(ns: float, shown: str) -> None:
    assert duration(ns) == shown
