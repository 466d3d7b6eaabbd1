"""A real server on a free port around the scripted engine: chunks that arrive and clients that leave need a socket."""

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
import uvicorn
from openai import OpenAI
from starlette.applications import Starlette

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from tests.routes.doubles import FakeEngine, FakeTelemetry


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


@contextmanager
def run_server(app: Starlette, drain_timeout_seconds: int = 5, send_buffer_bytes: int | None = None) -> Iterator[str]:
    """Serves `app` from a thread. Gives its URL. A small send buffer makes a client that does not read felt at once."""
    with socket.socket() as sock:
        if send_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        sock.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=drain_timeout_seconds
        )
        server = _Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert server.is_up.wait(10), "the server did not start"
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


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


@pytest.fixture(scope="session")
def serve_session() -> Iterator[Serve]:
    """Servers by their ServerOptions, each started once."""
    with ExitStack() as running:

        @cache
        def start(**options: object) -> Served:
            engine, telemetry = FakeEngine(), FakeTelemetry()
            app = create_app(Config("org/demo", ServerOptions(**options)), engine, telemetry)
            url = running.enter_context(run_server(app))
            return Served(url, engine, telemetry, running.enter_context(httpx.Client(base_url=url, timeout=10)))

        yield start


@pytest.fixture
def serve(serve_session: Serve) -> Serve:
    """Gives the server with these ServerOptions, its engine as new."""

    def fresh(**options: object) -> Served:
        served = serve_session(**options)
        served.engine.reset()
        served.telemetry.records = queue.Queue()
        return served

    return fresh


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve()
