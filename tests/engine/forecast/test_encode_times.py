"""The expected time to encode media is the recent median per media row, and it delays the forecast first token."""

import pytest

from oaiserve.engine.forecast.calibration import ENOUGH
from oaiserve.engine.forecast.encode_times import LAST, EncodeTimes
from oaiserve.engine.forecast.forecaster import Ended
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.times import RequestTimes
from tests.engine.forecast.forecasters import make_forecaster, question


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


def test_a_request_with_media_begins_later_by_their_time_and_that_of_others_before_them() -> None:
    numbers = EngineNumbers()
    forecaster = make_forecaster(lambda: numbers)

    def first_token_ns(media_rows: int, times: RequestTimes = RequestTimes()) -> int:  # noqa: B008 - nobody changes it
        """Return the forecast of a request's first token, and let it end with these stamps."""
        forecast = forecaster.forecast(question("t", media_rows=media_rows), 0)
        forecaster.ended.append(Ended("t", times))
        return forecast.first_token_ns

    for _ in range(ENOUGH):
        first_token_ns(0, RequestTimes(received=0, first_token=30 * 10**6))
    assert first_token_ns(0) == 30 * 10**6
    stamps = RequestTimes(received=0, tokenized=0, media_encoded=200 * 10**7, has_media=True)
    assert first_token_ns(200, stamps) == 30 * 10**6, "nothing was known of encoding"
    assert first_token_ns(0) == 30 * 10**6
    alone_ns = first_token_ns(100)
    assert alone_ns == pytest.approx(100 * 10**7 + 30 * 10**6)
    numbers = EngineNumbers(num_waiting_media_rows=300)
    assert first_token_ns(100) - alone_ns == pytest.approx(300 * 10**7)
    assert first_token_ns(0) == 30 * 10**6
