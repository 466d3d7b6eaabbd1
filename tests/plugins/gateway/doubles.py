"""A gateway with replicas, in a world or in threads: servers and engines are real, what models draw is a script.

`RawReplica` has neither: it sends bytes.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Step
from oaiserve.plugins.gateway.address import Address
from oaiserve.plugins.gateway.app import create_gateway
from oaiserve.plugins.gateway.gateway import Gateway
from oaiserve.plugins.gateway.options import ContinueStreams, RouteOptions
from oaiserve.plugins.gateway.watch import Pace
from oaiserve.runtime import THREADS
from tests.engine.doubles import TIMEOUT_SECONDS, ScriptedRunner, make_engine, next_letter
from tests.routes.doubles import FakeTelemetry
from tests.serving import RunningServer
from tests.waiting import wait_until
from tests.world.client import WorldSocket
from tests.world.loop import Process, World
from tests.world.network import End
from tests.world.runtime import WorldQueue
from tests.world.serving import IP, Place, PlacedServer

# A stream that begins late on a busy machine shows no progress, so that its events are always the same.
OPTIONS = ServerOptions(drain_timeout_seconds=0, progress_after_seconds=0)
BEHIND_A_GATEWAY = ServerOptions(drain_timeout_seconds=0, progress_after_seconds=0, trusted_proxy=("127.0.0.1",))
ROUTE = RouteOptions()
SIGNATURE = "x-signature"
SEEN_CLIENT = "x-seen-client"
SEEN_PATHS: list[str] = []  # paths of the requests that the gateway passed on


def quick(**other: float) -> Pace:
    return Pace(**{"report_seconds": 0.05, "least_answer_seconds": 5.0, "resolve_seconds": 0.02, **other})


QUICK = quick()


def address_of(server: RunningServer | PlacedServer) -> Address:
    return Address("127.0.0.1", server.port, f"127.0.0.1:{server.port}")


class Signed:
    """Puts two addresses into the answers of a server, which a gateway does not tell: its own and its client's."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if any(name == b"x-request-id" for name, _ in scope.get("headers", ())):
            SEEN_PATHS.append(scope["path"])

        async def signed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                host, port = scope["server"]
                headers = MutableHeaders(scope=message)
                headers[SIGNATURE] = f"{host}:{port}"
                headers[SEEN_CLIENT] = scope["client"][0]
            await send(message)

        await self.app(scope, receive, signed_send)


class ToldEngine(Engine):
    """An engine that shows its runner."""

    @property
    def runner(self) -> Any:
        return self._parts.model.runner

    def hang_in(self, part: str) -> None:
        self._loop.watchdog.hang = part


class Gate:
    """Lets each step of a real engine wait for `permit()`."""

    is_gated = True

    def __init__(self, runner: Any, world: World) -> None:
        self.steps: list[Step] = []
        self._permits: WorldQueue[None] = world.queue()
        launch = runner.launch

        def gated(step: Step) -> Any:
            self._permits.get()
            self.steps.append(step)
            return launch(step)

        runner.launch = gated

    def permit(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._permits.put(None)


@dataclass
class Replica:
    """One server, its engine, and the script of its model."""

    app: Starlette
    server: RunningServer | PlacedServer
    engine: ToldEngine
    runner: ScriptedRunner | Gate
    telemetry: FakeTelemetry

    @property
    def name(self) -> str:
        return address_of(self.server).name


@dataclass
class Fleet:
    """A gateway, the replicas that it is told of, and a client."""

    stack: ExitStack
    place: Place | None = None  # None: with threads and sockets
    replicas: dict[str, Replica] = field(default_factory=dict)
    named: list[Address] = field(default_factory=list)  # what the gateway's name stands for
    token_of: Callable[[Sequence], int | list[int]] = next_letter
    server: ServerOptions = BEHIND_A_GATEWAY
    of_plugins: tuple[object, ...] = ()
    app: Starlette = field(init=False)
    gateway: Gateway = field(init=False)
    http: httpx.Client = field(init=False)

    def add(
        self, *, gated: bool = False, engine: ToldEngine | None = None, model: str = "m", **options: Any
    ) -> Replica:
        """Start a replica, with this engine or one of a script, and let the gateway find it."""
        scripted = ScriptedRunner(self.token_of, gated=gated)
        is_real = engine is not None
        engine = engine or make_engine(
            scripted, kind=ToldEngine, runtime=self.runtime, **{"kv_blocks": 512, "max_step_tokens": 64} | options
        )
        telemetry = FakeTelemetry(self.runtime)
        config = Config(model, self.server, of_plugins=self.of_plugins)
        app = create_app(config, engine, telemetry, runtime=self.runtime)
        app.add_middleware(Signed)
        server = self.serve(app, self.server, on_drain=engine.drain, failure=lambda: engine.failure)
        runner = (
            Gate(engine.runner, self.runtime) if is_real else scripted
        )  # a real engine has computed steps when it is ready
        replica = Replica(app, server, engine, runner, telemetry)
        self.replicas[replica.name] = replica
        self.named.append(address_of(server))
        return replica

    @property
    def runtime(self) -> Any:
        return THREADS if self.place is None else self.place.world

    def serve(self, app: Starlette, options: ServerOptions, **callbacks: Any) -> RunningServer | PlacedServer:
        if self.place is None:
            return self.stack.enter_context(RunningServer(app, options, **callbacks))
        return self.stack.enter_context(PlacedServer(self.place, app, options, **callbacks))

    def begin(self, route: RouteOptions, pace: Pace) -> None:
        """Serve the gateway, and wait until it knows its replicas."""
        given = replace(route, replica=("http://replicas",))
        self.app, self.gateway = create_gateway(given, self.resolve, pace, self.runtime)
        url = self.serve(self.app, OPTIONS, on_drain=self.gateway.drain).url
        client = httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) if self.place is None else self.place.plain(url)
        self.http = self.stack.enter_context(client)
        self.wait_until_known()

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    def connect(self) -> WorldSocket:
        assert self.place is not None
        return self.place.connect(self.url)

    def straight(self, name: str = "") -> httpx.Client:
        """Return a client of this replica, or else of the first one."""
        assert self.place is not None
        return self.place.plain(f"http://{name or next(iter(self.replicas))}")

    def threads(self) -> Executor:
        """Return what makes calls beside the test."""
        assert self.place is not None
        return self.place.threads()

    def settle(self, seconds: float) -> None:
        """Let happen what can happen within some seconds."""
        assert self.place is not None
        self.place.world.settle(seconds)

    def wait_for(self, condition: Callable[[], object]) -> None:
        if self.place is None:
            wait_until(condition)
        else:
            self.place.world.wait_for(condition)

    async def resolve(self, url: str) -> Iterable[Address]:
        return list(self.named)

    @property
    def watch(self) -> Any:
        return self.gateway.watch

    def wait_until_known(self) -> None:
        """Wait until the gateway has heard of all replicas, and of no others."""
        self.wait_for(lambda: self.watch.joined - self.watch.silent == {address.name for address in self.named})

    def begun(self) -> list[Replica]:
        """Wait until a replica computes, and return all of them: this one first."""
        replicas = [*self.replicas.values()]
        self.wait_for(lambda: any(not replica.runner.started.empty() for replica in replicas))
        return sorted(replicas, key=lambda replica: replica.runner.started.empty())

    def ask(self, prompt: str = "Hello", **more: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 4, **more.pop("body", {})}
        return self.http.post("/v1/completions", json=body, **more)

    def number_of(self, name: str) -> str:
        """Return the number by which metrics name a replica."""
        return str(self.watch.upstreams[name].number)

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def fleet(
    place: Place | None,
    number: int = 4,
    *,
    pace: Pace = QUICK,
    token_of: Callable[[Sequence], int | list[int]] = next_letter,
    server: ServerOptions = BEHIND_A_GATEWAY,
    of_plugins: tuple[object, ...] = (),
    continues: ContinueStreams = "any",
    route: RouteOptions = ROUTE,
    **options: Any,
) -> Iterator[Fleet]:
    """Run a gateway in front of `number` replicas, whose engines have these options."""
    with ExitStack() as stack:
        fleet = Fleet(stack, place, token_of=token_of, server=server, of_plugins=of_plugins)
        for _ in range(number):
            fleet.add(**options)
        try:
            fleet.begin(replace(route, body_limit=20_000, continue_streams=continues), pace)
            yield fleet
        finally:
            for replica in fleet.replicas.values():
                if replica.runner.is_gated:
                    replica.runner.permit(10_000)


GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ngood"
BROKEN = b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"


class RawReplica:
    """Answers each request with `answer`, byte for byte, except those for its reports. `answers` has those for paths
    that begin with a text. An iterable is sent until the gateway has enough."""

    def __init__(self, place: Place) -> None:
        self.answer = GOOD
        self.answers: dict[bytes, bytes | Iterable[bytes]] = {}
        self.num_sent_bytes = 0
        self.ready_status = b"200"
        self.num_asked = self.num_reports = 0
        self.address = Address(IP, place.new_port(), "raw")
        self._place = place
        self._process = Process(place.world, self.address.name, IP)
        place.network.listeners[IP, self.address.port] = (self._process, self._accept)

    def _accept(self, end: End) -> None:
        world = self._place.world
        end.attach(asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=world), self._serve, loop=world))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):  # The gateway may end a connection at any time.
            while head := await reader.readline():
                length = 0
                while line := (await reader.readline()).strip():
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                await reader.readexactly(length)
                for part in self._answer_to(head):
                    writer.write(part)
                    await writer.drain()
                    self.num_sent_bytes += len(part)

    def _answer_to(self, head: bytes) -> Iterable[bytes]:
        is_report = head.startswith((b"GET /debug/report", b"GET /ready"))
        self.num_reports += is_report
        self.num_asked += not is_report
        for path, answer in self.answers.items():
            if head.startswith(b"GET " + path):
                return [answer] if isinstance(answer, bytes) else answer
        if not is_report:
            return [self.answer]
        status = b"404" if head.startswith(b"GET /debug/report") else self.ready_status
        return [b"HTTP/1.1 %b OK\r\ncontent-length: 0\r\n\r\n" % status]

    def close(self) -> None:
        self._place.network.kill(self._process, "kill")


@contextmanager
def gateway_before(
    place: Place, addresses: list[Address], pace: Pace = QUICK, **options: Any
) -> Iterator[tuple[Gateway, httpx.Client]]:
    """Run a gateway in front of these servers, which the test may change, and wait until it has found them."""

    async def resolve(url: str) -> list[Address]:
        return addresses

    app, made = create_gateway(RouteOptions(replica=("http://raw",), **options), resolve, pace, place.world)
    with PlacedServer(place, app, OPTIONS, on_drain=made.drain) as server, place.plain(server.url) as http:
        place.world.wait_for(lambda: made.watch.joined == {address.name for address in addresses})
        yield made, http
