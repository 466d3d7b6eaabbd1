"""Tests that a client that does not read costs little memory for a limited time, and delays no other request.

Server and engine are real. The socket buffers are small, so that a short answer fills them.
"""

import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPResponse, IncompleteRead
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from oaiserve import app as app_module
from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.event_streams import LoopStreams
from oaiserve.engine.request import TERMINAL, Deliver, Event, Request
from oaiserve.facts.record import Outcome
from oaiserve.routes.answer.respond import PIECE_BYTES
from oaiserve.runtime import THREADS
from tests.e2e.raw_client import SMALL_BUFFER_BYTES, send_request
from tests.engine.doubles import TIMEOUT_SECONDS, ScriptedRunner, make_engine
from tests.routes.doubles import FakeTelemetry
from tests.serving import RunningServer, running_server
from tests.waiting import wait_until

NUM_TOKENS = 8000  # with logprobs far more than the buffers hold, although ready tokens share an event
WRITE_TIMEOUT_SECONDS = 0.05


class WatchedEngine(Engine):
    """An engine that reports in `done` when it has delivered the terminal event of a request."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def submit(self, request: Request, deliver: Deliver) -> None:
        def watched(events: list[Event]) -> None:
            deliver(events)
            if isinstance(events[-1], TERMINAL):
                self.done.put(request.request_id)

        super().submit(request, watched)


@dataclass
class Served:
    url: str
    server: RunningServer
    app: Starlette
    engine: WatchedEngine
    telemetry: FakeTelemetry
    runner: ScriptedRunner

    def send(self, **fields: Any) -> socket.socket:
        """Send a request and return its socket, from which nothing is read."""
        default = {"prompt": "Hi", "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 1}
        return send_request(self.url, **default | fields)

    def wait_until_writing_pauses(self) -> None:
        """Wait for a pause that lasts: on a busy machine, writing may also pause for a moment."""
        num_paused = 0

        def lasts() -> bool:
            nonlocal num_paused
            is_paused = any(connection.flow.write_paused for connection in list(self.server.server_state.connections))
            num_paused = num_paused + 1 if is_paused else 0
            return num_paused >= 50

        wait_until(lasts)  # looks every five milliseconds


@contextmanager
def serve(*, gated: bool = False, **options: Any) -> Iterator[Served]:
    runner = ScriptedRunner(gated=gated)
    engine: WatchedEngine = make_engine(runner, kind=WatchedEngine, kv_blocks=5000, runtime=THREADS)
    telemetry = FakeTelemetry()
    app = create_app(Config("demo"), engine, telemetry)
    with running_server(app, ServerOptions(**{"drain_timeout_seconds": 5, **options}), SMALL_BUFFER_BYTES) as (
        url,
        server,
    ):
        yield Served(url, server, app, engine, telemetry, runner)


def body_of(client: socket.socket) -> bytes:
    """Return the body of the response. Raise one of `CUT` if it is incomplete."""
    response = HTTPResponse(client)
    response.begin()
    return response.read()


def text_of(body: bytes) -> str:
    """Return the text of a stream, joined from its events."""
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")]
    chunks = [msgspec.json.decode(event) for event in events if event.startswith(b"{")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


CUT = (IncompleteRead, ConnectionResetError)


@pytest.mark.parametrize(("stream", "max_tokens"), [(True, 15_000), (False, NUM_TOKENS)])
def test_a_client_that_reads_nothing_is_disconnected(stream: bool, max_tokens: int) -> None:
    with (
        serve(write_timeout_seconds=WRITE_TIMEOUT_SECONDS, gated=True) as served,
        served.send(stream=stream, max_tokens=max_tokens) as client,
    ):
        # However late the loop is with its timer, the engine has not computed all of a stream.
        served.runner.permit(max_tokens // 2 if stream else max_tokens)
        wait_until(lambda: served.runner.permit(1) or not served.telemetry.records.empty())
        record = served.telemetry.next_record()
        assert (record.outcome, record.error_type, record.http_status) == (Outcome.CANCELLED, "WriteTimeout", 200)
        assert record.completion_tokens < max_tokens or not stream  # the engine has stopped computing for it
        assert not served.server.server_state.connections
        assert len(served.app.state.serving.streams) == 0
        with pytest.raises(CUT):
            body_of(client)


def test_a_client_that_reads_late_gets_all_tokens_in_few_events() -> None:
    with serve(write_timeout_seconds=0) as served, served.send(stream=True) as client:
        served.engine.done.get()
        served.wait_until_writing_pauses()
        (connection,) = served.server.server_state.connections
        assert 0 < connection.transport.get_write_buffer_size() <= PIECE_BYTES + 100
        body = body_of(client)
        assert text_of(body) == ("abcdefghijklmnopqrstuvwxyz" * NUM_TOKENS)[:NUM_TOKENS]
        assert body.count(b"data: ") < NUM_TOKENS / 2
        assert served.telemetry.next_record().outcome is Outcome.FINISHED


def test_a_client_that_falls_too_far_behind_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "LoopStreams", partial(LoopStreams, max_unread_tokens=100))
    with serve(write_timeout_seconds=0, gated=True) as served:
        with served.send(stream=True) as client:
            # Tokens that a late loop receives all at once are not the client's fault, so they come slowly.
            wait_until(lambda: served.runner.permit(5) or not served.engine.done.empty())
            assert b"fallen too far behind" in body_of(client)
        record = served.telemetry.next_record()
        assert (record.outcome, record.error_type) == (Outcome.CANCELLED, "SlowReader")
        assert 50 < record.completion_tokens < NUM_TOKENS  # an unread token counts with its alternative, so as two


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_nothing_is_cut_when_all_answers_take_too_much(stream: bool) -> None:
    with serve(write_timeout_seconds=0) as served, served.send(stream=stream) as client:
        held = served.app.state.serving.streams.held
        served.engine.done.get()
        served.wait_until_writing_pauses()
        assert held.number > 0
        held.limit = held.number
        held.stalled_ns = 0
        answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 5}, timeout=30)
        assert answer.json()["choices"][0]["text"] == "abcde"
        records = [served.telemetry.next_record() for _ in range(2)]
        assert {(record.outcome, record.error_type) for record in records} == {
            (Outcome.FINISHED, None),
            (Outcome.CANCELLED, "SlowReader"),
        }
        assert held.number == 0
        with pytest.raises(CUT):
            body_of(client)


def test_an_answer_that_is_too_large_to_wait_for_its_end_is_refused() -> None:
    with serve(write_timeout_seconds=0) as served:
        held = served.app.state.serving.streams.held
        held.limit = 100
        body = {"prompt": "Hi", "max_tokens": 200, "n": 2, "logprobs": 1}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=TIMEOUT_SECONDS)
        assert answer.status_code == 429
        assert "take too much memory" in answer.json()["error"]["message"]
        record = served.telemetry.next_record()
        assert (record.outcome, record.error_type) == (Outcome.REJECTED, "Overloaded")
        assert held.number == 0


def test_a_client_that_leaves_the_end_unread_is_disconnected() -> None:
    """The request has ended for the routes, but its last bytes wait in the connection."""
    with serve(write_timeout_seconds=WRITE_TIMEOUT_SECONDS) as served, served.send(max_tokens=2000) as client:
        assert served.telemetry.next_record().outcome is Outcome.FINISHED
        wait_until(lambda: not served.server.server_state.connections)
        with pytest.raises(CUT):
            body_of(client)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_nothing_does_not_delay_the_shutdown(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(write_timeout_seconds=0, drain_timeout_seconds=0) as served, served.send(stream=stream):
        served.wait_until_writing_pauses()
        served.server.should_exit = True
        record = served.telemetry.next_record()
        assert served.server.has_ended.wait(TIMEOUT_SECONDS)
    assert record.error_type == "Unavailable"
    # It failed if the system took the error after all, and otherwise its client is said to have left.
    assert record.outcome in (Outcome.CANCELLED, Outcome.FAILED)
    assert not any(line.exc_info for line in caplog.records)
