"""An hour of the world: bursts of requests, faults among them, and what must hold after each and at rest."""

import asyncio
import gc
import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.world.clients import CASES, RESPONSES, Judge, ask, process_of, references
from tests.world.fleet import GATEWAY_IP, POISON, GatewayHost, Replica, put_in_place, repeatable
from tests.world.loop import Process, State, World
from tests.world.model import GONE
from tests.world.network import Network

SETTLE_SECONDS = 75.0  # after which the gateway sends requests to all servers again
QUIET_SECONDS = 150.0
MOST_TRIES = 10  # average number of servers that a request tries
SHARED_MEMORY = Path("/dev/shm")
# Lines of errors that faults make. Any other is a fault of the product.
EXPECTED_ERRORS = ("The engine hangs", "The engine has stopped", "The response store does not work: not authorized")
KINDS = (
    *("kill", "reset", "power", "stop", "stop", "partition", "terminate", "stuck", "device"),
    *("fails", "fails", "slow disk", "full disk", "kill at disk", "kill at disk"),
)
_ENDED = re.compile(rb'^event: response\.(completed|incomplete)$|^{.*"status":"(completed|incomplete)"', re.MULTILINE)


@dataclass
class Result:
    """What a seed has shown."""

    seed: int
    trace: str
    wrong: list[str]
    counts: Counter[str]
    hours: float
    lines: list[str] = field(default_factory=list)


class Life:
    """Servers and clients, from the first start to the last check."""

    def __init__(self, world: World, judge: Judge, folder: Path) -> None:
        self.world = world
        self._judge = judge
        self.network = Network(world)
        number = world.random.randint(2, 4)
        draw = world.random.choice
        options = {"max_running": draw([2, 4, 6]), "kv_blocks": draw([36, 48, 96]), "policy": draw(["fcfs", "fair"])}
        reports = draw([False, True, True])  # else the gateway only knows who is ready
        shares_store = draw([False, True])
        stores = [folder / f"{0 if shares_store else at}.db" for at in range(number)]
        self.replicas = [Replica(world, self.network, at + 1, stores[at], reports, **options) for at in range(number)]
        self.gateway = GatewayHost(world, self.network, self.replicas)
        self._clients: set[Any] = set()
        self._num_clients = 0
        self._stored: list[str] = []
        self._cases: list[str] = []
        self._may_break = False
        self._num_failed = 0

    async def hour(self, seconds: float) -> None:
        world = self.world
        end = self.world.now + seconds
        for host in (*self.replicas, self.gateway):
            host.start()
        await asyncio.sleep(20)
        while world.now < end - SETTLE_SECONDS - QUIET_SECONDS:
            await self._episode()
            await asyncio.sleep(SETTLE_SECONDS + world.random.expovariate(1 / 250))
        await asyncio.sleep(max(QUIET_SECONDS, end - world.now))
        self._check_rest()

    async def _episode(self) -> None:
        """Send a burst of requests, with faults. If one server is spared, all answers must be whole."""
        draw = self.world.random
        is_gentle = draw.random() < 0.75
        self._may_break = not is_gentle
        self._num_failed = 0
        hit = draw.sample(
            self.replicas, draw.randint(0, min(2, len(self.replicas) - 1) if is_gentle else len(self.replicas))
        )
        kinds = [draw.choice(KINDS) for _ in hit]
        self.world.note("episode", "gentle" if is_gentle else "harsh", [one.name for one in hit])
        is_about_disks = any("disk" in kind for kind in kinds)
        self._cases = [case for case in CASES if CASES[case][0] == RESPONSES or not is_about_disks]
        faults = [self._fault(kind, one) for kind, one in zip(kinds, hit, strict=True)]
        if not is_gentle and draw.random() < 0.5:
            faults.append(self._fault("gateway", self.gateway))
        if draw.random() < 0.2:
            faults.append(self._late())
        number = draw.randint(3, 9)
        pause_seconds = 1.0 if is_gentle else 0.4
        if is_failing := is_gentle and kinds == ["fails"]:
            number = 40
            pause_seconds = 0.7
        elif draw.random() < 0.2:
            number = 12 if is_gentle else 40  # at once
            pause_seconds = 0.01
        elif is_about_disks:
            number = 12
        num_blamed = self._num_blamed()
        under_way = [asyncio.create_task(fault) for fault in faults]
        for _ in range(number):
            self._clients.add(process_of(self.world, self._num_clients).run(self._client, self._num_clients))
            self._num_clients += 1
            await asyncio.sleep(draw.expovariate(1 / pause_seconds))
        await asyncio.gather(*under_way, *self._clients)
        self._clients.clear()
        if is_failing and self._num_failed:
            self.world.blame(f"{self._num_failed} clients met a server that fails, though another one is well")
        if not faults and self._num_blamed() > num_blamed:
            self.world.blame("servers are blamed for requests at which each of them fails")

    # -- clients ------------------------------------------------------------------------------------------------------

    async def _client(self, number: int) -> None:
        world = self.world
        draw = self.world.random
        num_starts = self.gateway.num_starts
        case = draw.choice(self._cases)
        how = draw.random()
        leaves = draw.uniform(0.01, 4) if how < 0.15 else 0.0
        dozes = draw.uniform(1, 20) if 0.15 < how < 0.2 else 0.0
        poison = f"?{POISON.decode()}" if draw.random() < 0.2 else ""
        world.counts["requests"] += 1
        world.counts["poisoned requests"] += bool(poison)
        world.note("client", number, case)
        try:
            answer = await ask(case, leaves=leaves, dozes=dozes, query=poison)
        except TimeoutError:
            return world.blame(f"client {number}, {case}: no end of its answer")
        except OSError as error:
            return None if self._may_break else world.blame(f"client {number} cannot connect: {error}")
        world.note("answer", number, answer.status, len(answer.body), answer.is_complete)
        if not answer.is_complete and (self.gateway.num_starts != num_starts or not self.gateway.is_up):
            return None  # its gateway was killed
        if answer.status == 500 and answer.body == b"{}":
            self._num_failed += not poison
            return None
        fault = self._judge.fault_of(case, answer, has_left=bool(leaves), may_break=self._may_break or bool(dozes))
        if fault:
            world.blame(f"client {number}, {fault}")
        elif CASES[case][0] == RESPONSES and CASES[case][1].get("store", True) and _ENDED.search(answer.body):
            self._stored.append(answer.body.partition(b'"id":"')[2].partition(b'"')[0].decode())
        self._check_now()

    def _num_blamed(self) -> int:
        """Return how often a server was blamed, and how often one was left out for it."""
        if not self.gateway.is_up:
            return 0
        return sum(one.num_failures + one.num_ejections for one in self.gateway.watch.upstreams.values())

    # -- faults -------------------------------------------------------------------------------------------------------

    async def _late(self) -> None:
        self.world.counts["late packets"] += 1
        self.network.late_seconds = self.world.random.uniform(0.1, 0.6)
        await asyncio.sleep(self.world.random.uniform(1, 20))
        self.network.late_seconds = 0.0

    async def _fault(self, kind: str, host: Any) -> None:
        world = self.world
        draw = self.world.random
        network = self.network
        await asyncio.sleep(draw.uniform(0, 5))
        seconds = draw.choice([draw.uniform(0.1, 3), draw.uniform(3, 120)])
        if kind == "fails":
            seconds += 30  # until the gateway must have noticed
        world.counts[kind] += 1
        world.note("fault", kind, host.name, f"{seconds:.3f}")
        match kind:
            case "gateway" if seconds < 2:
                host.terminate()
            case "kill" | "reset" | "power" | "gateway":
                host.kill(kind)
            case "stop":
                host.process.stop()
            case "partition":
                network.block(GATEWAY_IP, host.ip)
            case "terminate":
                host.terminate()
            case "stuck":
                host.model.stuck_seconds = seconds
            case "device":
                host.model.is_gone = True
            case "fails":
                host.fails = True
            case "slow disk":
                host.disk.seconds = draw.uniform(0.5, 3)
            case "full disk":
                host.disk.is_full = True
                self._may_break = True
            case "kill at disk":
                host.disk.after_write = partial(host.kill, "kill")
        self._check_now()
        await asyncio.sleep(seconds)
        match kind:
            case "kill" | "reset" | "power" | "gateway" | "terminate" | "device":
                while host.is_up:
                    if kind == "device" and not host.engine.failure:
                        host.model.is_gone = False  # no request has met it
                        return
                    await asyncio.sleep(1)
                    if (seconds := seconds + 1) > 200:
                        return world.blame(f"{host.name} does not end")
                host.start()
            case "stop":
                host.process.go_on()
            case "partition":
                network.heal(GATEWAY_IP, host.ip)
            case "stuck":
                host.model.stuck_seconds = 0.0
                await asyncio.sleep(max(0.0, host.engine.worker.free_at - world.now))
            case "fails":
                host.fails = False
            case "slow disk":
                host.disk.seconds = 0.002
            case "full disk":
                host.disk.is_full = False
            case "kill at disk":
                host.disk.after_write = None
                if not host.is_up:
                    host.start()
        self._check_now()

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _check_now(self) -> None:
        for replica in self.replicas:
            if replica.is_up and replica.server is not None and replica.engine.worker.has_begun:
                try:
                    replica.engine.scheduler.pool.check_integrity()
                except AssertionError as error:
                    self.world.blame(f"{replica.name}: {error}")

    def _check_rest(self) -> None:
        """Check that nothing is left of all that has been: nothing is open, taken, waiting, running or held."""
        for replica in self.replicas:
            engine = replica.engine
            loop = engine.loop
            serving = replica.app.state.serving
            scheduler = engine.scheduler
            requests = loop.requests
            self._must_be_zero(
                replica.name,
                is_down=not (replica.is_up and engine.is_ready),
                open_requests=len(requests),
                waiting=engine.num_waiting,
                waiting_tokens=requests.num_waiting_tokens,
                has_events=requests.has_events,
                **engine.before_the_loop(),
                received_bytes=serving.received_bytes.total,
                running=len(scheduler.foreground.owners)
                + scheduler.foreground.num_waiting
                + scheduler.foreground.num_parked,
                blocks=scheduler.pool.num_used,
                streams=len(serving.streams) + len(serving.streams.held.streams),
                held_tokens=serving.streams.held.number,
                tasks=len(replica.server.server_state.tasks),
                connections=max(0, len(replica.server.server_state.connections) - 1),
                lost_accounts=replica.num_begun - replica.telemetry.num_records,
            )
        gateway = self.gateway.gateway
        watch = self.gateway.watch
        endings = [s.value for m in gateway.metrics.requests.collect() for s in m.samples]
        upstreams = watch.upstreams.values()
        num_tries = sum(
            s.value for m in gateway.metrics.choices.collect() for s in m.samples if s.name.endswith("_total")
        )
        self._must_be_zero(
            "the gateway",
            received_bytes=gateway.bodies.received.total,
            tries=max(0, num_tries - MOST_TRIES * sum(endings)),
            open_requests=sum(upstream.num_open for upstream in upstreams),
            silent=len(watch.silent) + len(self.replicas) - len(watch.joined),
            connections=sum(max(0, len(upstream.connections) - 1) for upstream in upstreams),
            of_clients=len(self.gateway.server.server_state.connections),
            tasks=len(self.gateway.server.server_state.tasks),
            lost_requests=self.gateway.num_begun - sum(endings),
        )
        most = 2 * (1 + len(self.replicas))
        self._must_be_zero("the network", ends=max(0, len(self.network.ends) - most))
        for process in self.world.processes:
            self._must_be_zero(process.name, tasks=max(0, len(process.tasks) - 12 * (process.state is State.RUNNING)))
        stored = {row[0] for one in self.replicas for row in one.disk.connection.execute("SELECT id FROM responses")}
        self._must_be_zero("what clients were told to be stored", lost=len({*self._stored} - stored))

    def _must_be_zero(self, name: str, **numbers: float) -> None:
        for what, number in numbers.items():
            if number:
                self.world.blame(f"{name} at rest: {what} is {number}")


class _Errors(logging.Handler):
    """Blames the product for lines of errors that no fault explains."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = (record.exc_info or [None, None])[1]
        if not record.getMessage().startswith(EXPECTED_ERRORS) or (error is not None and str(error) != GONE):
            self._world.blame(f"the log has: {record.getMessage()} {error!r}")


@contextmanager
def _in(world: World) -> Iterator[None]:
    log = logging.getLogger("oaiserve")
    errors = _Errors(world)
    with repeatable(world), pytest.MonkeyPatch.context() as patch:
        put_in_place(patch)
        patch.setattr(log, "handlers", [errors])
        patch.setattr(log, "propagate", False)
        patch.setattr(logging.getLogger("uvicorn.error"), "disabled", True)  # Killed processes would log here.
        gc.disable()
        try:
            yield
        finally:
            world.end()
            gc.enable()


@cache
def judge() -> Judge:
    """Return the judge of all seeds of this process."""
    world = World(0)
    with _in(world):
        replica = Replica(world, Network(world), 1, None, False)
        replica.start()

        async def found() -> Any:
            await asyncio.sleep(5)
            return await references(world, replica.ip)

        task = Process(world, "client", "10.1.0.1").run(found)
        world.run_until_complete(task)
        assert not world.wrong, world.wrong
    return Judge(task.result())


def live(seed: int, seconds: float = 3600.0, *, keeps_trace: bool = False) -> Result:
    """Live for so long from a seed, and return what has happened."""
    result = judge()
    world = World(seed, keeps_trace)
    with TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.exists() else None) as folder, _in(world):
        try:
            world.run_until_complete(Life(world, result, Path(folder)).hour(seconds))
        except Exception as error:
            world.blame(f"the world ended: {error!r}")
            if keeps_trace:
                raise
        began = world.now
        trace = world.trace
    return Result(seed, trace, world.wrong, world.counts, (began - 1000) / 3600, world.lines or [])
