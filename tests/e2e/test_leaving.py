"""A client may leave in any phase: what it held is free at once, and nothing of it stays behind.

A real server around the real engine; gates in the tokenizer and in the runner hold a request in the phase under test.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.engine.streams import LoopStreams
from oaiserve.record import Outcome, RequestRecord
from tests.engine.doubles import TIMEOUT_SECONDS, BlockedTokenizer, ScriptedRunner, make_engine
from tests.routes.conftest import run_server
from tests.routes.doubles import FakeTelemetry

SMALL_BUFFER_BYTES = 4096
ANSWER = {"prompt": "Hi", "max_tokens": 2000, "temperature": 0}


class WatchedEngine(Engine):
    """Tells when the server has noticed that a client left."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.aborted: queue.SimpleQueue[str] = queue.SimpleQueue()

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self.aborted.put(request_id)


@dataclass
class House:
    """The server, and everything in it that a client can hold on to."""

    url: str
    engine: WatchedEngine
    runner: ScriptedRunner
    tokenizer: BlockedTokenizer
    telemetry: FakeTelemetry
    streams: LoopStreams
    tasks_before: set[asyncio.Task[Any]] = field(default_factory=set)
    threads_before: set[threading.Thread] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    def enter(self, **fields: Any) -> socket.socket:
        """Sends a request and reads nothing."""
        url, body = urlsplit(self.url), msgspec.json.encode(ANSWER | fields)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        sock.settimeout(TIMEOUT_SECONDS)
        sock.connect((url.hostname, url.port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        sock.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        return sock

    def wait_for_step(self) -> None:
        """Until the engine is about to run a step. The events of all steps before it are on their way."""
        self.runner.started.get(timeout=TIMEOUT_SECONDS)

    def run_steps(self, number: int) -> None:
        """Lets the step that is held, and the next ones, pass; then one more is held."""
        self.runner.permit(number)
        for _ in range(number):
            self.wait_for_step()

    def leave(self, sock: socket.socket) -> None:
        """Closes the connection, and waits until the server has told the engine."""
        sock.close()
        while (request_id := self.engine.aborted.get(timeout=TIMEOUT_SECONDS)) in self.left:
            pass  # one that left before, told a second time
        self.left.add(request_id)

    def on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.streams._loop).result(TIMEOUT_SECONDS)

    def record_of_the_one_who_left(self) -> RequestRecord:
        record = self.telemetry.next_record()
        self.tokenizer.release.set()  # the record does not wait for an encode that takes long
        assert record.outcome is Outcome.CANCELLED
        return record

    def check_nothing_is_left(self) -> None:
        assert self.telemetry.records.empty()
        assert len(self.streams) == 0
        assert self.on_loop(unfinished_tasks(self.tasks_before)) == set()
        self.check_engine_is_empty()
        assert set(threading.enumerate()) <= self.threads_before

    def check_engine_is_empty(self) -> None:
        """By a request that comes after: what the engine publishes before its first step is what the others left."""
        probe = threading.Thread(target=self.finish, kwargs={"max_tokens": 1})
        probe.start()
        self.wait_for_step()
        now = self.engine.snapshot()
        assert (now.blocks_used, now.num_running, now.num_waiting, now.num_tokenizing) == (0, 0, 0, 0)
        self.runner.permit(1)
        probe.join(TIMEOUT_SECONDS)
        assert self.telemetry.next_record().outcome is Outcome.FINISHED

    def finish(self, **fields: Any) -> None:
        assert httpx.post(f"{self.url}/v1/completions", json=ANSWER | fields, timeout=TIMEOUT_SECONDS).is_success


async def tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


async def unfinished_tasks(before: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """What came since `before` and does not end by itself."""
    new = await tasks() - before
    return (await asyncio.wait(new, timeout=5))[1] if new else set()


@pytest.fixture
def house() -> Iterator[House]:
    """One request at a time, 16 tokens a step, each step held until it is let pass."""
    runner, tokenizer, telemetry = ScriptedRunner(gated=True), BlockedTokenizer(), FakeTelemetry()
    engine: WatchedEngine = make_engine(runner, tokenizer, kind=WatchedEngine, max_running=1, kv_blocks=1000)
    app = create_app(Config("demo"), engine, telemetry)
    with run_server(app, send_buffer_bytes=SMALL_BUFFER_BYTES) as url:
        house = House(url, engine, runner, tokenizer, telemetry, app.state.serving.streams)
        house.tasks_before, house.threads_before = house.on_loop(tasks()), set(threading.enumerate())
        yield house
        runner.permit(10_000)  # a test that failed half-way must not hang


def leave_while_tokenized(house: House) -> None:
    client = house.enter(prompt="blocked")
    assert house.tokenizer.entered.wait(TIMEOUT_SECONDS)
    house.leave(client)


def leave_while_queued(house: House) -> None:
    """And with it the one that it waited for."""
    first = house.enter()
    house.wait_for_step()
    second = house.enter()
    while house.engine.snapshot().num_waiting == 0:  # until it has come through the tokenizer
        house.run_steps(1)
    house.leave(first)
    house.leave(second)
    house.runner.permit(1)
    assert house.telemetry.next_record().times.phases()[-1].name == "decode"


def leave_while_prefilled(house: House) -> None:
    client = house.enter(prompt="x" * 100)
    house.wait_for_step()
    house.run_steps(2)  # of the seven that the prompt takes
    house.leave(client)
    house.runner.permit(1)


def leave_while_decoded(house: House) -> None:
    client = house.enter()
    house.wait_for_step()
    house.run_steps(5)
    house.leave(client)
    house.runner.permit(1)


def leave_a_stream(house: House) -> None:
    client = house.enter(stream=True)
    house.wait_for_step()
    house.run_steps(5)
    assert client.recv(SMALL_BUFFER_BYTES).startswith(b"HTTP/1.1 200 OK")
    house.leave(client)
    house.runner.permit(1)


def leave_unread(house: House) -> None:
    """After far more than the buffers hold, of which nothing was read."""
    client = house.enter(stream=True)
    house.wait_for_step()
    house.run_steps(1500)
    house.leave(client)
    house.runner.permit(1)


@pytest.mark.parametrize(
    ("leave", "phase"),
    [
        (leave_while_tokenized, "tokenize"),
        (leave_while_queued, "queue"),
        (leave_while_prefilled, "prefill"),
        (leave_while_decoded, "decode"),
        (leave_a_stream, "decode"),
        (leave_unread, "decode"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_client_that_leaves_leaves_nothing_behind(house: House, leave: Callable[[House], None], phase: str) -> None:
    leave(house)
    record = house.record_of_the_one_who_left()
    house.check_nothing_is_left()
    assert record.times.phases()[-1].name == phase
    assert sum(phase.duration_ns for phase in record.times.phases()) == record.times.duration_ns


def test_one_that_leaves_does_not_disturb_the_next(house: House) -> None:
    leave_while_prefilled(house)
    house.record_of_the_one_who_left()
    house.check_nothing_is_left()
    house.runner.permit(10)
    answer = httpx.post(f"{house.url}/v1/completions", json=ANSWER | {"max_tokens": 5})
    assert answer.json()["choices"][0]["text"] == "abcde"
