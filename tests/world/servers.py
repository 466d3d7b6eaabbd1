"""What servers of the world are made of: real engines and servers, which show what tests ask, on a machine at rest."""

import asyncio
from types import SimpleNamespace
from typing import Any

from oaiserve.engine.engine import Engine
from oaiserve.engine.loop import EngineLoop
from oaiserve.engine.requests.commands import Command
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.http.server import Server
from tests.world.loop import Process
from tests.world.network import End, Network
from tests.world.runtime import WorldWorker

# A machine that keeps no thread waiting.
MACHINE: Any = SimpleNamespace(num_threads=1, parallelism=1.0, delay_ns=lambda: 0, more_ns=lambda most_ns: 0)


class WorldEngine(Engine):
    """An engine that shows its loop, and the bytes and requests before it."""

    @property
    def loop(self) -> EngineLoop:
        return self._loop

    def clock_ns(self) -> int:
        return self._clock_ns()

    @property
    def worker(self) -> WorldWorker[Command]:
        return self._loop._worker

    @property
    def scheduler(self) -> Scheduler:
        return self._loop._scheduler

    def before_the_loop(self) -> dict[str, int]:
        return {"body_bytes": self.admission.body_bytes.total, "tokenizing": len(self._tokenize._places)}


class WorldServer(Server):
    """A server that has no listening socket."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.is_up = asyncio.Event()

    async def serve_in(self, network: Network, process: Process, place: tuple[str, int]) -> None:
        """Serve at this address, until `should_exit`."""
        self.config.date_header = False  # uvicorn would read the machine's clock for it.
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup()
        await self.on_tick(0)
        network.listeners[place] = (process, self.accept)
        self.is_up.set()
        while not await self.on_tick(1):  # noqa: ASYNC110 - as uvicorn does
            await asyncio.sleep(1.0)
        network.listeners.pop(place, None)
        await self.shutdown()

    def accept(self, end: End) -> None:
        if self.connections.admit(end.remote[0]) is None:
            self._begin(end, end.remote[0])
