"""`Supervisor` runs the engine process of a server with front ends, keeps these running, and accepts connections.

All of it happens on one event loop, that of the main thread. No token passes through it: the engine thread writes each
step's events to the front ends itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import uvloop

from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.http.listener import Listener
from oaiserve.http.server import log_end, log_shutdown, too_many_connections
from oaiserve.scale.front_ends.child import Child
from oaiserve.scale.front_ends.front_end import FrontEnd, Shared
from oaiserve.scale.front_ends.link import Link, hand_over
from oaiserve.scale.front_ends.messages import Message, Model, Shutdown, State, pickled
from oaiserve.telemetry import names
from oaiserve.telemetry.metrics import Numbers, numbers_of
from oaiserve.telemetry.names import Metric

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.1  # how often the engine and the front ends are looked at
# For so many looks, a front end may send nothing, which it does twice a second. They are counted, because all processes
# may have stood still meanwhile.
MOST_SILENT = 300
RETRY_SECONDS = 0.01  # after which connections are offered again that no front end has taken
END_SECONDS = 10.0  # that a front end has to end, beyond the time for its requests
FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 1.0, 30.0  # before a front end is started that keeps ending
CALM_SECONDS = 60.0  # after which a front end does not keep ending
CLOSE_SECONDS = 5.0  # the longest wait for a collector that does not answer


@dataclass(frozen=True, slots=True)
class _Running:
    number: int
    front_end: FrontEnd
    child: Child


class FrontEnds:
    """The front ends that run now. It has the engine's numbers with theirs, for telemetry."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.running: list[_Running] = []  # replaced as a whole, so that any thread may read it
        self.num_ended = 0  # without being asked to

    def snapshot(self) -> EngineNumbers:
        """Return the engine's snapshot, with the prompts that wait for the threads of front ends."""
        now = self.engine.snapshot()
        num_encoding = sum(len(running.front_end.not_begun) for running in self.running)
        return replace(now, num_tokenizing=now.num_tokenizing + num_encoding)

    def measured(self) -> dict[Metric, Callable[[], Numbers]]:
        """Return the reads of their own metrics, those of their processes by the number of the front end."""
        return {
            names.FRONT_ENDS: lambda: {(): sum(running.front_end.is_up for running in self.running)},
            names.FRONT_ENDS_ENDED: lambda: {(): self.num_ended},
            names.FRONT_END_CPU_SECONDS: lambda: self._of_processes("process_cpu_seconds"),
            names.FRONT_END_RESIDENT_BYTES: lambda: self._of_processes("process_resident_memory_bytes"),
            names.FRONT_END_OPEN_FDS: lambda: self._of_processes("process_open_fds"),
        }

    def _of_processes(self, number: str) -> Numbers:
        found = {running.number: numbers_of(running.child.process.pid) for running in self.running}
        return {(str(at),): numbers[number] for at, numbers in found.items() if number in numbers}

    def tell(self, message: Message) -> None:
        for running in self.running:
            running.front_end.send(message)


class Supervisor:
    """Serves by front ends until a signal arrives or the engine fails."""

    def __init__(
        self,
        front_ends: FrontEnds,
        start: Callable[[], Child],
        config: Config,
        shared: Shared,
        most_silent: int = MOST_SILENT,
    ) -> None:
        """Prepare the start of front ends. `start` starts the process of one, and may block."""
        self._most_silent = most_silent
        self._front_ends = front_ends
        self._start = start
        self._engine = engine = front_ends.engine
        self._shared = shared
        self._number = config.server.front_ends
        model = Model(
            config=config,
            switch_seconds=sys.getswitchinterval(),
            tokenizer=engine.tokenizer.stored,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            capacity=engine.capacity,
            default_params=engine.default_params,
            pooling=engine.pooling,
            is_on_cpu=engine.is_on_cpu,
            started_unix_seconds=time.time(),
            live_boundaries_seconds=shared.telemetry.live.boundaries_seconds,
        )
        self._model = pickled(model)
        self._refusal = None if config.server.tls_certificate else too_many_connections
        self._drain_timeout_seconds = config.server.drain_timeout_seconds
        self._num_signals = 0
        self._unplaced: deque[tuple[socket.socket, str]] = deque()  # connections that no front end has taken
        self._retry: asyncio.TimerHandle | None = None

    def serve(self, sock: socket.socket) -> None:
        """Serve the socket, which listens, until the end."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.run(sock))
        for number in SIGNALS:  # a further one must not change the exit code
            signal.signal(number, signal.SIG_IGN)

    async def run(self, sock: socket.socket, *, takes_signals: bool = True) -> None:
        """Do what `serve` does, on a loop that runs. Without `takes_signals`, only `shut_down` ends it."""
        self._loop = asyncio.get_running_loop()
        self._is_ending = asyncio.Event()
        for number in SIGNALS if takes_signals else ():
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` wants it
                self._loop.add_signal_handler(number, self.shut_down)
        self._engine.start()
        keepers = [asyncio.create_task(self._keep(number + 1)) for number in range(self._number)]
        watch = asyncio.create_task(self._watch())
        listener = Listener(sock, self._shared.connections, self._begin, refusal=self._refusal)
        await self._is_ending.wait()
        self._engine.drain()
        listener.close()
        sock.close()
        while self._unplaced:
            client, address = self._unplaced.popleft()
            client.close()
            self._shared.connections.release(address)
        ending = [running.front_end for running in self._front_ends.running]
        for front_end in ending:
            front_end.is_ending = True
        num_open = sum(len(front_end.unrecorded) for front_end in ending)
        log_shutdown(num_open, self._drain_timeout_seconds)
        self._front_ends.tell(Shutdown())
        await asyncio.wait(keepers, timeout=self._drain_timeout_seconds + END_SECONDS)
        for running in self._front_ends.running:
            log.error("A front end does not end, so it is killed")
            running.child.process.kill()
        await asyncio.gather(*keepers)
        num_finished = sum(front_end.num_finished for front_end in ending)
        num_cut_off = sum(front_end.num_cut_off for front_end in ending)
        log_end(num_finished, num_cut_off)
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        await asyncio.to_thread(self._engine.stop, 0.0)
        await self._shared.responses.close()
        await asyncio.to_thread(self._shared.telemetry.close, CLOSE_SECONDS)

    def shut_down(self) -> None:
        """Begin the shutdown. The second call skips the wait for running requests, the third ends the process."""
        self._num_signals += 1
        if self._num_signals > 2:
            os._exit(1)
        if self._num_signals == 2:
            self._front_ends.tell(Shutdown())
        self._is_ending.set()

    async def _watch(self) -> None:
        """Kill front ends that hang, and tell them that the engine does. Begin the shutdown when it has failed."""
        hang = ""
        while (failure := self._engine.failure) is None:
            await asyncio.sleep(POLL_SECONDS)
            if hang != (hang := self._engine.hang):
                self._front_ends.tell(State.of(self._engine))
            for running in self._front_ends.running:
                running.front_end.num_silent += running.front_end.is_up
                if running.front_end.num_silent == self._most_silent:
                    log.error("A front end has not been heard of for a while, so it is killed")
                    running.child.process.kill()
        log.error("The engine has stopped (%s: %s), so the server ends", type(failure).__name__, failure)
        self._front_ends.tell(State.of(self._engine))
        self._is_ending.set()

    # -- processes ----------------------------------------------------------------------------------------------------

    async def _keep(self, number: int) -> None:
        """Keep a front end running, until the shutdown."""
        pause_seconds = 0.0
        while (child := await self._start_after(number, pause_seconds)) is not None:
            started = self._loop.time()
            num_lost = await self._run(number, child)
            how = await asyncio.to_thread(child.end, END_SECONDS)
            self._front_ends.num_ended += not self._is_ending.is_set()
            if num_lost or not self._is_ending.is_set():
                text = "Front end %d has ended %s. Requests that it had open, and which have failed: %d"
                log.error(text, number, how, num_lost)
            if self._loop.time() - started > CALM_SECONDS:
                pause_seconds = 0.0
            pause_seconds = min(MOST_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * pause_seconds))

    async def _start_after(self, number: int, pause_seconds: float) -> Child | None:
        """Start a front end after a pause. Return None if the shutdown begins before."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_ending.wait(), pause_seconds)
                return None
            try:
                return await asyncio.to_thread(self._start)
            except OSError as error:  # no memory, or no process left
                log.error("Front end %d cannot be started: %s", number, error)
                pause_seconds = MOST_PAUSE_SECONDS

    async def _run(self, number: int, child: Child) -> int:
        """Serve one process of a front end until its end, and return how many requests are lost with it."""
        link = Link(child.messages)
        front_end = FrontEnd(link, self._shared, on_up=self._place)
        link.send(self._model)
        front_end.start()
        front_end.send(State.of(self._engine))
        running = _Running(number, front_end, child)
        self._front_ends.running = [*self._front_ends.running, running]
        if self._is_ending.is_set():
            front_end.send(Shutdown())
        try:
            num_lost: int = await front_end.ended
        finally:
            self._front_ends.running = [other for other in self._front_ends.running if other is not running]
        return num_lost

    # -- connections --------------------------------------------------------------------------------------------------

    def _begin(self, client: socket.socket, address: str) -> None:
        """Place a connection that has been accepted and admitted."""
        self._unplaced.append((client, address))
        self._place()

    def _place(self) -> None:
        """Pass connections to the front ends that have the fewest, as long as these take them."""
        while self._unplaced:
            client, address = self._unplaced[0]
            up = [running for running in self._front_ends.running if running.front_end.is_up]
            for running in sorted(up, key=lambda running: running.front_end.num_connections):
                if hand_over(running.child.connections, client, address):
                    running.front_end.connected(address)
                    break
            else:
                if self._retry is None and up:
                    self._retry = self._loop.call_later(RETRY_SECONDS, self._try_again)
                return
            self._unplaced.popleft()

    def _try_again(self) -> None:
        self._retry = None
        self._place()
