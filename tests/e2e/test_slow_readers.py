"""A client that does not read holds little memory, for a limited time, and holds up nobody.

A real server around the real engine; buffers are small, so that little is enough to fill them.
"""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse, IncompleteRead
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, Deliver, Event, Request
from oaiserve.record import Outcome
from oaiserve.routes.respond import PIECE_BYTES
from tests.e2e.raw_client import SMALL_BUFFER_BYTES, enter
from tests.engine.doubles import TIMEOUT_SECONDS, ScriptedRunner, make_engine
from tests.routes.conftest import RunningServer, running_server
from tests.routes.doubles import FakeTelemetry

NUM_TOKENS = 8000  # with logprobs far more than the buffers hold, though ready tokens share an event
WRITE_TIMEOUT_SECONDS = 0.05


class WatchedEngine(Engine):
    """Tells when it has handed over the terminal event of a request."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def submit(self, request: Request, deliver: Deliver) -> None:
        def watched(events: list[Event]) -> None:
            deliver(events)
            if isinstance(events[-1], TERMINAL):
                self.done.put(request.request_id)

        super().submit(request, watched)


@dataclass
class House:
    url: str
    server: RunningServer
    app: Starlette
    engine: WatchedEngine
    telemetry: FakeTelemetry

    def enter(self, **fields: Any) -> socket.socket:
        """Sends a request and reads nothing."""
        default = {"prompt": "Hi", "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 1}
        return enter(self.url, **default | fields)

    def wait_until_the_engine_is_done(self) -> None:
        self.engine.done.get(timeout=TIMEOUT_SECONDS)

    def wait_until_writing_pauses(self) -> None:
        while not any(connection.flow.write_paused for connection in list(self.server.server_state.connections)):
            time.sleep(0.001)


@contextmanager
def house(**options: Any) -> Iterator[House]:
    engine: WatchedEngine = make_engine(ScriptedRunner(), kind=WatchedEngine, kv_blocks=5000)
    telemetry = FakeTelemetry()
    app = create_app(Config("demo"), engine, telemetry)
    with running_server(app, ServerOptions(**{"drain_timeout_seconds": 5, **options}), SMALL_BUFFER_BYTES) as (
        url,
        server,
    ):
        yield House(url, server, app, engine, telemetry)


def body_of(client: socket.socket) -> bytes:
    """Raises where it does not come to its end."""
    response = HTTPResponse(client)
    response.begin()
    return response.read()


def text_of(body: bytes) -> str:
    """What the events of a stream add up to."""
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")]
    chunks = [msgspec.json.decode(event) for event in events if event.startswith(b"{")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


CUT = (IncompleteRead, ConnectionResetError)


@pytest.mark.parametrize("stream", [True, False])
def test_one_that_reads_nothing_is_cut(stream: bool) -> None:
    with house(write_timeout_seconds=WRITE_TIMEOUT_SECONDS) as at, at.enter(stream=stream) as client:
        record = at.telemetry.next_record()
        assert (record.outcome, record.error_type, record.http_status) == (Outcome.CANCELLED, "WriteTimeout", 200)
        assert not at.server.server_state.connections
        assert len(at.app.state.serving.streams) == 0
        with pytest.raises(CUT):
            body_of(client)


def test_the_engine_stops_working_for_one_that_was_cut() -> None:
    with (
        house(write_timeout_seconds=WRITE_TIMEOUT_SECONDS) as at,
        at.enter(stream=True, max_tokens=15_000),
    ):
        record = at.telemetry.next_record()
        assert record.error_type == "WriteTimeout"
        assert record.completion_tokens < 15_000


def test_others_go_on_meanwhile() -> None:
    with house(write_timeout_seconds=0) as at, at.enter(stream=True):
        body = {"prompt": "Hi", "max_tokens": 5, "stream": True}
        for _ in range(3):
            answer = httpx.post(f"{at.url}/v1/completions", json=body, timeout=TIMEOUT_SECONDS)
            assert text_of(answer.content) == "abcde"
            assert at.telemetry.next_record().outcome is Outcome.FINISHED


def test_one_that_reads_late_gets_everything_in_few_events() -> None:
    with house(write_timeout_seconds=0) as at, at.enter(stream=True) as client:
        at.wait_until_the_engine_is_done()
        at.wait_until_writing_pauses()
        (connection,) = at.server.server_state.connections
        assert 0 < connection.transport.get_write_buffer_size() <= PIECE_BYTES + 100
        body = body_of(client)
        assert text_of(body) == ("abcdefghijklmnopqrstuvwxyz" * NUM_TOKENS)[:NUM_TOKENS]
        assert body.count(b"data: ") < NUM_TOKENS / 2
        assert at.telemetry.next_record().outcome is Outcome.FINISHED


def test_one_that_falls_too_far_behind_is_told_so() -> None:
    with house(write_timeout_seconds=0) as at:
        at.app.state.serving.streams._max_unread_tokens = 100
        with at.enter(stream=True) as client:
            at.wait_until_the_engine_is_done()
            assert b"fallen too far behind" in body_of(client)
        record = at.telemetry.next_record()
        assert (record.outcome, record.error_type) == (Outcome.CANCELLED, "SlowReader")
        assert 100 < record.completion_tokens < NUM_TOKENS


def test_one_that_leaves_the_end_unread_is_cut_too() -> None:
    """It is over for the routes, but its last bytes wait in the connection."""
    with house(write_timeout_seconds=WRITE_TIMEOUT_SECONDS) as at, at.enter(max_tokens=2000) as client:
        assert at.telemetry.next_record().outcome is Outcome.FINISHED
        while at.server.server_state.connections:
            time.sleep(0.001)
        with pytest.raises(CUT):
            body_of(client)


@pytest.mark.parametrize("stream", [True, False])
def test_one_that_reads_nothing_does_not_hold_up_the_end(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with house(write_timeout_seconds=0, drain_timeout_seconds=0) as at, at.enter(stream=stream):
        at.wait_until_writing_pauses()
        at.server.should_exit = True
        record = at.telemetry.next_record()
        assert at.server.has_ended.wait(TIMEOUT_SECONDS)
    assert (record.outcome, record.error_type) == (Outcome.CANCELLED, "Unavailable")
    assert not any(line.exc_info for line in caplog.records)
