"""Runs a real server around the scripted engine, on a free port: arriving chunks and leaving clients need a socket."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from starlette.applications import Starlette

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.http.connections import allowed_connections
from oaiserve.http.refusals import Refusals
from oaiserve.http.server import Server
from oaiserve.runtime import THREADS
from tests.published import checked
from tests.routes.doubles import FakeEngine, FakeTelemetry, FakeTemplate, Script
from tests.waiting import wait_until


class RunningServer(Server):
    """A server that runs in a thread. `is_up` is set once it listens, and `should_exit` ends it as a signal would.

    With a small send buffer, a client that does not read blocks the server at once.
    """

    def __init__(
        self,
        app: Starlette,
        options: ServerOptions,
        send_buffer_bytes: int | None = None,
        **callbacks: Any,
    ) -> None:
        connections = allowed_connections(options, THREADS.clock_ns)
        # All tests have one address: on this clock, each refusal comes long after the one before.
        connections.refusals = Refusals(count(step=10**9).__next__)
        super().__init__(app, options, connections, **callbacks)
        self.is_up, self.is_ending, self.has_ended = (threading.Event() for _ in range(3))
        self._sock = socket.socket()
        if send_buffer_bytes is not None:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        self._sock.bind(("127.0.0.1", 0))
        self._sock.listen()
        self.port: int = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.run, kwargs={"sockets": [self._sock]})

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.is_ending.set()
        await super().shutdown(sockets)
        self.has_ended.set()

    def __enter__(self) -> RunningServer:
        self._thread.start()
        assert self.is_up.wait(60), "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not end"

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Do nothing at all in the block."""
        may_go_on = threading.Event()
        self.loop.call_soon_threadsafe(may_go_on.wait, 60)
        try:
            yield
        finally:
            may_go_on.set()

    def kill(self) -> None:
        """End as a process that is killed: the sockets end, and nobody says a word. Afterwards, nothing is sent."""
        has_died = threading.Event()

        def die() -> None:
            self.die()
            has_died.set()

        self.loop.call_soon_threadsafe(die)
        assert has_died.wait(60), "the server's loop is stuck"

    def die(self) -> None:
        """As `kill`, from the server's own thread."""
        while self._listeners:
            self._listeners.pop().close()
        self._sock.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self.loop.call_later(0.01, self.die)  # one that was being accepted is known only now


@contextmanager
def running_server(
    app: Starlette, options: ServerOptions | None = None, send_buffer_bytes: int | None = None
) -> Iterator[tuple[str, RunningServer]]:
    """Serve the API's app from a thread."""
    with RunningServer(
        app,
        options or ServerOptions(drain_timeout_seconds=5),
        send_buffer_bytes,
        on_drain=lambda: app.state.serving.engine.drain(),
        failure=lambda: app.state.serving.engine.failure,
    ) as server:
        yield server.url, server


@contextmanager
def run_server(app: Starlette, options: ServerOptions | None = None) -> Iterator[str]:
    """Serve `app` as `running_server` does, and return only the URL."""
    with running_server(app, options) as (url, _):
        yield url


@dataclass
class Served:
    url: str
    engine: FakeEngine
    telemetry: FakeTelemetry
    http: httpx.Client
    open_requests: Mapping[str, object] = field(default_factory=dict)

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, **body: object) -> httpx.Response:
        return self.post("/v1/completions", **{"prompt": "Hi", **body})

    def chat(self, **body: object) -> httpx.Response:
        return self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "Hi"}], **body})

    def client(self) -> httpx.Client:
        """Return a client of its own, which does not check the answers."""
        return httpx.Client(base_url=self.url, timeout=60)

    def connect(self) -> Any:
        """Return a socket that is connected to the server."""
        url = httpx.URL(self.url)
        return socket.create_connection((url.host, url.port or 0), timeout=60)

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait_until(condition)

    def sdk(self, key: str = "any") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def anthropic(self, key: str = "any") -> Anthropic:
        return Anthropic(base_url=self.url, api_key=key, max_retries=0)


Serve = Callable[..., Served]


def client_of(url: str) -> httpx.Client:
    """Return a client that checks the answers, and that any number of threads may share.

    By default httpx keeps 20 idle connections. With more, it may close one that another thread is about to send on.
    """
    return checked(httpx.Client(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)))


@contextmanager
def serving(config: Config) -> Iterator[Served]:
    """Serve an app with these settings, which only one test uses."""
    engine = FakeEngine()
    telemetry = FakeTelemetry()
    with (
        run_server(create_app(config, engine, telemetry), config.server) as url,
        client_of(url) as http,
    ):
        yield Served(url, engine, telemetry, http)


@pytest.fixture(scope="session")
def serve_session() -> Iterator[Serve]:
    """Return a function that starts one server for each chat template and set of settings."""
    with ExitStack() as running:
        servers: list[RunningServer] = []

        @cache
        def start(
            template: str | None = None,
            of_plugins: tuple[object, ...] = (),
            model: str = "org/demo",
            **options: object,
        ) -> Served:
            chat_template = None if template is None else FakeTemplate(template)
            engine = FakeEngine(chat_template)
            telemetry = FakeTelemetry()
            server_options = ServerOptions(**{"drain_timeout_seconds": 5, **options})
            app = create_app(Config(model, server_options, of_plugins=of_plugins), engine, telemetry)
            url, server = running.enter_context(running_server(app, server_options))
            servers.append(server)
            http = running.enter_context(client_of(url))
            return Served(url, engine, telemetry, http, app.state.serving.exchanges)

        yield start
        for server in servers:  # They notice it within 0.1 s: all at once, instead of one after another.
            server.should_exit = True


def fresh(start: Serve) -> Serve:
    """Return a function that gives the server with these ServerOptions, with its engine reset, or with a script."""

    def serve(script: Script | None = None, **options: object) -> Served:
        served = start(**options)
        # A request is open until its record is written, which may be after its client has read the whole answer. The
        # records and aborts of earlier tests must not reach this one.
        served.wait_until(lambda: not served.open_requests)
        served.engine.reset()
        served.engine.script = script or served.engine.script
        served.telemetry.reset()
        return served

    return serve


@pytest.fixture
def serve(serve_session: Serve) -> Serve:
    return fresh(serve_session)


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve()


@pytest.fixture
def served_on_a_port() -> Iterator[Served]:
    """A server for a client that opens its own socket."""
    with serving(Config("org/demo")) as served:
        yield served
