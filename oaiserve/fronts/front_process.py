"""A front process: it accepts connections, runs the routes that generate, and passes all other requests on."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from itertools import count
from time import process_time_ns
from types import SimpleNamespace
from typing import Any

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from oaiserve import __version__, plugin_loading
from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.explain.commands import settings_in
from oaiserve.facts.record import AccessRefusal, RequestRecord
from oaiserve.facts.times import WallClock
from oaiserve.facts.trace import TraceContext
from oaiserve.fronts import messages
from oaiserve.fronts.calls import PassedCalls
from oaiserve.fronts.front_engine import FrontEngine
from oaiserve.fronts.messages import (
    AskFile,
    Beat,
    Begin,
    CallEnded,
    Cut,
    Drain,
    Facts,
    Lag,
    Record,
    Refused,
    Sent,
    ToFront,
)
from oaiserve.http.connections import Connections, allowed_connections
from oaiserve.http.server import Server
from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts
from oaiserve.process.link import SocketLink
from oaiserve.process.messages import Answer, Ready
from oaiserve.process.plain_data import decoder
from oaiserve.run_engine import STDERR, end_load, prepare_process
from oaiserve.runtime import THREADS, Queue, Runtime
from oaiserve.telemetry import logs, make_tracing
from oaiserve.telemetry.recorder import Recorder

PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})  # POST requests to these are answered here.
BEAT_TICKS = 10  # ticks of the server in a second
FIRST_OF_FILES = 1 << 62  # numbers of AskFile; those of the engine's questions begin at 0


class MainProcess:
    """The main process, which acts as this process's engine process. If it ends, so does this process."""

    def __init__(self, sock: socket.socket, runtime: Runtime) -> None:
        self.begun: Queue[Begin] = runtime.queue()
        self.ready: Ready
        self.calls = PassedCalls(self.send)
        self.facts: Facts | None = None
        self.on_facts: Callable[[Facts], None] = lambda facts: None
        self.on_drain: Callable[[], None] = lambda: os._exit(0)
        self._is_closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._files: dict[int, asyncio.Future[bytes | None]] = {}
        self._numbers = count(FIRST_OF_FILES)
        self._received: Callable[[Any], None] = lambda message: None  # handler of the engine's messages
        self._closed: Callable[[], None] = lambda: None
        self._link = SocketLink(sock, decoder(ToFront), "main", runtime)
        self._link.start(self._take, self._end)

    # The interface of an engine process, and of its link

    @property
    def link(self) -> MainProcess:
        return self

    def start(self, received: Callable[[Any], None], closed: Callable[[], None]) -> None:
        self._received = received
        self._closed = closed
        received(self.ready)

    def send(self, message: object) -> None:
        self._link.send(message)

    send_now = send

    def close(self) -> None:
        """Send what is waiting, and close the link."""
        self._is_closing = True
        self._link.close()
        self._link.join()

    def kill(self) -> None:
        os._exit(1)

    def ended(self) -> str:
        return "with the server"

    # Received messages, on the thread that reads

    def serve_on(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def _take(self, message: Any) -> None:
        match message:
            case Begin():
                self.begun.put(message)
            case Facts():
                self.facts = message
                self.on_facts(message)
            case Drain():
                self.on_drain()
            case Answer(number=number) if number >= FIRST_OF_FILES:
                self._on_loop(self._answered, message)
            case messages.Receive() | Sent() | Cut() | CallEnded():
                self._on_loop(self.calls.received, message)
            case _:
                self._received(message)

    def _on_loop(self, function: Callable[[Any], None], message: object) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop is closed, because this process ends.
                self._loop.call_soon_threadsafe(function, message)

    def _end(self) -> None:
        if not self._is_closing:
            os._exit(1)
        self._closed()

    # The interface of `app.state.files`, from which routes read uploaded files

    async def file(self, owner: str, file_id: str) -> tuple[Any, bytes] | None:
        number = next(self._numbers)
        found = self._files[number] = asyncio.get_running_loop().create_future()
        self.send(AskFile(number, owner, file_id))
        content = await found
        return None if content is None else (SimpleNamespace(bytes=len(content)), content)

    async def content(self, content: bytes) -> AsyncIterator[bytes]:
        yield content

    def _answered(self, answer: Answer) -> None:
        found = self._files.pop(answer.number)
        if found.cancelled():
            return
        if answer.error is not None:
            found.set_exception(answer.error)
        else:
            found.set_result(answer.result)


class FrontTelemetry:
    """The part of `Telemetry` that the generating routes need. It sends everything to the main process."""

    def __init__(self, send: Callable[[object], None], *, keeps_prompts: bool, runtime: Runtime) -> None:
        self._send = send
        self._keeps_prompts = keeps_prompts
        self._tracing = make_tracing(  # used only to decide which traces are sampled
            version=__version__,
            epoch_offset_ns=WallClock(runtime.unix_ns, runtime.clock_ns),
            count_spans=lambda result, number: None,
            runtime=runtime,
        )
        consumers = {"main process": lambda record: send(Record.of(record))}
        self._recorder = Recorder(consumers, lambda name: None, batch_seconds=0.0, runtime=runtime)

    def record(self, record: RequestRecord) -> None:
        if not self._keeps_prompts:
            record.account.prompts = []
        self._recorder.record(record)

    def observe_event_loop_lag(self, seconds: float) -> None:
        self._send(Lag(seconds))

    def count_refused_access(self, reason: AccessRefusal) -> None:
        self._send(Refused(reason))

    @property
    def has_tracing(self) -> bool:
        return self._tracing is not None

    def is_sampled(self, trace: TraceContext) -> bool:
        return self._tracing is not None and self._tracing.is_sampled(trace)

    def close(self, timeout_seconds: float) -> bool:
        """Send the queued records. Return False if some may be lost."""
        if self._tracing is not None:
            self._tracing.close(timeout_seconds=0)
        return self._recorder.close(timeout_seconds)


class FrontServer(Server):
    """A server that obeys the main process instead of signals."""

    most_accepted_at_once = 1  # All front processes wake up for new connections. This spreads them over the idle ones.

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        connections: Connections,
        main: MainProcess,
        *,
        on_drain: Callable[[], None],
    ) -> None:
        super().__init__(app, options, connections, on_drain=on_drain)
        self._main = main

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        self._main.serve_on(asyncio.get_running_loop())
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % BEAT_TICKS == 0:
            numbers = self.connections
            refused: dict[str, int] = {**numbers.refused}
            self._main.send(Beat(process_time_ns(), numbers.num_open, refused, numbers.refusals.delay_ns))
        return await super().on_tick(counter)


def app_of(config: Config, plugins: Iterable[Plugin], main: MainProcess, engine: FrontEngine) -> ASGIApp:
    """Return the app of a front process."""

    @asynccontextmanager
    async def with_files(app: Starlette) -> AsyncIterator[None]:
        app.state.files = main
        yield

    telemetry: Any = FrontTelemetry(
        main.send, keeps_prompts=config.telemetry.record_requests is not None, runtime=THREADS
    )
    parts = [_in_front(plugin) for plugin in plugins]
    own = create_app(config, engine, telemetry, plugins=[*parts, Plugin(name="files of fronts", lifespan=with_files)])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_own = scope["type"] != "http" or (scope["method"] == "POST" and scope["path"] in PATHS)
        await (own if is_own else main.calls)(scope, receive, send)

    return app


def _in_front(plugin: Plugin) -> Plugin:
    """Return the parts of a plug-in that requests to the model need. The main process has all parts."""
    return Plugin(
        name=plugin.name,
        keys=plugin.keys,
        dialects=plugin.dialects,
        sampling_rules=plugin.sampling_rules,
        inner=InnerParts(pages=plugin.inner.pages),
    )


def _own_part(server: ServerOptions) -> ServerOptions:
    """Return the settings with this process's share of the connection limits."""
    names = ("max_connections", "max_connections_per_address")
    most = {name: value for name in names if (value := getattr(server, name))}
    return replace(server, **{name: -(-value // server.front_processes) for name, value in most.items()})


def run(descriptors: Sequence[int]) -> int:
    """Run a front process until the main process ends it. The first descriptor is the link to the main process, the
    second the listening socket."""
    faulthandler.enable(STDERR)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # A service manager sends them to all processes.
        signal.signal(number, signal.SIG_IGN)
    link, listening = (socket.socket(fileno=each) for each in descriptors)
    main = MainProcess(link, THREADS)
    begin = main.begun.get()
    logs.configure(begin.server.log_level, begin.server.log_format, model=begin.name)
    prepare_process()
    plugins = plugin_loading.find(
        begin.server.plugin, {} if begin.file is None else plugin_loading.tables_in(settings_in(begin.file))
    ).plugins
    config = begin.config(kind for _, kind in plugin_loading.options_of(plugins))
    main.ready = begin.ready
    engine = FrontEngine(main, config.engine, THREADS)
    main.on_facts = engine.become
    if main.facts is not None:
        engine.become(main.facts)
    options = _own_part(config.server)
    app = app_of(config, plugins, main, engine)
    server = FrontServer(app, options, allowed_connections(options, THREADS.clock_ns), main, on_drain=engine.drain)
    main.on_drain = lambda: server.handle_exit(signal.SIGTERM, None)
    end_load()
    server.run(sockets=[listening])
    main.close()
    return 0
