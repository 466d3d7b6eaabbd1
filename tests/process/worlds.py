"""Engine processes in a world: their links are late, and end at any byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from oaiserve.config import EngineOptions
from oaiserve.engine.types.adapters import AdapterTable
from oaiserve.process.frames import Frames, framed
from oaiserve.process.messages import NotStarted, ToEngine, ToFront
from oaiserve.process.plain_data import decoder, encode
from oaiserve.process.remote_engine import RemoteEngine
from oaiserve.process.server import EngineServer
from oaiserve.runtime import ENDED, Empty, When
from tests.engine.doubles import make_engine
from tests.world.loop import World
from tests.world.model import Model
from tests.world.servers import MACHINE, WorldEngine

BLOCK_SIZE = 4
MOST_LATE_SECONDS = 0.002  # of a part of the stream


class WorldLink:
    """One end of a link in a world. What is sent comes in parts, each some time later."""

    def __init__(self, world: World, name: str, decode: Callable[[bytes], Any]) -> None:
        self.other: WorldLink
        self._world = world
        self._decode = decode
        self._frames = Frames()
        self._arrives = 0.0  # when the last part arrives
        self._is_closed = False
        self._early: list[bytes] = []  # sent before the other end has started
        self._reader = world.worker(f"{name} reads", self._read)

    def start(self, received: Callable[[Any], None], closed: Callable[[], None]) -> None:
        self._received = received
        self._on_close = closed
        self._reader.start()

    def send(self, message: object) -> None:
        if self._is_closed:
            return
        data = framed(encode(message))
        random = self._world.random
        while data:
            size = random.choice([len(data), random.randint(1, len(data))])
            self._pass(data[:size])
            data = data[size:]

    def send_now(self, message: object) -> None:
        if not self._is_closed:
            self._world.call_at(
                self._world.now + self._world.ahead, self.other._take, self.other._decode(encode(message))
            )

    def _take(self, message: object) -> None:
        if not self._has_ended:
            self._received(message)

    def close(self) -> None:
        """Close this end: the other one still gets what was sent."""
        if not self._is_closed:
            self._is_closed = True
            self._pass(b"")

    def cut(self) -> None:
        """End as if its process were killed: what has not arrived is lost, except for some bytes."""
        self._is_closed = True
        self.other._is_cut = True
        self._pass(b"")

    def _pass(self, part: bytes) -> None:
        world = self._world
        late = world.random.random() ** 3 * MOST_LATE_SECONDS
        self._arrives = max(self._arrives, world.now + world.ahead + late)
        world.call_at(self._arrives, self.other._reader.post, part)

    _is_cut = False
    _has_ended = False

    def _read(self) -> When:
        """Read all that has arrived, as a socket gives it."""
        parts: list[bytes] = []
        with suppress(Empty):
            while b"" not in parts:
                parts.append(self._reader.take())
        if not parts:
            return None
        data = b"".join(parts)
        is_over = b"" in parts or self._is_cut
        if self._is_cut and data:
            data = data[: self._world.random.randrange(len(data))]
        for frame in self._frames.push(data):
            self._received(self._decode(frame))
        if not is_over:
            return 0
        self._has_ended = True
        self._on_close()
        return ENDED


class WorldProcess:
    """An engine process, with a model of its own."""

    def __init__(self, engines: Processes) -> None:
        world = engines.world
        self.link = WorldLink(world, "front", decoder(ToFront))
        self._its_own = WorldLink(world, "engine", decoder(ToEngine))
        self.link.other = self._its_own
        self._its_own.other = self.link
        self._engines = engines
        self._how = "with exit code 0"
        self.has_ended = False
        self.hangs = False
        self.is_stopped = False  # as by a signal: it does nothing
        self.engine: WorldEngine | None = None
        self.server: EngineServer | None = None
        world.call_later(engines.load_seconds, world.begin, self._load)

    def _load(self) -> None:
        engines = self._engines
        if self.has_ended:
            return
        if engines.refusal is not None:
            self._its_own.start(lambda message: None, lambda: None)
            self._its_own.send(NotStarted(engines.refusal))
            self._its_own.close()
            return
        self.model = Model(engines.world, BLOCK_SIZE, engines.step_seconds, is_asynchronous=engines.is_asynchronous)
        self.engine = engines.make(self.model)
        self.engine.path = "model"
        server = self.server = EngineServer(
            self.engine, self._its_own, self._on_stop, engines.world, engines.world.clock_ns
        )
        self._its_own.start(self._received, server.front_ended)
        server.start()

    def _received(self, message: object) -> None:
        if not self.has_ended and self.server is not None:
            self.server.received(message)

    def _on_stop(self, seconds: float) -> None:
        if not self.has_ended:
            self._engines.world.begin(self._stop, seconds)

    def _stop(self, seconds: float) -> None:
        if self.server is not None and not self.has_ended:
            self.server.stop(seconds)
            self.has_ended = True

    def die(self, how: str = "by SIGKILL") -> None:
        """End in the middle of everything."""
        if self.has_ended:
            return
        self._how = how
        self.has_ended = True
        self._its_own.cut()
        if self.engine is not None:
            self.engine.worker.end()
            self.engine.loop.is_stopped = True
            self.server._beats.end()

    def hang(self) -> None:
        """Do nothing any more."""
        self.hangs = True
        self.engine.worker.end()
        self.server._beats.end()

    def kill(self) -> None:
        self.die()

    def ended(self) -> str:
        self.die()
        return self._how


class Processes:
    """Starts the engine processes of a front, and keeps them."""

    def __init__(self, world: World, **options: Any) -> None:
        draw = world.random
        self.world = world
        self.all: list[WorldProcess] = []
        self.by_replica: dict[int, WorldProcess] = {}  # those of the moment
        self.load_seconds = draw.choice([0.0, 0.3])
        self.step_seconds = draw.choice([0.002, 0.02])
        self.is_asynchronous = draw.choice([False, True])
        self.refusal: Exception | None = None
        self.adapter_loaded: Callable[[int, str, Path], object] = lambda number, name, path: None
        self.more: dict[str, Any] = {}  # options of the engine
        self._options = {
            "kv_blocks": draw.choice([32, 40, 200]),
            "policy": draw.choice(["fcfs", "fair"]),
            "max_running": draw.choice([2, 8]),
            "max_step_tokens": draw.choice([8, 64]),
            "prefix_cache": draw.choice([False, True]),
            **options,
        }

    @property
    def now(self) -> WorldProcess:
        return self.all[-1]

    def launch(self, index: int) -> WorldProcess:
        process = WorldProcess(self)
        self.all.append(process)
        self.by_replica[index] = process
        return process

    def make(self, model: Model) -> WorldEngine:
        engine: WorldEngine = make_engine(
            model,
            kind=WorldEngine,
            runtime=self.world,
            cores_ns=self.world.clock_ns,
            machine=MACHINE,
            block_size=BLOCK_SIZE,
            max_model_len=128,
            drafts="off",
            adapters=AdapterTable(lambda *loaded: self.adapter_loaded(*loaded), lambda number: None),
            **self._options,
            **self.more,
        )
        return engine

    def front(self, num_replicas: int = 1, **options: Any) -> RemoteEngine:
        return RemoteEngine(
            [partial(self.launch, index) for index in range(num_replicas)],
            EngineOptions(**{"watchdog_seconds": 10, **options}),
            self.world,
            cores_ns=self.world.clock_ns,
        )
