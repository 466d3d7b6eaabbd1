"""Tests the shutdown of a server: it refuses new requests at once, and cuts off those that run for too long.

Server and engine are real; the tests permit the steps. `test_cli_live.py` lets a request finish.
"""

import json
import logging
import signal

import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.facts.record import Outcome
from tests.engine.doubles import ScriptedRunner, make_engine
from tests.routes.doubles import FakeTelemetry
from tests.world.serving import Place


def test_a_signal_takes_effect_before_the_server_stops_listening(place: Place) -> None:
    engine = make_engine(runtime=place.world)
    app = create_app(Config("demo"), engine, FakeTelemetry(place.world), runtime=place.world)
    with place.server(app) as server:
        server.handle_exit(signal.SIGTERM, None)
        assert not engine.is_ready


def test_a_second_signal_cuts_off_what_runs_with_an_error(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    runner = ScriptedRunner(gated=True)
    telemetry = FakeTelemetry(place.world)
    engine = make_engine(runner, runtime=place.world)
    app = create_app(Config("demo"), engine, telemetry, runtime=place.world)
    body = {"prompt": "Hi", "stream": True, "max_tokens": 100}
    runner.permit(1)
    with (
        place.server(app, ServerOptions(drain_timeout_seconds=60)) as server,
        place.plain(server.url) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(lines)
        for _ in range(2):
            server.handle_exit(signal.SIGTERM, None)
        *_, error, done = lines
        runner.permit(100)
        record = telemetry.next_record()
        server.wait_for_end()
    assert json.loads(error)["error"]["message"] == "The server is shutting down. Please try again."
    assert (done, record.outcome, record.error_type) == ("[DONE]", Outcome.FAILED, "Unavailable")
    assert "Shut down. Requests finished: 0, cut off: 1" in caplog.messages
    assert not any(line.exc_info for line in caplog.records)
