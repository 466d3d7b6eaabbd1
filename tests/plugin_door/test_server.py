"""What plug-ins add to a server, and what happens if they fail."""

import asyncio
import logging

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.event_streams import LoopStreams
from oaiserve.errors import StartupError
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.metric import Metric
from oaiserve.facts.record import RequestRecord
from oaiserve.http.keys import KeySource
from oaiserve.plugin import Plugin, Server
from oaiserve.plugin.parts import InnerParts
from oaiserve.plugin_loading import streams_of
from oaiserve.telemetry import Measured, Telemetry
from tests.records import record_at
from tests.routes.doubles import FakeEngine, FakeTelemetry
from tests.serving import run_server
from tests.telemetry.reported import plugin_metrics
from tests.world.loop import World
from tests.world.serving import Place

RAISED = [ValueError, SystemExit, GeneratorExit, KeyboardInterrupt, asyncio.CancelledError]


def length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(Server(request.app).max_model_len))


def broken_routes(config: Config) -> list[BaseRoute]:
    raise ValueError("no routes")


def test_a_route_of_a_plugin_reaches_the_engine_and_needs_a_key(place: Place) -> None:
    plugin = Plugin(name="length", routes=lambda config: [Route("/v1/length", length)])
    config = Config("demo", ServerOptions(api_key=("secret",)))
    app = create_app(config, FakeEngine(), FakeTelemetry(), plugins=[plugin], runtime=place.world)  # type: ignore[arg-type]
    with place.running(app) as url, place.plain(url) as http:
        refused = http.get("/v1/length")
        answered = http.get("/v1/length", headers={"authorization": "Bearer secret"})
    assert refused.status_code == 401
    assert answered.text == str(FakeEngine().max_model_len)


@pytest.mark.parametrize("path", ["/health", "/v1/length"])
def test_a_route_with_a_path_that_is_taken_stops_the_start(path: str) -> None:
    plugins = [Plugin(name=name, routes=lambda config: [Route(path, length)]) for name in ("first", "second")]
    with pytest.raises(StartupError, match=f"has the route '{path}', which there is already"):
        create_app(Config("demo"), FakeEngine(), FakeTelemetry(), plugins=plugins)  # type: ignore[arg-type]


class Lifespan:
    def __init__(self, events: list[str], *, fails_at: str = "") -> None:
        self.events = events
        self.fails_at = fails_at

    async def __aenter__(self) -> None:
        self._reach("begin")

    async def __aexit__(self, *error: object) -> None:
        self._reach("end")

    def _reach(self, event: str) -> None:
        self.events.append(event)
        if event == self.fails_at:
            raise ValueError(event)


@pytest.mark.parametrize(
    ("fails_at", "events", "logged"),
    [
        ("", ["begin", "end"], []),
        ("begin", ["begin"], ["Plug-in 'clock' could not start, and the server goes on without it"]),
        ("end", ["begin", "end"], ["Plug-in 'clock' failed while the server stopped"]),
    ],
)
def test_a_lifespan_that_fails_is_named_in_the_log_and_the_server_goes_on(
    place: Place, fails_at: str, events: list[str], logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    reached: list[str] = []
    plugin = Plugin(name="clock", lifespan=lambda app: Lifespan(reached, fails_at=fails_at))
    app = create_app(Config("demo"), FakeEngine(), FakeTelemetry(), plugins=[plugin], runtime=place.world)  # type: ignore[arg-type]
    with place.running(app) as url, place.plain(url) as http:
        assert http.get("/health").status_code == 200
        assert reached == ["begin"]
    assert reached == events
    assert [line.getMessage() for line in caplog.records if line.levelno == logging.ERROR] == logged


class LocksOptions:
    needs_key = True


def no_keys(config: Config) -> KeySource:
    raise ValueError("no keys")


def test_a_plugin_that_requires_keys_and_cannot_bring_them_stops_the_start() -> None:
    plugin = Plugin(name="locks", options={"Locks": LocksOptions}, keys=no_keys)
    config = Config("demo", of_plugins=(LocksOptions(),))
    with pytest.raises(StartupError, match="Clients need an API key, but no plug-in brought the keys"):
        create_app(config, FakeEngine(), FakeTelemetry(), plugins=[plugin])  # type: ignore[arg-type]


def test_routes_that_cannot_be_made_are_named_in_the_log_and_those_of_other_plugins_answer(
    place: Place,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugins = [
        Plugin(name="broken", routes=broken_routes),
        Plugin(name="length", routes=lambda config: [Route("/v1/length", length)]),
    ]
    app = create_app(Config("demo"), FakeEngine(), FakeTelemetry(), plugins=plugins, runtime=place.world)  # type: ignore[arg-type]
    with place.running(app) as url, place.plain(url) as http:
        assert http.get("/v1/length").status_code == 200
    assert "Plug-in 'broken' could not make its routes, and has none" in caplog.messages


class NamedStreams(LoopStreams):
    """Streams of a plug-in."""


def broken_streams(config: Config) -> None:
    raise ValueError("no streams")


def test_streams_that_cannot_be_made_are_named_in_the_log_and_those_of_another_plugin_are_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugins = [
        Plugin(name="broken", inner=InnerParts(streams=broken_streams)),
        Plugin(name="none", inner=InnerParts(streams=lambda config: None)),
        Plugin(name="named", inner=InnerParts(streams=lambda config: NamedStreams)),
    ]
    assert streams_of(plugins, Config("demo")) is NamedStreams
    assert "Plug-in 'broken' could not make its streams, and has none" in caplog.messages


def test_two_plugins_with_streams_stop_the_start() -> None:
    plugins = [Plugin(name=name, inner=InnerParts(streams=lambda config: NamedStreams)) for name in ("first", "second")]
    with pytest.raises(StartupError, match="'first' and 'second' both bring streams of requests. Turn one off"):
        streams_of(plugins, Config("demo"))


@pytest.mark.parametrize("error", RAISED)
def test_an_observer_gets_the_record_of_each_ended_request_and_one_that_fails_is_named_and_counted(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    observed: list[RequestRecord] = []

    def fail(record: RequestRecord) -> None:
        raise error

    telemetry = Telemetry(
        Measured("demo", "1", EngineNumbers),
        recent_requests=4,
        observers={"broken": fail, "ledger": observed.append},
        environ={},
        runtime=World(0),
    )
    record = record_at(0, 1)
    telemetry.record(record)
    assert telemetry.close(5)
    assert observed == [record]
    assert any(message.startswith("Telemetry consumer 'plugin broken' failed") for message in caplog.messages)
    assert b'oaiserve_telemetry_errors_total{consumer="plugin broken"} 1.0' in telemetry.render(None)[0]


@pytest.mark.parametrize("error", RAISED)
def test_a_metric_that_raises_is_missing_from_the_page_and_named_in_the_log_once(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry(Measured("demo", "1", EngineNumbers), recent_requests=4, environ={}, runtime=World(0))

    def fail() -> dict[tuple[str, ...], int]:
        raise error

    telemetry.show(Metric("evil_number", "gauge", "A number that can't be read."), fail)
    telemetry.show(Metric("good_number", "gauge", "Another number."), lambda: {(): 7})
    for _ in range(2):
        page = telemetry.render(None)[0]
        assert b"good_number 7.0" in page
        assert b"\nevil_number" not in page
    assert telemetry.close(5)
    assert caplog.messages == ["The metric evil_number has no numbers, because reading them failed"]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_route_that_raises_anything_fails_its_request_alone(error: type[BaseException], is_async: bool) -> None:
    def fail(request: Request) -> PlainTextResponse:
        raise error

    async def fail_at_once(request: Request) -> PlainTextResponse:
        raise error

    evil = Route("/evil", fail_at_once if is_async else fail)
    plugin = Plugin(name="evil", routes=lambda config: [evil, Route("/length", length)])
    app = create_app(Config("demo"), FakeEngine(), FakeTelemetry(), plugins=[plugin])  # type: ignore[arg-type]
    with run_server(app) as url:  # A thread makes a call that is no coroutine function.
        answer = httpx.get(f"{url}/evil")
        assert answer.status_code == 500
        assert answer.json()["error"]["message"].startswith("The server failed on this request. Its log says why")
        assert httpx.get(f"{url}/length").text == str(FakeEngine().max_model_len)


def test_the_plugins_of_oaiserve_show_their_metrics(place: Place) -> None:
    telemetry = FakeTelemetry()

    app = create_app(Config("demo"), FakeEngine(), telemetry, runtime=place.world)  # type: ignore[arg-type]
    with place.running(app):
        numbers = {name: read() for name, read in telemetry.shown.items()}

    assert numbers.keys() | telemetry.histograms.keys() == {metric.name for metric in plugin_metrics()}
