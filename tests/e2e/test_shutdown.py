"""The end of a server: it refuses, lets run, cuts off, and says so. It ends by itself when its engine broke.

A real server around the real engine, whose steps the tests let pass or fail.
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
from oaiserve.engine.step import ChunkResult, Step
from oaiserve.record import Outcome
from tests.engine.doubles import TIMEOUT_SECONDS, ScriptedRunner, make_engine
from tests.routes.conftest import RunningServer, running_server
from tests.routes.doubles import FakeTelemetry


class BreakingRunner(ScriptedRunner):
    """Raises in its third step."""

    def run(self, step: Step) -> list[ChunkResult]:
        if len(self.steps) == 2:
            raise RuntimeError("the device is gone")
        return super().run(step)


@dataclass
class House:
    server: RunningServer
    app: Starlette
    engine: Engine
    runner: ScriptedRunner
    telemetry: FakeTelemetry
    http: httpx.Client

    def stream(self, max_tokens: int = 100) -> Iterator[str]:
        """The events of a stream, from the first token on."""
        body = {"prompt": "Hi", "stream": True, "max_tokens": max_tokens}
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            yield from (line.removeprefix("data: ") for line in answer.iter_lines() if line)

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)


@contextmanager
def house(runner: ScriptedRunner, drain_timeout_seconds: int = 60) -> Iterator[House]:
    engine, telemetry = make_engine(runner), FakeTelemetry()
    app = create_app(Config("demo"), engine, telemetry)
    options = ServerOptions(drain_timeout_seconds=drain_timeout_seconds)
    with (
        running_server(app, options) as (url, server),
        httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as http,
    ):
        yield House(server, app, engine, runner, telemetry, http)
        assert server.has_ended.wait(TIMEOUT_SECONDS)


def test_once_the_end_has_begun_open_connections_get_503() -> None:
    with house(ScriptedRunner()) as at:
        assert at.http.get("/ready").status_code == 200
        at.engine.drain()
        assert at.http.get("/ready").status_code == 503
        assert at.http.get("/health").status_code == 200
        refused = at.http.post("/v1/completions", json={"prompt": "Hi"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert at.telemetry.next_record().outcome is Outcome.REJECTED
        at.signal()


def test_a_signal_takes_effect_before_the_server_stops_listening() -> None:
    with house(ScriptedRunner()) as at:
        at.signal()
        assert not at.engine.is_ready


def test_what_runs_may_finish(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oaiserve.server")
    with house(ScriptedRunner(gated=True)) as at:
        at.runner.permit(1)
        events = at.stream(max_tokens=5)
        first = next(events)
        at.signal()
        assert at.server.is_ending.wait(TIMEOUT_SECONDS)
        at.runner.permit(4)
        *chunks, done = (first, *events)
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
    assert ("".join(texts), done) == ("abcde", "[DONE]")
    assert "Shutting down. Requests running: 1, given 60 s" in caplog.messages
    assert "Shutting down. Requests finished: 1, cut off: 0" in caplog.messages


@pytest.mark.parametrize(("drain_timeout_seconds", "num_signals"), [(0, 1), (60, 2)])
def test_what_runs_for_too_long_is_cut_and_told_so(
    drain_timeout_seconds: int, num_signals: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Too long: longer than it may, or than somebody who sends a second signal likes."""
    caplog.set_level(logging.INFO)
    with house(ScriptedRunner(gated=True), drain_timeout_seconds) as at:
        at.runner.permit(1)
        events = at.stream()
        next(events)
        for _ in range(num_signals):
            at.signal()
        *_, error, done = events
        at.runner.permit(100)
        record = at.telemetry.next_record()
    assert json.loads(error)["error"]["message"] == "The server is shutting down. Please try again."
    assert (done, record.outcome, record.error_type) == ("[DONE]", Outcome.FAILED, "Unavailable")
    assert "Shutting down. Requests finished: 0, cut off: 1" in caplog.messages
    assert not any(line.exc_info for line in caplog.records)


@pytest.mark.parametrize("stream", [True, False])
def test_a_server_whose_engine_broke_answers_and_ends_by_itself(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with house(BreakingRunner()) as at:
        answer = at.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 9, "stream": stream})
        assert "The engine has stopped after an internal error" in answer.text
        assert answer.status_code == (200 if stream else 500)
        assert at.telemetry.next_record().outcome is Outcome.FAILED
        assert at.server.has_ended.wait(TIMEOUT_SECONDS)
        assert isinstance(at.engine.failure, RuntimeError)
    assert "The engine has stopped (RuntimeError: the device is gone), so the server ends" in caplog.messages
