"""A forecast tells how probable it is that a deadline is missed."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.facts.forecast import NO_FORECAST, Forecast
from oaiserve.facts.times import RequestTimes

QUARTER = Forecast(True, 50, 100, 400, 1000, 2000, 3000)


@pytest.mark.parametrize(("limit_ns", "probability"), [(0, 1.0), (50, 0.95), (100, 0.5), (400, 0.05)])
def test_a_forecast_has_the_probabilities_of_its_interval_and_its_median(limit_ns: int, probability: float) -> None:
    assert QUARTER.first_token_after(limit_ns) == pytest.approx(probability)
    assert QUARTER.end_after(20 * limit_ns if limit_ns == 100 else 0) == pytest.approx(0.5 if limit_ns == 100 else 1)


@given(st.lists(st.integers(1, 10**12), min_size=3, max_size=3), st.integers(1, 10**13), st.integers(0, 10**12))
def test_a_later_deadline_is_never_missed_more_probably(times: list[int], limit_ns: int, more_ns: int) -> None:
    forecast = Forecast(True, *sorted(times), *sorted(times))
    sooner = forecast.end_after(limit_ns)
    later = forecast.end_after(limit_ns + more_ns)
    assert 0 <= later <= sooner <= 1


@given(st.lists(st.integers(1, 10**13), min_size=6, max_size=6))
def test_no_forecast_promises_its_end_before_its_first_token(times: list[int]) -> None:
    forecast = Forecast(True, *times)
    shown = forecast.shown()
    header = [float(number) for number in re.findall(r"=([\d.]+)", forecast.in_header())]
    in_header = header[1], header[0], header[2], header[4], header[3], header[5]
    for first_low, first, first_high, end_low, end, end_high in (
        forecast.intervals_ns,
        [shown[f"{time}{bound}_ns"] for time in ("first_token", "end") for bound in ("_low", "", "_high")],
        in_header,
    ):
        assert first_low <= first <= first_high
        assert end_low <= end <= end_high
        assert (first_low <= end_low) & (first <= end) & (first_high <= end_high)
    ordered = Forecast(True, *sorted(times))
    assert ordered.intervals_ns == (*sorted(times),)  # one that is in order is not changed


def test_a_promise_is_compared_with_what_came_as_far_as_it_came() -> None:
    held = [dict(QUARTER.held(RequestTimes(received=1000, first_token=1000 + after))) for after in (49, 50, 400, 401)]
    assert [one["first_token"] for one in held] == ["earlier", "within", "within", "later"]
    assert not any("end" in one for one in held)
    assert dict(QUARTER.held(RequestTimes(received=0, first_token=60, last_token=3001)))["end"] == "later"
    assert not [*NO_FORECAST.held(RequestTimes(received=0, first_token=60))]


def test_without_a_known_length_only_the_first_token_is_promised() -> None:
    forecast = Forecast(True, 50, 100, 400)
    assert not forecast.has_end
    assert forecast.intervals_ns == (50, 100, 400)
    assert forecast.end_after(10) is None
    assert not any(name.startswith("end") for name in forecast.shown())
    assert "end" not in forecast.in_header()
    assert [name for name, _ in forecast.held(RequestTimes(received=0, first_token=60, last_token=3001))] == [
        "first_token"
    ]


def test_nothing_is_promised_before_forecasts_are_calibrated() -> None:
    assert not NO_FORECAST.is_calibrated
    assert NO_FORECAST.first_token_after(1) is NO_FORECAST.end_after(1) is None
