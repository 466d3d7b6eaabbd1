"""The forecast of a request is in a header, and in the first chunk of its stream."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest

from oaiserve.config import Config, EngineOptions
from oaiserve.engine.request import Event, PromptDone, Request
from oaiserve.facts.forecast import FORECAST_HEADER, Forecast
from tests.routes.asking import CHAT, HI, stream_of
from tests.routes.conftest import Served, serving
from tests.routes.doubles import says

TOLD = Forecast(True, 10_000_000, 20_000_000, 40_000_000, 100_000_000, 300_000_000, 900_000_000)
IN_HEADER = "first_token;dur=20.0;low=10.0;high=40.0, end;dur=300.0;low=100.0;high=900.0"


def forecast(request: Request, told: Forecast = TOLD) -> Iterable[list[Event]]:
    for events in says("Hello", " world")(request):
        yield [replace(event, forecast=told) if isinstance(event, PromptDone) else event for event in events]


@pytest.mark.parametrize("route", [CHAT, "/v1/completions"])
def test_the_first_chunk_of_a_stream_and_a_header_have_the_forecast(served: Served, route: str) -> None:
    served.engine.script = forecast
    first, *others = stream_of(served, route)
    assert first["oaiserve"]["forecast"] == {
        "first_token_low_ms": 10.0,
        "first_token_ms": 20.0,
        "first_token_high_ms": 40.0,
        "end_low_ms": 100.0,
        "end_ms": 300.0,
        "end_high_ms": 900.0,
    }
    assert first["choices"]
    assert not any("oaiserve" in chunk for chunk in others)
    whole = served.post(route, **({"messages": HI} if route == CHAT else {"prompt": "Hi"}))
    assert whole.headers[FORECAST_HEADER] == IN_HEADER


def test_an_answer_of_unknown_length_has_a_forecast_of_its_first_token_alone(served: Served) -> None:
    served.engine.script = partial(forecast, told=Forecast(True, 10_000_000, 20_000_000, 40_000_000))
    first = stream_of(served, CHAT)[0]
    assert first["oaiserve"]["forecast"] == {
        "first_token_low_ms": 10.0,
        "first_token_ms": 20.0,
        "first_token_high_ms": 40.0,
    }
    assert served.post(CHAT, messages=HI).headers[FORECAST_HEADER] == "first_token;dur=20.0;low=10.0;high=40.0"


def test_a_server_that_does_not_know_enough_says_so_and_one_without_forecasts_says_nothing(served: Served) -> None:
    answer = served.post(CHAT, messages=HI)
    assert answer.headers[FORECAST_HEADER] == "calibrating"
    assert "oaiserve" not in stream_of(served, CHAT)[0]
    with serving(Config("org/demo", engine=EngineOptions(explain=False))) as without:
        assert FORECAST_HEADER not in without.post(CHAT, messages=HI).headers
