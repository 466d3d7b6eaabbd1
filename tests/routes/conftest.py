"""Runs a real server around the scripted engine, on a free port: arriving chunks and leaving clients need a socket."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache

import httpx
import pytest
from openai import OpenAI
from starlette.applications import Starlette

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.http.connections import allowed_connections
from oaiserve.http.server import Server
from tests.published import checked
from tests.routes.doubles import FakeEngine, FakeTelemetry, FakeTemplate


class RunningServer(Server):
    """A server that runs in a thread. `is_up` is set once it listens, and `should_exit` ends it as a signal would."""

    def __init__(self, app: Starlette, options: ServerOptions) -> None:
        super().__init__(
            app,
            options,
            allowed_connections(options),
            on_drain=lambda: app.state.serving.engine.drain(),
            failure=lambda: app.state.serving.engine.failure,
        )
        self.is_up = threading.Event()
        self.is_ending, self.has_ended = threading.Event(), threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.is_ending.set()
        await super().shutdown(sockets)
        self.has_ended.set()


@contextmanager
def running_server(
    app: Starlette, options: ServerOptions | None = None, send_buffer_bytes: int | None = None
) -> Iterator[tuple[str, RunningServer]]:
    """Serve `app` from a thread. With a small send buffer, a client that does not read blocks the server at once."""
    with socket.socket() as sock:
        if send_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        server = RunningServer(app, options or ServerOptions(drain_timeout_seconds=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert server.is_up.wait(60), "the server did not start"
            yield f"http://127.0.0.1:{port}", server
        finally:
            server.should_exit = True
            thread.join(60)


@contextmanager
def run_server(
    app: Starlette, options: ServerOptions | None = None, send_buffer_bytes: int | None = None
) -> Iterator[str]:
    """Serve `app` as `running_server` does, and return only the URL."""
    with running_server(app, options, send_buffer_bytes) as (url, _):
        yield url


@dataclass
class Served:
    url: str
    engine: FakeEngine
    telemetry: FakeTelemetry
    http: httpx.Client

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, **body: object) -> httpx.Response:
        return self.post("/v1/completions", **{"prompt": "Hi", **body})

    def chat(self, **body: object) -> httpx.Response:
        return self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "Hi"}], **body})

    def sdk(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)


Serve = Callable[..., Served]


@contextmanager
def serving(config: Config) -> Iterator[Served]:
    """Serve an app with these settings, which only one test uses."""
    engine, telemetry = FakeEngine(), FakeTelemetry()
    with (
        run_server(create_app(config, engine, telemetry), config.server) as url,
        checked(httpx.Client(base_url=url, timeout=60)) as http,
    ):
        yield Served(url, engine, telemetry, http)


@pytest.fixture(scope="session")
def serve_session() -> Iterator[Serve]:
    """Return a function that starts one server for each chat template and set of ServerOptions."""
    with ExitStack() as running:

        @cache
        def start(template: str | None = None, takes_system: bool = True, **options: object) -> Served:
            chat_template = None if template is None else FakeTemplate(template, takes_system=takes_system)
            engine, telemetry = FakeEngine(chat_template), FakeTelemetry()
            server_options = ServerOptions(**{"drain_timeout_seconds": 5, **options})
            app = create_app(Config("org/demo", server_options), engine, telemetry)
            url = running.enter_context(run_server(app, server_options))
            return Served(
                url, engine, telemetry, running.enter_context(checked(httpx.Client(base_url=url, timeout=60)))
            )

        yield start


@pytest.fixture
def serve(serve_session: Serve) -> Serve:
    """Return a function that gives the server with these ServerOptions, with its engine reset."""

    def fresh(**options: object) -> Served:
        served = serve_session(**options)
        served.engine.reset()
        served.telemetry.records = queue.Queue()
        served.telemetry.sampled_traces.clear()
        return served

    return fresh


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve()
