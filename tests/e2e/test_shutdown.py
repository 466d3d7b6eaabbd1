"""Tests the shutdown of a server: it refuses new requests at once, and cuts off those that run for too long.

Server and engine are real; the tests permit the steps. `test_cli_live.py` lets a request finish.
"""

import json
import logging
import signal

import httpx
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.facts.record import Outcome
from oaiserve.runtime import THREADS
from tests.engine.doubles import TIMEOUT_SECONDS, ScriptedRunner, make_engine
from tests.routes.doubles import FakeTelemetry
from tests.serving import running_server


def test_a_signal_takes_effect_before_the_server_stops_listening() -> None:
    engine = make_engine(runtime=THREADS)
    with running_server(create_app(Config("demo"), engine, FakeTelemetry())) as (_, server):
        server.handle_exit(signal.SIGTERM, None)
        assert not engine.is_ready


def test_a_second_signal_cuts_off_what_runs_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    runner = ScriptedRunner(gated=True)
    telemetry = FakeTelemetry()
    app = create_app(Config("demo"), make_engine(runner, runtime=THREADS), telemetry)
    body = {"prompt": "Hi", "stream": True, "max_tokens": 100}
    runner.permit(1)
    with (
        running_server(app, ServerOptions(drain_timeout_seconds=60)) as (url, server),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_SECONDS) as answer,
    ):
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(lines)
        for _ in range(2):
            server.handle_exit(signal.SIGTERM, None)
        *_, error, done = lines
        runner.permit(100)
        record = telemetry.next_record()
        assert server.has_ended.wait(TIMEOUT_SECONDS)
    assert json.loads(error)["error"]["message"] == "The server is shutting down. Please try again."
    assert (done, record.outcome, record.error_type) == ("[DONE]", Outcome.FAILED, "Unavailable")
    assert "Shut down. Requests finished: 0, cut off: 1" in caplog.messages
    assert not any(line.exc_info for line in caplog.records)
