"""`FrontsServer`: the main process of a server with several front processes, which accept its connections."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import process_time_ns
from types import FrameType
from typing import Any

from starlette.applications import Starlette

from oaiserve.config import Config, ServerOptions
from oaiserve.errors import StartupError
from oaiserve.fronts.calls import AnsweredCalls
from oaiserve.fronts.front_engine import ServedFront
from oaiserve.fronts.messages import (
    AskFile,
    Beat,
    Begin,
    Call,
    Cancel,
    Drain,
    Facts,
    FromFront,
    Lag,
    Received,
    Record,
    Refused,
    Taken,
)
from oaiserve.http.connections import Connections
from oaiserve.http.server import CUT_SECONDS, Server
from oaiserve.plugin import Plugin
from oaiserve.plugin_loading import streams_of
from oaiserve.process.link import SocketLink
from oaiserve.process.linked_process import LinkedProcess
from oaiserve.process.messages import Abort, Answer, AskTokenizer, AskTokens, Health, Ready, Step, Submit
from oaiserve.process.plain_data import decoder
from oaiserve.process.remote_engine import RemoteEngine
from oaiserve.process.replica import ENDS_NS, MOST_ENDS
from oaiserve.runtime import THREADS
from oaiserve.system_cpus import allowed_cpus
from oaiserve.telemetry import Telemetry

log = logging.getLogger(__name__)

SECOND_TICKS = 10
END_SECONDS = 10.0  # time limit for a front process to send its last messages after it has cut off its clients


def check(config: Config, plugins: Sequence[Plugin], *, is_child: bool) -> None:
    """Raise StartupError for settings that do not work with several front processes."""
    if is_child:
        raise StartupError("--front-processes is for servers that Ray doesn't start. There, use several replicas.")
    if streams_of(plugins, config) is not None:
        raise StartupError(
            "--front-processes and --inspect, or texts in spans, do not go together: only one process could show them."
        )
    if (number := config.server.front_processes) > (num_cpus := len(allowed_cpus())):
        log.warning(
            "--front-processes is %d, and the CPUs that this server may use are %d. The main process and the engine "
            "need some, too, so fewer front processes are faster.",
            number,
            num_cpus,
        )


class FrontGone(Exception):
    """Front processes have ended too often."""


class FrontProcess(LinkedProcess):
    """A front process, which has been started."""

    def __init__(self, server: FrontsServer, name: str, begin: Begin, sock: socket.socket) -> None:
        self.name = name
        self.num_silent_seconds = 0
        self.beat = Beat()
        self.has_ended = asyncio.Event()
        self._server = server
        self._loop = asyncio.get_running_loop()
        super().__init__(("-m", "oaiserve.fronts"), [name], passed=[sock.fileno()])
        self.link = SocketLink(self.socket, decoder(FromFront), name, THREADS)
        self._served = ServedFront(server.engine, self.link)
        charge = server.connections.refusals.charge
        self._calls = AnsweredCalls(server.app, self._pass_on, charge)
        self.link.send(begin)
        self.link.start(self._received, self._closed)

    # Received messages, on the thread that reads

    def _received(self, message: Any) -> None:
        match message:
            case Submit() | Abort() | AskTokens() | AskTokenizer():
                self._served.received(message)
            case Record():
                self._server.telemetry.record(message.record())
            case Lag(seconds):
                self._server.telemetry.observe_event_loop_lag(seconds)
            case Refused(reason):
                self._server.telemetry.count_refused_access(reason)
            case Beat():
                self.num_silent_seconds = 0
                self.beat = message
            case Call() | Received() | Taken() | Cancel():
                self._on_loop(self._calls.received, message)
            case AskFile():
                self._on_loop(self._answer_file, message)

    def _closed(self) -> None:
        self._served.closed()
        self._on_loop(self._server.note_end, self)

    # Called on the event loop

    def _on_loop(self, function: Any, argument: object) -> None:
        with suppress(RuntimeError):  # The loop is closed, because this process ends.
            self._loop.call_soon_threadsafe(function, argument)

    def _pass_on(self, message: object) -> None:
        self._server.tell_facts()
        self.link.send(message)

    def let_clients_leave(self) -> None:
        self._calls.end()

    def _answer_file(self, question: AskFile) -> None:
        task = asyncio.create_task(self._read_file(question))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    async def _read_file(self, question: AskFile) -> None:
        files = self._server.app.state.files
        try:
            stored = None if files is None else await files.file(question.owner, question.file_id)
            content = None if stored is None else b"".join([part async for part in files.content(stored[1])])
            self.link.send(Answer(question.number, result=content))
        except Exception as error:  # The front process raises it to its caller.
            self.link.send(Answer(question.number, error=error))


class FrontsServer(Server):
    """A server without connections of its own: its front processes share the listening socket.

    If a front process ends, its connections are lost, and another one is started. The front processes end before the
    engine, and never outlive this process.
    """

    def __init__(
        self,
        app: Starlette,
        options: ServerOptions,
        connections: Connections,
        *,
        config: Config,
        engine: RemoteEngine,
        telemetry: Telemetry,
        on_drain: Callable[[], None],
        failure: Callable[[], BaseException | None],
    ) -> None:
        super().__init__(app, options, connections, on_drain=on_drain, failure=lambda: self._gone or failure())
        self.app = app
        self.engine = engine
        self.telemetry = telemetry
        self.tasks: set[asyncio.Task[None]] = set()
        self._settings = config
        self._gone: FrontGone | None = None
        self._num_signals = 0
        self._num_drains = 0  # how often the front processes were asked to drain
        self._fronts: list[FrontProcess] = []
        self._sockets: list[socket.socket] = []
        self._told: Facts | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends_ns: deque[int] = deque(maxlen=MOST_ENDS)
        # Sums over the front processes that have ended.
        self._cores_ns = 0
        self._refused: Counter[str] = Counter(connections.refused)
        self._refusal_delay_ns = 0
        self._shown_delay_ns = 0  # the part of `refusals.delay_ns` that comes from front processes
        engine.cores_ns = lambda: process_time_ns() + self._cores_ns + sum(f.beat.cores_ns for f in self._fronts)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._num_signals += 1
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)  # The signal may have interrupted `send`.

    def _drain(self) -> None:
        while self._num_drains < max(1, self._num_signals):
            self._num_drains += 1
            for front in self._fronts:
                front.link.send(Drain())

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        await super().startup(())
        self._loop = asyncio.get_running_loop()
        self._sockets = [*(sockets or ())]
        for number in range(self._settings.server.front_processes):
            self._start(f"front {number}")

    def _start(self, name: str) -> None:
        (sock,) = self._sockets
        ready = Ready.of(self.engine, self.engine.tokenizer.facts, self.engine.snapshot())
        begin = Begin.of(name, self._settings, ready)
        front = FrontProcess(self, name, begin, sock)
        self._told = None
        self._fronts.append(front)
        self.tell_facts()

    def tell_facts(self) -> None:
        """Send the facts to all front processes if they have changed."""
        facts = Facts(self.engine.adapters.served, self.engine.is_reporting)
        if facts != self._told:
            self._told = facts
            for front in self._fronts:
                front.link.send(facts)

    async def on_tick(self, counter: int) -> bool:
        if counter % SECOND_TICKS == 0:
            self._look()
        return await super().on_tick(counter)

    def _look(self) -> None:
        """Collect the statistics of the front processes, and kill those whose event loops have been stuck for too
        long."""
        self.tell_facts()
        beats = [front.beat for front in self._fronts]
        self.connections.num_open = sum(beat.num_connections for beat in beats)
        self.connections.refused.update(sum((Counter(beat.refused) for beat in beats), self._refused))
        delay_ns = self._refusal_delay_ns + sum(beat.refusal_delay_ns for beat in beats)
        self.connections.refusals.delay_ns += delay_ns - self._shown_delay_ns
        self._shown_delay_ns = delay_ns
        for front in self._fronts:
            front.link.send(Step(health=Health(0, 0, 0, self.engine.hang, None)))
            front.num_silent_seconds += 1
            if front.num_silent_seconds > self._settings.engine.watchdog_seconds:
                log.error(
                    "The process %s has sent nothing for %d s, and is killed", front.name, front.num_silent_seconds
                )
                front.kill()
                front.num_silent_seconds = 0  # It may not have ended by the next look.

    def note_end(self, front: FrontProcess) -> None:
        task = asyncio.create_task(self._go_on_without(front))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _go_on_without(self, front: FrontProcess) -> None:
        """Start another process in place of one that has ended, unless that happens too often."""
        front.let_clients_leave()
        how = await asyncio.to_thread(front.ended)
        self._fronts.remove(front)
        self._cores_ns += front.beat.cores_ns
        self._refused.update(front.beat.refused)
        self._refusal_delay_ns += front.beat.refusal_delay_ns
        front.has_ended.set()
        if self._num_drains:
            return
        self._ends_ns.append(self.connections.clock_ns())
        if len(self._ends_ns) == MOST_ENDS and self._ends_ns[-1] - self._ends_ns[0] <= ENDS_NS:
            self._gone = FrontGone(f"Front processes have ended {MOST_ENDS} times within a minute, at last {how}.")
            return
        log.error("The process %s has ended %s, with its connections. Another one is started", front.name, how)
        self._start(front.name)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain()
        for sock in self._sockets:
            sock.close()
        ends = [front.has_ended.wait() for front in self._fronts]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.server.drain_timeout_seconds + CUT_SECONDS + END_SECONDS):
                await asyncio.gather(*ends)
        for front in self._fronts:
            front.kill()
        await super().shutdown(sockets)
