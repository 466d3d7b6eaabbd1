"""Serves apps in a world: server and client share one thread, and time passes only while the test waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from starlette.applications import Starlette

from oaiserve.app import create_app
from oaiserve.config import Config, EngineOptions, ServerOptions
from oaiserve.http.connections import allowed_connections
from oaiserve.http.refusals import Refusals
from oaiserve.plugin import Plugin
from tests import waiting
from tests.engine.doubles import make_engine
from tests.published import checked
from tests.routes.doubles import FakeEngine, FakeTelemetry, FakeTemplate
from tests.serving import Serve, Served, fresh, served  # noqa: F401 - a fixture
from tests.world.client import WorldSocket, client_of_sdk, transport
from tests.world.loop import MOMENT_SECONDS, MOST_WAIT_SECONDS, Process, World, on_one_thread
from tests.world.network import Network
from tests.world.runtime import Beside
from tests.world.servers import WorldServer

IP = "127.0.0.1"
DAY_SECONDS = 86_400
PATIENCE_SECONDS = 120.0  # of the world's clients: longer than any time limit of the product that tests wait for


class Place:
    """A world with one machine, on which servers and their client run."""

    def __init__(self) -> None:
        self.world = World(int(os.environ.get("SEED", "0")))
        self.network = Network(self.world)
        self._ports = count(8000)
        self.client = Process(self.world, "client", IP)

    def client_of(self, url: str) -> httpx.Client:
        """Return a client that checks the answers."""
        return checked(
            httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, transport=transport(self.world, self.client))
        )

    def connect(self, url: str) -> WorldSocket:
        return WorldSocket(self.world, self.client, IP, httpx.URL(url).port or 0, PATIENCE_SECONDS)

    def plain(self, url: str) -> httpx.Client:
        """Return a client that does not check the answers."""
        return httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, transport=transport(self.world, self.client))

    def sdk_of(self, url: str, key: str = "any") -> OpenAI:
        http = client_of_sdk(openai, self.world, self.client)
        return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http)

    def anthropic_of(self, url: str, key: str = "any") -> Anthropic:
        http = client_of_sdk(anthropic, self.world, self.client)
        return Anthropic(base_url=url, api_key=key, max_retries=0, http_client=http)

    def threads(self) -> Beside:
        return Beside(self.world)

    def server(self, app: Starlette, options: ServerOptions | None = None) -> PlacedServer:
        """Return a server of the API's app, which runs in a `with` block."""
        return PlacedServer(
            self,
            app,
            options or ServerOptions(drain_timeout_seconds=5),
            on_drain=lambda: app.state.serving.engine.drain(),
            failure=lambda: app.state.serving.engine.failure,
        )

    @contextmanager
    def running(self, app: Starlette, options: ServerOptions | None = None) -> Iterator[str]:
        """Serve the API's app, and return its URL."""
        with self.server(app, options) as server:
            yield server.url

    def new_port(self) -> int:
        return next(self._ports)


class PlacedServer(WorldServer):
    """A server of this world. `should_exit` ends it as a signal would. `serving` is its task."""

    def __init__(self, place: Place, app: Starlette, options: ServerOptions, **callbacks: Any) -> None:
        connections = allowed_connections(options, place.world.clock_ns)
        # All tests have one address: on this clock, each refusal comes long after the one before.
        connections.refusals = Refusals(count(step=10**9).__next__)
        super().__init__(app, options, connections, **callbacks)
        self._place = place
        self.port = place.new_port()
        self.url = f"http://{IP}:{self.port}"
        self.process = Process(place.world, f"server {self.port}", IP)
        self._address = (IP, self.port)

    def begin(self) -> None:
        self.serving = self.process.run(self.serve_in, self._place.network, self.process, self._address)

    def __enter__(self) -> PlacedServer:
        self.begin()
        self._place.world.wait_for(lambda: self.is_up.is_set() or self.serving.done())
        if self.serving.done():
            self.serving.result()
        return self

    def __exit__(self, *_: object) -> None:
        self.should_exit = True
        self.wait_for_end()

    def wait_for_end(self) -> None:
        self._place.world.wait_for(self.serving.done)
        self.serving.result()

    def connect(self) -> WorldSocket:
        return self._place.connect(self.url)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Do nothing at all in the block."""
        self.process.stop()
        try:
            yield
        finally:
            self.process.go_on()

    def kill(self) -> None:
        """End as a process that is killed: the sockets end, and nobody says a word. Afterwards, nothing is sent."""
        self._place.network.kill(self.process, "kill")

    die = kill


@dataclass
class WorldServed(Served):
    """A server of the world."""

    place: Place = field(kw_only=True)
    app: Any = field(kw_only=True, default=None)

    def client(self) -> httpx.Client:
        return self.place.plain(self.url)

    def sdk(self, key: str = "any") -> OpenAI:
        return self.place.sdk_of(self.url, key)

    def anthropic(self, key: str = "any") -> Anthropic:
        return self.place.anthropic_of(self.url, key)

    def connect(self) -> WorldSocket:
        return self.place.connect(self.url)

    def wait_until(self, condition: Callable[[], object]) -> None:
        self.place.world.wait_for(condition)

    def settle(self, seconds: float = MOMENT_SECONDS) -> None:
        """Let happen what can happen now, or within some seconds."""
        self.place.world.settle(seconds)


@contextmanager
def serving(place: Place, config: Config, plugins: list[Plugin] | None = None) -> Iterator[WorldServed]:
    """Serve an app with these settings, which only one test uses."""
    engine = FakeEngine(runtime=place.world)
    telemetry = FakeTelemetry(place.world)
    app = create_app(config, engine, telemetry, plugins=plugins, runtime=place.world)
    with place.running(app, config.server) as url, place.client_of(url) as http:
        yield WorldServed(url, engine, telemetry, http, app.state.serving.exchanges, place=place, app=app)


@contextmanager
def reading(place: Place, **options: Any) -> Iterator[WorldServed]:
    """Serve an engine that schedules and caches as any does, with blocks of 4 tokens, and draws letters."""
    engine_options = EngineOptions(block_size=4, prefix_cache=options.get("prefix_cache", True))
    config = Config("org/demo", ServerOptions(drain_timeout_seconds=0), engine_options)
    engine = make_engine(runtime=place.world, **{"kv_blocks": 512, "max_step_tokens": 512} | options)
    telemetry = FakeTelemetry(place.world)
    app = create_app(config, engine, telemetry, runtime=place.world)
    with place.running(app, config.server) as url, place.client_of(url) as http:
        yield WorldServed(url, engine, telemetry, http, place=place)


@pytest.fixture(scope="session")
def place_session() -> Place:
    return Place()


def seconds_until_midnight(world: World) -> float:
    return DAY_SECONDS - world.unix_ns() / 1e9 % DAY_SECONDS


@contextmanager
def staying(place: Place, name: str = "") -> Iterator[None]:
    """Within the block, a test that waits lets time pass in the world. What is random in it follows from the name.

    What is counted by days would begin again at midnight, so a test begins after it if it could last until then.
    """
    world = place.world
    if (left_seconds := seconds_until_midnight(world)) < MOST_WAIT_SECONDS:
        with on_one_thread(world):
            world.settle(left_seconds)
    world.random.seed(f"{world.seed} {name}")
    with on_one_thread(world) as patch:
        patch.setattr(waiting, "rest", world.settle)
        yield
        world.settle()
    wrong = world.wrong
    world.wrong = []
    assert not wrong, wrong


@pytest.fixture
def place(place_session: Place, request: pytest.FixtureRequest) -> Iterator[Place]:
    """The world of the test's servers."""
    with staying(place_session, request.node.nodeid):
        yield place_session


@pytest.fixture(scope="module")
def place_of_module(place_session: Place, request: pytest.FixtureRequest) -> Iterator[Place]:
    """The world of servers that the tests of a file share."""
    with staying(place_session, request.node.nodeid):
        yield place_session


@pytest.fixture(scope="session")
def serve_session(place_session: Place) -> Iterator[Serve]:
    """Return a function that starts one server for each chat template and set of settings."""
    place = place_session
    with ExitStack() as running:

        @cache
        def start(
            template: str | None = None,
            of_plugins: tuple[object, ...] = (),
            model: str = "org/demo",
            **options: object,
        ) -> WorldServed:
            chat_template = None if template is None else FakeTemplate(template)
            engine = FakeEngine(chat_template, runtime=place.world)
            telemetry = FakeTelemetry(place.world)
            server_options = ServerOptions(**{"drain_timeout_seconds": 5, **options})
            config = Config(model, server_options, of_plugins=of_plugins)
            app = create_app(config, engine, telemetry, runtime=place.world)
            url = running.enter_context(place.running(app, server_options))
            http = running.enter_context(place.client_of(url))
            return WorldServed(url, engine, telemetry, http, app.state.serving.exchanges, place=place)

        yield start


@pytest.fixture
def serve(serve_session: Serve, place: Place) -> Serve:
    return fresh(serve_session)
