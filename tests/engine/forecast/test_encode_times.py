"""The expected time to encode media is the recent median per media row, and it delays the forecast first token."""

from dataclasses import replace
from typing import Any

import pytest

from oaiserve.engine.forecast.encode_times import LAST, EncodeTimes
from oaiserve.engine.forecast.forecaster import Asked, Ended, Forecaster
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.times import RequestTimes
from tests.engine.accounts.lab import Lab


def test_the_median_for_a_row_counts_and_a_request_that_waited_for_others_counts_from_their_end() -> None:
    times = EncodeTimes()
    assert times.expected_ns(100) == 0
    times.learn(10, 0, 1000)  # 100 for a row
    times.learn(10, 0, 3000)  # the others before it: 200
    times.learn(0, 0, 3500)  # all in the cache
    times.learn(10, 3400, 6500)  # 300
    assert times.expected_ns(7) == 7 * 200
    for number in range(LAST):
        times.learn(1, 10_000 * number + 10_000, 10_000 * number + 10_050)
    assert times.expected_ns(7) == 7 * 50


@pytest.fixture(scope="module")
def lab() -> Any:
    lab = Lab()
    with lab.engine:
        lab.learn()
    return lab


def test_a_request_with_media_begins_later_by_their_time_and_that_of_others_before_them(lab: Lab) -> None:
    engine = lab.engine
    numbers = EngineNumbers()
    loop = engine._loop
    cost = engine.step_cost
    scheduler = loop._scheduler
    step_time = loop._scheduler.step_time.copy()
    forecaster = Forecaster(scheduler, step_time, lambda: cost, lambda: numbers, lambda: (None, 0))
    text = Asked("t", "", "chat", None, [[1] * 40], 10, True, False, 1, "", received_ns=0)

    def raw_ns(media_rows: int, times: RequestTimes = RequestTimes()) -> float:  # noqa: B008 - nobody changes it
        """Return the forecast of a request's first token, and let it end with these stamps."""
        forecaster.forecast(text._replace(media_rows=media_rows), 0)
        forecaster.ended.append(Ended("t", times))
        return forecaster._open["t"].raw[0][1]

    plain_ns = raw_ns(0)
    stamps = RequestTimes(received=0, tokenized=0, media_encoded=200 * 10**7, has_media=True)
    assert raw_ns(200, stamps) == plain_ns  # nothing was known of encoding
    assert raw_ns(0) == plain_ns
    alone_ns = raw_ns(100)
    assert alone_ns == pytest.approx(100 * 10**7 + plain_ns, rel=0.02)
    numbers = replace(numbers, num_waiting_media_rows=300)
    assert raw_ns(100) - alone_ns == pytest.approx(300 * 10**7)
    assert raw_ns(0) == plain_ns
