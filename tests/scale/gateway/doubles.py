"""A gateway with replicas, in threads: servers and engines are real, what the models draw is a script."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from oaiserve.app import create_app
from oaiserve.config import Config, RouteOptions, ServerOptions
from oaiserve.engine.engine import Engine
from oaiserve.http.connections import allowed_connections
from oaiserve.http.server import Server
from oaiserve.scale.gateway.app import GatewayApp, create_gateway
from oaiserve.scale.gateway.upstream import Address
from oaiserve.scale.gateway.watch import Pace
from tests.engine.doubles import TIMEOUT_SECONDS, ScriptedRunner, make_engine
from tests.routes.doubles import FakeTelemetry
from tests.waiting import wait_until

QUICK = Pace(report_seconds=0.05, resolve_seconds=0.02)
OPTIONS = ServerOptions(drain_timeout_seconds=0)


class ThreadServer(Server):
    """A server in a thread, which can be killed as a process can: its sockets end, and nobody says a word."""

    def __init__(self, app: Any, **callbacks: Any) -> None:
        super().__init__(app, OPTIONS, allowed_connections(OPTIONS), **callbacks)
        self._is_up = threading.Event()
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._sock.getsockname()[1]
        self._thread = threading.Thread(target=self.run, kwargs={"sockets": [self._sock]})

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # type: ignore[override]
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._is_up.set()

    def __enter__(self) -> ThreadServer:
        self._thread.start()
        assert self._is_up.wait(TIMEOUT_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.should_exit = self.force_exit = True
        self._thread.join(TIMEOUT_SECONDS)
        assert not self._thread.is_alive()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Do nothing at all in the block."""
        may_go_on = threading.Event()
        self._loop.call_soon_threadsafe(may_go_on.wait, TIMEOUT_SECONDS)
        try:
            yield
        finally:
            may_go_on.set()

    def kill(self) -> None:
        self._loop.call_soon_threadsafe(self._kill)

    def _kill(self) -> None:
        while self._listeners:
            self._listeners.pop().close()
        self._sock.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self._loop.call_later(0.01, self._kill)  # one that was being accepted is known only now

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port, f"127.0.0.1:{self.port}")


@dataclass
class Replica:
    """One server, its engine, and the script of its model."""

    server: ThreadServer
    engine: Engine
    runner: ScriptedRunner
    telemetry: FakeTelemetry

    @property
    def name(self) -> str:
        return self.server.address.name


@dataclass
class Fleet:
    """A gateway, the replicas that it is told of, and a client."""

    stack: ExitStack
    replicas: dict[str, Replica] = field(default_factory=dict)
    named: list[Address] = field(default_factory=list)  # what the gateway's name stands for
    made: GatewayApp = field(init=False)
    http: httpx.Client = field(init=False)

    def add(self, *, gated: bool = False, **options: Any) -> Replica:
        """Start a replica, and let the gateway find it."""
        runner = ScriptedRunner(gated=gated)
        engine = make_engine(runner, **{"kv_blocks": 512, "max_step_tokens": 64} | options)
        telemetry = FakeTelemetry()
        app = create_app(Config("m", OPTIONS), engine, telemetry)
        server = self.stack.enter_context(ThreadServer(app, on_drain=engine.drain, failure=lambda: engine.failure))
        replica = Replica(server, engine, runner, telemetry)
        self.replicas[replica.name] = replica
        self.named.append(server.address)
        return replica

    async def resolve(self, url: str) -> Iterable[Address]:
        return list(self.named)

    @property
    def watch(self) -> Any:
        return self.made.gateway._watch

    def wait_until_known(self) -> None:
        """Wait until the gateway has heard of all replicas, and of no others."""
        wait_until(lambda: self.watch.joined - self.watch.silent == {address.name for address in self.named})

    def ask(self, prompt: str = "Hello", **more: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 4, **more.pop("body", {})}
        return self.http.post("/v1/completions", json=body, **more)

    def metric(self, name: str, **labels: str) -> float:
        return self.made.gateway._metrics._registry.get_sample_value(name, labels) or 0.0


@contextmanager
def fleet(number: int = 4, *, pace: Pace = QUICK, **options: Any) -> Iterator[Fleet]:
    """Run a gateway in front of so many replicas, with these options of their engines."""
    with ExitStack() as stack:
        fleet = Fleet(stack)
        for _ in range(number):
            fleet.add(**options)
        given = RouteOptions(replica=("http://replicas",), body_limit=20_000)
        fleet.made = create_gateway(given, fleet.resolve, pace)
        gateway = stack.enter_context(ThreadServer(fleet.made.app, on_drain=fleet.made.gateway.drain))
        url = f"http://127.0.0.1:{gateway.port}"
        fleet.http = stack.enter_context(httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS))
        try:
            fleet.wait_until_known()
            yield fleet
        finally:
            for replica in fleet.replicas.values():
                if replica.runner.is_gated:
                    replica.runner.permit(10_000)
