"""Tests the shutdown of a server: it refuses new requests, drains, cuts off the rest, and logs that.

The server also shuts down when its engine fails. Server and engine are real; the tests permit the steps or make them
fail.
"""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest
from starlette.applications import Starlette

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.engine import Engine
from oaiserve.facts.record import Outcome
from tests.engine.doubles import TIMEOUT_SECONDS, ScriptedRunner, make_engine
from tests.routes.conftest import RunningServer, running_server
from tests.routes.doubles import FakeTelemetry


@dataclass
class Served:
    server: RunningServer
    app: Starlette
    engine: Engine
    runner: ScriptedRunner
    telemetry: FakeTelemetry
    http: httpx.Client

    def stream(self, max_tokens: int = 100) -> Iterator[str]:
        """Send a request and yield the events of its stream."""
        body = {"prompt": "Hi", "stream": True, "max_tokens": max_tokens}
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            yield from (line.removeprefix("data: ") for line in answer.iter_lines() if line)

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)


@contextmanager
def serve(runner: ScriptedRunner, drain_timeout_seconds: int = 60) -> Iterator[Served]:
    engine, telemetry = make_engine(runner), FakeTelemetry()
    app = create_app(Config("demo"), engine, telemetry)
    options = ServerOptions(drain_timeout_seconds=drain_timeout_seconds)
    with running_server(app, options) as (url, server), httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as http:
        yield Served(server, app, engine, runner, telemetry, http)
        assert server.has_ended.wait(TIMEOUT_SECONDS)


def test_a_signal_takes_effect_before_the_server_stops_listening() -> None:
    with serve(ScriptedRunner()) as served:
        served.signal()
        assert not served.engine.is_ready


def test_running_requests_may_finish_after_a_signal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oaiserve.http.server")
    with serve(ScriptedRunner(gated=True)) as served:
        served.runner.permit(1)
        events = served.stream(max_tokens=5)
        first = next(events)
        served.signal()
        assert served.server.is_ending.wait(TIMEOUT_SECONDS)
        served.runner.permit(4)
        *chunks, done = (first, *events)
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
    assert ("".join(texts), done) == ("abcde", "[DONE]")
    assert "Shutting down. Requests running: 1, given 60 s" in caplog.messages
    assert "Shutting down. Requests finished: 1, cut off: 0" in caplog.messages


@pytest.mark.parametrize(("drain_timeout_seconds", "num_signals"), [(0, 1), (60, 2)])
def test_requests_that_run_for_too_long_are_cut_off_with_an_error(
    drain_timeout_seconds: int, num_signals: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A request runs for too long if it exceeds the drain timeout, or if a second signal arrives."""
    caplog.set_level(logging.INFO)
    with serve(ScriptedRunner(gated=True), drain_timeout_seconds) as served:
        served.runner.permit(1)
        events = served.stream()
        next(events)
        for _ in range(num_signals):
            served.signal()
        *_, error, done = events
        served.runner.permit(100)
        record = served.telemetry.next_record()
    assert json.loads(error)["error"]["message"] == "The server is shutting down. Please try again."
    assert (done, record.outcome, record.error_type) == ("[DONE]", Outcome.FAILED, "Unavailable")
    assert "Shutting down. Requests finished: 0, cut off: 1" in caplog.messages
    assert not any(line.exc_info for line in caplog.records)
