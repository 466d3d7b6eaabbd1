"""The machines of the world, each with one process: real apps, routes, engines and gateway. Doubles are the model, the
threads and the disk."""

import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from oaiserve import app as app_module
from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.event_streams import LoopStream
from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.facts.record import RequestRecord
from oaiserve.http.connection import Connection
from oaiserve.http.connections import Connections
from oaiserve.plugin_loading import own_plugins
from oaiserve.plugins.gateway import upstream
from oaiserve.plugins.gateway.address import Address
from oaiserve.plugins.gateway.app import create_gateway
from oaiserve.plugins.gateway.options import RouteOptions
from oaiserve.plugins.gateway.watch import Pace
from oaiserve.plugins.responses import with_store
from oaiserve.plugins.responses.store import ResponseDatabase
from oaiserve.plugins.shared.store_options import StoreLimits
from tests.databases import opened_databases
from tests.engine.doubles import EOS, TOKENIZER, make_engine
from tests.routes.doubles import FakeTelemetry
from tests.world.loop import Process, State, World, on_one_thread
from tests.world.model import Model
from tests.world.network import Network
from tests.world.runtime import WorldExecutor
from tests.world.servers import MACHINE, WorldEngine, WorldServer

PORT = 8000
GATEWAY_IP = "10.0.9.1"
GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
POISON = b"poison"  # a query at which each server fails
PACE = Pace(report_seconds=10.0, resolve_seconds=60.0)
_GRAMMARS = Grammars(TOKENIZER.backend, vocab_size=TOKENIZER.vocab_size, eos_token_ids=frozenset([EOS]))


def _takes_no_row(action: int, *_: object) -> int:
    return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_INSERT else sqlite3.SQLITE_OK


class Disk(WorldExecutor):
    """The thread and the disk of a store: writes take time, and fail when it is full."""

    connection: sqlite3.Connection

    def __init__(self, world: World) -> None:
        super().__init__(world, "response-store")
        self.seconds = 0.002
        self.is_full = False
        self.after_write: Callable[[], None] | None = None  # called once, before anybody knows that it is written

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        return super().submit(self._write, call, *given, **named)

    def _write(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._world.sleep(self.seconds)
        connection = self.connection
        if call == connection.close:
            return call()
        connection.set_authorizer(_takes_no_row if self.is_full else None)
        before = connection.total_changes
        result = call(*given, **named)
        if self.after_write is not None and connection.total_changes > before:
            after_write = self.after_write
            self.after_write = None
            after_write()
        return result


class Machine:
    """The runtime of a server: the world, with a disk of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.disk = Disk(world)

    def executor(self, name: str) -> WorldExecutor:
        return self.disk if name == "response-store" else self._world.executor(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


class Telemetry(FakeTelemetry):
    """Checks each account when it comes."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__()
        self._world = world
        self._name = name
        self.num_records = 0

    def record(self, record: RequestRecord) -> None:
        self.num_records += 1
        phases = record.times.phases()
        causes = record.causes_ns
        if sum(phase.duration_ns for phase in phases) != record.times.duration_ns:
            self._world.blame(f"the phases of an account of {self._name} do not add up: {phases}")
        if any(phase.duration_ns < 0 for phase in phases) or any(
            ns < 0 for row in causes.values() for ns in row.values()
        ):
            self._world.blame(f"an account of {self._name} has a time below 0: {phases} {causes}")
        for phase in phases:
            if phase.name in causes and sum(causes[phase.name].values()) != phase.duration_ns:
                self._world.blame(f"the causes of {phase.name} do not add up")
        if record.outcome == "failed" and record.error_type not in (
            "InternalError",
            "PlannedError",
            "StoreFailed",
            "Unavailable",
        ):
            self._world.blame(f"a request failed with {record.error_type}")


class Host:
    """A machine with one process that serves: `make` returns its app and what learns of its shutdown."""

    def __init__(self, world: World, network: Network, name: str, ip: str, options: ServerOptions) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.ip = ip
        self.options = options
        self.process: Process | None = None
        self.server: Any = None
        self.num_begun = 0  # requests of generation routes
        self.num_starts = 0

    def start(self) -> None:
        self.world.note("start", self.name)
        self.num_begun = 0
        self.num_starts += 1
        self.network.switch_on(self.ip)
        self.process = Process(self.world, self.name, self.ip)
        self.process.run(self._serve)

    async def _serve(self) -> None:
        app, on_drain, failure = self.make()
        connections = Connections(1000, 0, self.world.clock_ns)

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["path"] in GENERATES:
                self.num_begun += 1
                self.asked(scope)
            await app(scope, receive, send)

        server = self.server = WorldServer(counted, self.options, connections, on_drain=on_drain, failure=failure)
        await server.serve_in(self.network, self.process, (self.ip, PORT))
        self.kill("kill")

    def asked(self, scope: Any) -> None:
        pass

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.state is State.RUNNING

    def terminate(self) -> None:
        if self.process is not None and self.process.state is not State.DEAD:
            self.world.note("terminate", self.name)
            self.server.handle_exit(15, None)
            self.network.listeners.pop((self.ip, PORT), None)

    def kill(self, how: str) -> None:
        if self.process is not None and self.process.state is not State.DEAD:
            self.world.note("kill", self.name, how)
            self.network.kill(self.process, how)
            self.process.die()


class Replica(Host):
    """A machine with an oaiserve server."""

    def __init__(
        self, world: World, network: Network, number: int, store: Path | None, reports: bool, **options: Any
    ) -> None:
        ip = f"10.0.0.{number}"
        host = "127.0.0.1" if reports else "0.0.0.0"
        served = ServerOptions(drain_timeout_seconds=1, trusted_proxy=(GATEWAY_IP,), host=host, allowed_host=(ip,))
        super().__init__(world, network, f"server {number}", ip, served)
        self._path = store
        self._options = options
        self.fails = False  # each POST of a generation route, at once

    def make(self) -> Any:
        world = self.world
        size = 16
        self.model = Model(world, size, world.random.uniform(0.02, 0.06))
        options = {"kv_blocks": 48, "max_running": 6, "max_step_tokens": 64, "max_waiting": 24, **self._options}
        self.engine = make_engine(
            self.model,
            kind=WorldEngine,
            runtime=world,
            machine=MACHINE,
            block_size=size,
            max_model_len=512,
            grammars=_GRAMMARS,
            tokenize_workers=0,
            drafts="off",
            watchdog_seconds=8,
            **options,
        )
        self.fails = False
        runtime: Any = Machine(world)
        self.disk = runtime.disk
        with opened_databases() as connections:
            store = ResponseDatabase(self._path, StoreLimits(1000, 2**24, 1e7), runtime)
        self.disk.connection = connections[str(self._path or ":memory:")][0]
        self.telemetry = Telemetry(world, self.name)
        parts = [part for part in own_plugins() if part.name != "responses"]
        self.app = create_app(
            Config("m", self.options),
            self.engine,
            self.telemetry,
            plugins=[*parts, with_store(lambda config, runtime: store)],
            runtime=runtime,
        )

        async def app(scope: Any, receive: Any, send: Any) -> None:
            is_asked = scope["type"] == "http" and scope["path"] in GENERATES
            if is_asked and (self.fails or scope["query_string"] == POISON):
                await send({"type": "http.response.start", "status": 500, "headers": []})
                await send({"type": "http.response.body", "body": b"{}"})
                self.num_begun -= 1
                return
            await self.app(scope, receive, send)

        return app, self.engine.drain, lambda: self.engine.failure

    def asked(self, scope: Any) -> None:
        if not scope["client"][0].startswith("10.1."):
            self.world.blame(f"{self.name} takes {scope['client'][0]} for the client's address")

    def kill(self, how: str) -> None:
        if self.process is not None and self.process.state is not State.DEAD:
            super().kill(how)
            self.engine.worker.end()
            self.engine.loop.is_stopped = True


class GatewayHost(Host):
    """A machine with the gateway."""

    def __init__(self, world: World, network: Network, replicas: list[Replica]) -> None:
        super().__init__(world, network, "gateway", GATEWAY_IP, ServerOptions(drain_timeout_seconds=0, host="0.0.0.0"))
        self._places = [Address(one.ip, PORT, f"{one.ip}:{PORT}") for one in replicas]

    def make(self) -> Any:
        async def resolve(url: str) -> list[Address]:
            return self._places

        options = RouteOptions(replica=("http://servers",), host="0.0.0.0")
        app, self.gateway = create_gateway(options, resolve, PACE, self.world)
        return app, self.gateway.drain, lambda: None

    @property
    def watch(self) -> Any:
        return self.gateway.watch


def put_in_place(patch: pytest.MonkeyPatch) -> None:
    """Make the schema of the API once: it takes as long as ten requests."""
    publish = app_module.published
    published = cache(lambda **named: publish([], **named))
    patch.setattr(app_module, "published", lambda table, **named: published(**named))


@contextmanager
def repeatable(world: World) -> Iterator[None]:
    """Within the block, give a second run the same random numbers and hashes, and let each token come by itself."""
    numbers: dict[int, tuple[object, int]] = {}

    def in_order(self: object) -> int:
        if id(self) not in numbers:
            numbers[id(self)] = (self, len(numbers))  # kept, so that no other object gets its id
        return numbers[id(self)][1]

    with on_one_thread(world) as patch:
        patch.setattr("oaiserve.engine.event_streams.MAX_CHUNK_TOKENS", 0)  # those of a busy reader would come together
        for kind in (upstream.ReplicaConnection, Connection, LoopStream):
            patch.setattr(kind, "__hash__", in_order, raising=False)
        yield
