"""The real engine in simulated schedules: each request ends once, with its bytes, and leaves nothing.

The model's answers follow from the blocks of the KV cache, so a block that has the wrong tokens changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from oaiserve.engine.request import TERMINAL, Event, Failed, Finished, Request, SamplingParams, TokenChunk, TokenPrompt
from oaiserve.errors import APIError
from tests.engine.doubles import LETTERS, make_engine
from tests.world.loop import World
from tests.world.model import GONE, Model
from tests.world.schedules import in_world, schedules
from tests.world.servers import MACHINE, WorldEngine

BLOCK_SIZE = 4
SYSTEM = [LETTERS[0]] * 9  # how most prompts begin, so that they share blocks
# The requests of all schedules. Those with the same prompt and seed have the same answer.
KINDS = tuple(
    Request(
        f"kind {number}",
        tuple(TokenPrompt([*SYSTEM[: 9 * (number % 3 > 0)], *LETTERS[: 1 + 5 * number % 23]]) for _ in range(prompts)),
        SamplingParams(max_tokens=max_tokens, n=n, seed=number % 5, temperature=1.0),
        stream_interval=number % 4,
        client="abc"[number % 3],
        num_bytes=100,
    )
    for number, (prompts, n, max_tokens) in enumerate(
        [(1, 1, 1), (1, 1, 7), (1, 1, 20), (1, 2, 9), (2, 1, 12), (1, 3, 8), (1, 1, 30), (2, 2, 5), (1, 1, 3)]
    )
)
Answer = dict[int, list[int]]  # the token ids of each choice


@dataclass
class Client:
    """A client, which keeps all events of its request."""

    request: Request
    kind: int
    events: list[Event] = field(default_factory=list)
    refusal: APIError | None = None
    ended_ns: int | None = None  # when the engine refused it, or has handed over its last events

    def submit(self, engine: WorldEngine) -> None:
        def take(events: list[Event]) -> None:
            self.events += events
            if isinstance(events[-1], TERMINAL):
                self.ended_ns = engine.clock_ns()

        try:
            engine.submit(self.request, take)
        except APIError as error:
            self.refusal = error
            self.ended_ns = engine.clock_ns()

    @property
    def end(self) -> str:
        """The kind of its last event, or of its refusal."""
        return type(self.events[-1] if self.events else self.refusal).__name__

    @property
    def answer(self) -> Answer:
        choices: Answer = {}
        for event in self.events:
            if isinstance(event, TokenChunk):
                choices.setdefault(event.index, []).extend(event.token_ids)
        return choices


class Engines:
    """An engine of a world with the clients of a schedule."""

    def __init__(self, world: World, **options: Any) -> None:
        draw = world.random
        self.world = world
        self.model = Model(world, BLOCK_SIZE, draw.choice([0.002, 0.02]), is_asynchronous=draw.choice([False, True]))
        options = {"kv_blocks": draw.choice([32, 40, 200]), "policy": draw.choice(["fcfs", "fair"]), **options}
        self.engine: WorldEngine = make_engine(
            self.model,
            kind=WorldEngine,
            runtime=world,
            cores_ns=world.clock_ns,
            machine=MACHINE,
            block_size=BLOCK_SIZE,
            max_model_len=128,
            max_running=draw.choice([2, 8]),
            max_step_tokens=draw.choice([8, 64]),
            prefix_cache=draw.choice([False, True]),
            drafts="off",
            **options,
        )
        self.clients: list[Client] = []

    def client(self, kind: int) -> Client:
        number = len(self.clients)
        client = Client(replace(KINDS[kind], request_id=f"{number}"), kind)
        self.clients.append(client)
        return client

    def run(self) -> None:
        """Run until all clients have their ends, and then stop the engine, which must have nothing left."""
        self.world.run_until(lambda: all(client.ended_ns for client in self.clients), most_seconds=600)
        self.world.run_until(most_seconds=5)  # What comes after an end would be an error.
        assert not [client for client in self.clients if client.ended_ns is None]
        self.check()
        self.engine.stop()
        self.check()

    def check(self) -> None:
        engine = self.engine
        scheduler = engine.scheduler
        scheduler.pool.check_integrity()
        left = {
            "open requests": len(engine.loop.requests),
            "arriving": len(engine.loop.arriving),
            "waiting": engine.num_waiting,
            "waiting tokens": engine.loop.requests.num_waiting_tokens,
            "events": engine.loop.requests.has_events,
            "running": len(scheduler.foreground.owners) + scheduler.foreground.num_parked,
            "queued": scheduler.foreground.num_waiting,
            "blocks": scheduler.pool.num_used,
            **engine.before_the_loop(),
        }
        assert not any(left.values()), left
        for client in self.clients:
            if client.refusal is None:
                check_ended(client)


def check_ended(client: Client, late_ns: int = 0) -> None:
    """Check that the last event alone is terminal, that the bytes are those of the reference, and that times add up.
    Events may be late on their way to the client."""
    *before, end = client.events
    assert isinstance(end, TERMINAL)
    assert not any(isinstance(event, TERMINAL) for event in before)
    reference = answer_alone(client.kind)
    if isinstance(end, Finished):
        assert client.answer == reference
    for index, token_ids in client.answer.items():
        assert token_ids == reference[index][: len(token_ids)]
    phases = end.times.so_far(lambda: client.ended_ns)
    assert all(phase.duration_ns >= 0 for phase in phases)
    durations = {phase.name: phase.duration_ns for phase in phases}
    for name, causes_ns in (("prefill", end.account.prefill_causes_ns), ("decode", end.account.decode_causes_ns)):
        assert all(ns >= 0 for ns in causes_ns.values())
        assert sum(causes_ns.values()) <= durations.get(name, 0)
    assert 0 <= durations.get("queue", 0) - sum(end.account.waits_ns.values()) <= late_ns


@cache
def answer_alone(kind: int) -> Answer:
    """Return the answer of a request that has a large engine for itself, with nothing cached."""
    with in_world(0, is_late=False) as world:
        engine: WorldEngine = make_engine(
            Model(world, BLOCK_SIZE, 0.01),
            kind=WorldEngine,
            runtime=world,
            machine=MACHINE,
            kv_blocks=1000,
            max_model_len=128,
            drafts="off",
            prefix_cache=False,
        )
        engine.start()
        client = Client(KINDS[kind], kind)
        client.submit(engine)
        assert world.run_until(lambda: client.ended_ns is not None, most_seconds=600)
        engine.stop()
        assert isinstance(client.events[-1], Finished)
        return client.answer


@schedules(100)
def test_each_request_ends_once_with_its_bytes_and_leaves_nothing(world: World) -> None:
    draw = world.random
    engines = Engines(world)
    engine = engines.engine
    engine.start()
    for _ in range(draw.randint(1, 6)):
        client = engines.client(draw.randrange(len(KINDS)))
        at = draw.choice([0.0, draw.uniform(0, 0.5), draw.expovariate(1)])
        world.call_later(at, client.submit, engine)
        if draw.random() < 0.3:
            world.call_later(at + draw.expovariate(4), engine.abort, client.request.request_id)
    engines.run()
    assert {client.end for client in engines.clients} <= {"Finished", "Aborted"}


@schedules(60)
def test_each_request_ends_once_however_the_engine_ends(world: World) -> None:
    draw = world.random
    engines = Engines(world, max_waiting=draw.choice([2, 100]))
    engine = engines.engine
    engine.start()
    for _ in range(draw.randint(1, 6)):
        world.call_later(draw.expovariate(2), engines.client(draw.randrange(len(KINDS))).submit, engine)
    at = draw.expovariate(1)
    if draw.random() < 0.5:
        world.call_later(at, engine.stop, draw.choice([0.0, 0.1, 100.0]))
    else:
        world.call_later(at, setattr, engines.model, "is_gone", True)
    engines.run()


@dataclass
class Act:
    """What happens after one turn of the engine, and the ends that requests may have then."""

    do: Callable[[Engines], object]
    ends: set[str]


ACTS = {
    "abort": Act(lambda engines: engines.engine.abort("1"), {"Finished", "Aborted"}),
    "another request": Act(lambda engines: engines.client(5).submit(engines.engine), {"Finished"}),
    "a device that is gone": Act(lambda engines: setattr(engines.model, "is_gone", True), {"Finished", "Failed"}),
    "stop": Act(lambda engines: engines.engine.stop(0.0), {"Finished", "Failed"}),
    "stop when all have ended": Act(lambda engines: engines.engine.stop(600.0), {"Finished"}),
    "a pause of the process": Act(lambda engines: engines.world.pause(30.0), {"Finished"}),
}


@pytest.mark.parametrize("options", [{"kv_blocks": 32}, {"kv_blocks": 200}], ids=["preempted", "with room"])
@pytest.mark.parametrize("act", ACTS)
def test_nothing_is_lost_or_left_after_each_turn(act: str, options: dict[str, Any]) -> None:
    """Repeat the same schedule, and each time let it happen after another turn."""
    num_turns = 0
    is_over = False
    while not is_over:
        num_turns += 1
        with in_world(1, is_late=False) as world:
            engines = Engines(world, **options)
            engines.engine.start()
            for kind in (3, 6, 4):
                engines.client(kind).submit(engines.engine)
            worker = engines.engine.worker
            is_over = not world.run_until(lambda worker=worker, turns=num_turns: worker.num_turns == turns, 100)
            ACTS[act].do(engines)
            engines.run()
            assert {client.end for client in engines.clients} <= ACTS[act].ends
    assert num_turns > 30


def test_a_block_with_the_wrong_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of blocks that are forgotten change answers, or else no schedule could prove anything."""
    monkeypatch.setattr(Model, "copy_blocks", lambda self, copies: None)
    with pytest.raises(AssertionError) as found:
        test_each_request_ends_once_with_its_bytes_and_leaves_nothing()
    assert "SEED=" in str(found.value.__notes__)


def test_the_error_of_a_device_reaches_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_world(0) as world:
        engines = Engines(world)
        engines.engine.start()
        client = engines.client(6)
        client.submit(engines.engine)
        engines.model.is_gone = True
        engines.run()
        end = client.events[-1]
        assert isinstance(end, Failed)
        assert end.error.status == 500
        assert str(engines.engine.failure) == GONE
