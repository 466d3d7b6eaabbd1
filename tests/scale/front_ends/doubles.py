"""Front ends in threads of this process, in place of processes, with a real engine whose runner follows a script."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx

from oaiserve.app import response_store, server_telemetry
from oaiserve.config import Config, EngineOptions, ServerOptions
from oaiserve.engine.adapters import AdapterTable
from oaiserve.engine.engine import Engine
from oaiserve.http.connections import Connections
from oaiserve.scale.front_ends.child import Child
from oaiserve.scale.front_ends.front_end import Shared
from oaiserve.scale.front_ends.messages import Call, framed, packed
from oaiserve.scale.front_ends.process import received, serve
from oaiserve.scale.front_ends.supervisor import MOST_SILENT, FrontEnds, Supervisor
from oaiserve.telemetry import Telemetry
from tests.engine.doubles import TIMEOUT_SECONDS, ScriptedRunner, make_engine
from tests.waiting import wait_until


class ThreadChild:
    """A front end in a thread. `kill` ends it as far as the engine process sees it."""

    def __init__(self) -> None:
        self.messages, self._its_messages = socket.socketpair()
        self.connections, self._its_connections = socket.socketpair()
        self.connections.setblocking(False)
        self.process = self
        self.pid = os.getpid()
        self.code: int | None = None
        self._thread = threading.Thread(target=self._serve, name="front-end")
        self._thread.start()

    def _serve(self) -> None:
        with self._its_messages, self._its_connections:
            self.code = serve(received(self._its_messages), self._its_messages, self._its_connections)

    def kill(self) -> None:
        self.messages.shutdown(socket.SHUT_RDWR)

    def end(self, limit_seconds: float) -> str:
        self._thread.join(limit_seconds)
        assert not self._thread.is_alive(), "the front end has not ended"
        self.connections.close()
        self.messages.close()
        return f"with exit code {self.code}"


class SilentChild(ThreadChild):
    """A front end that has begun to serve, and then hangs."""

    def _serve(self) -> None:
        with self._its_messages, self._its_connections:
            self._its_messages.sendall(framed(Call("FrontEnd.up", packed(()), 0)))
            while self._its_messages.recv(65536):
                pass


@dataclass
class Served:
    """A server with front ends, and clients for it."""

    url: str
    engine: Engine
    runner: ScriptedRunner
    telemetry: Telemetry
    connections: Connections
    front_ends: FrontEnds
    supervisor: Supervisor
    loop: asyncio.AbstractEventLoop
    has_ended: threading.Event

    def client(self) -> httpx.Client:
        """Return a client, which has connections of its own."""
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_SECONDS)

    @contextmanager
    def clients(self, number: int) -> Iterator[list[httpx.Client]]:
        """Give so many clients that have a connection each, at front ends that take turns."""
        with ExitStack() as stack:
            clients = [stack.enter_context(self.client()) for _ in range(number)]
            for client in clients:
                assert client.get("/version").status_code == 200
            yield clients

    def children(self) -> list[ThreadChild]:
        return [cast(ThreadChild, running.child) for running in self.front_ends.running]

    def shut_down(self) -> None:
        self.loop.call_soon_threadsafe(self.supervisor.shut_down)

    def account(self, request_id: str) -> dict[str, Any]:
        """Wait for the account of a request, and return it."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = self.telemetry.recent.list(id_prefix=request_id)
            return bool(found)

        wait_until(is_there)
        (account,) = found
        return account

    def wait_until_up(self, number: int) -> None:
        wait_until(lambda: sum(running.front_end.is_up for running in self.front_ends.running) == number)

    def check_nothing_is_left(self) -> None:
        wait_until(lambda: self.engine.snapshot().num_running == 0)
        now = self.front_ends.snapshot()
        assert (now.blocks_used, now.num_running, now.num_waiting, now.num_tokenizing) == (0, 0, 0, 0)
        assert self.engine.num_waiting == 0
        assert self.engine._body_bytes.total == 0


@contextmanager
def serving(
    runner: ScriptedRunner | None = None,
    *,
    number: int = 2,
    server: dict[str, Any] | None = None,
    most_connections: int = 100,
    first: Callable[[], Any] | None = None,
    most_silent: int = MOST_SILENT,
    adapters: AdapterTable | None = None,
    lora_dir: Path | None = None,
    **engine_options: Any,
) -> Iterator[Served]:
    """Serve by so many front ends, until the end of the block. `first` may start other ones in place of the first."""
    runner = runner or ScriptedRunner()
    engine = make_engine(runner, **engine_options)
    if adapters is not None:
        engine.adapters = engine._loop._adapters = adapters
    options = ServerOptions(front_ends=number, **({"drain_timeout_seconds": 5} | (server or {})))
    config = Config("demo", options, EngineOptions(lora_dir=lora_dir))
    front_ends, connections, responses = FrontEnds(engine), Connections(most_connections, 0), response_store(options)
    telemetry = server_telemetry(
        config, engine, connections, responses, None, front_ends.snapshot, front_ends.measured()
    )

    starts = [first or ThreadChild for _ in range(number)]

    def start() -> Child:
        return cast(Child, starts.pop()() if starts else ThreadChild())

    shared = Shared(engine, telemetry, responses, connections, None, front_ends.tell)
    supervisor = Supervisor(front_ends, start, config, shared, most_silent)
    has_ended = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run(sock: socket.socket) -> None:
        loops.append(asyncio.get_running_loop())
        await supervisor.run(sock, takes_signals=False)

    def run_thread(sock: socket.socket) -> None:
        asyncio.run(run(sock))
        has_ended.set()

    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        thread = threading.Thread(target=run_thread, args=(sock,), name="supervisor")
        thread.start()
        wait_until(lambda: bool(loops))
        served = Served(url, engine, runner, telemetry, connections, front_ends, supervisor, loops[0], has_ended)
        served.wait_until_up(number)
        try:
            yield served
        finally:
            if not has_ended.is_set():
                served.shut_down()
            thread.join(TIMEOUT_SECONDS)
            assert has_ended.is_set(), "the server has not ended"
