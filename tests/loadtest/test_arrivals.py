import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.arrivals import Arrivals, schedule
from loadtest.errors import UsageError

RANDOM = [
    {"arrival": "poisson", "rate": 5.0},
    {"arrival": "ramp", "rate": 1.0, "ramp_to": 9.0, "ramp_seconds": 40.0},
]


@pytest.mark.parametrize("options", RANDOM, ids=lambda options: options["arrival"])
@given(seed=st.integers(0, 2**32), count=st.integers(1, 300))
def test_a_seed_determines_the_schedule_and_its_times_ascend(options: dict[str, Any], seed: int, count: int) -> None:
    offsets = schedule(Arrivals(**options), count, seed)
    assert offsets == schedule(Arrivals(**options), count, seed)
    assert offsets == sorted(offsets)
    assert len(offsets) <= count
    assert offsets[0] >= 0
    assert offsets != schedule(Arrivals(**options), count, seed + 1)


def test_poisson_arrivals_have_the_requested_rate() -> None:
    offsets = schedule(Arrivals(arrival="poisson", rate=50), 20_000, seed=1)
    gaps = [b - a for a, b in zip([0.0, *offsets], offsets, strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(1, rel=0.05)


def test_a_ramp_reaches_its_rate_and_stays_there() -> None:
    offsets = schedule(Arrivals(arrival="ramp", rate=2, ramp_to=18, ramp_seconds=100), 4000, seed=0)

    def rate(low: float, high: float) -> float:
        return sum(low <= offset < high for offset in offsets) / (high - low)

    assert rate(0, 20) == pytest.approx(2 + 16 * 0.1, rel=0.25)
    assert rate(80, 100) == pytest.approx(2 + 16 * 0.9, rel=0.25)
    assert rate(100, 200) == pytest.approx(18, rel=0.1)


def test_schedules_without_chance_have_the_given_times_or_equal_gaps() -> None:
    assert schedule(Arrivals(arrival="constant", rate=4), 5, seed=0) == [0, 0.25, 0.5, 0.75, 1.0]
    assert schedule(Arrivals(arrival="constant", rate=2, duration_seconds=1), 9, seed=0) == [0, 0.5, 1.0]
    assert schedule(Arrivals(arrival="at-once"), 3, seed=0) == [0, 0, 0]
    assert schedule(Arrivals(arrival="trace"), 2, seed=0, timestamps=[7.0, 5.0, 9.0]) == [0, 2]
    with pytest.raises(UsageError, match="timestamp"):
        schedule(Arrivals(arrival="trace"), 2, seed=0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"arrival": "poisson"}, "--arrival poisson needs a --rate"),
        ({"rate": 2.0}, "--rate has no meaning with --arrival closed"),
        ({"arrival": "poisson", "rate": 0.0}, "--rate is 0, but must be more than 0"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"duration_seconds": -1.0}, "--duration-seconds is -1, but must be more than 0"),
        ({"arrival": "ramp", "rate": 1.0}, "needs --ramp-to"),
    ],
)
def test_options_without_a_valid_schedule_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Arrivals(**options)
