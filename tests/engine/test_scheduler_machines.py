"""The scheduler, the block pool and the prefix cache without a model: anything may happen in any order."""

import os
import random
from array import array
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from oaiserve.engine.scheduling.policy import POLICIES
from oaiserve.engine.sequences.blocks import StatePool
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.engine.sequences.step import Draw
from oaiserve.engine.types.media import PromptMedia
from oaiserve.explain.step_cost import KNOTS, StepCost
from tests.engine.memory import FixedTarget, Memory, make, sequence

LAST_TOKEN = 3  # The tokens drawn are 0 to 3.


class SchedulerMachine(RuleBasedStateMachine):
    """A machine that mixes arrivals, steps and departures, and checks the promises of scheduler, pool and cache."""

    policy = "fcfs"
    prefix_cache = True
    overlap = False
    num_states: int | None = None  # number of states, if there are any
    shortest_kept = 1
    fewest_draws = 1  # tokens that a step draws for a sequence
    most_draws = 1
    has_time = False  # steps have a target of three tokens' time
    has_background = False
    most_forced = 0  # tokens that a grammar forces after these
    longest_run = 0  # tokens of a prompt that see each other

    def __init__(self) -> None:
        super().__init__()
        cost = StepCost(tuple(1e6 * knot for knot in KNOTS))
        self.memory = self.make_memory(
            kv_blocks=8,
            max_running=4,
            max_step_tokens=6,
            policy=POLICIES[self.policy],
            prefix_cache=self.prefix_cache,
            states=None if self.num_states is None else StatePool(self.num_states, self.shortest_kept),
            step_time=FixedTarget(lambda: cost, 0.003, 6) if self.has_time else None,
        )
        self.scheduler = self.memory.scheduler
        self.memory.overlap = self.overlap
        self.open: list[Sequence] = []
        self.num_arrived = 0
        self.now_ns = 0
        self.arrived_ns: dict[Sequence, int] = {}  # sequences that have not been in a step

    def make_memory(self, **options: Any) -> Memory:
        return Memory(make(**options), last_token=LAST_TOKEN)

    @rule(
        shared=st.integers(0, 12),
        own=st.integers(1, 9),
        max_tokens=st.integers(0, 10),
        choices=st.sampled_from([1, 1, 2, 3]),
        number=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "a"]),
        client=st.sampled_from(["a", "a", "b", "c"]),
        is_one=st.booleans(),
    )
    def arrive(
        self, shared: int, own: int, max_tokens: int, choices: int, number: int, salt: str, client: str, is_one: bool
    ) -> None:
        prompt = [*range(shared), *(100 + i % 2 for i in range(own))]
        leader = None
        self.now_ns += 3
        self.num_arrived += 1
        for choice in range(choices):
            name = f"{self.num_arrived}" if is_one else f"{self.num_arrived}.{choice}"
            fields = {"priority": number, "cache_salt": salt, "client_name": client, "adapter": number + 1}
            fields["is_background"] = self.has_background and own % 2 == 0
            fields["background_wait_ns"] = 20 if own % 4 == 0 else None
            if (run := range(len(prompt) // 3, len(prompt))[: self.longest_run]) and number:
                fields["media"] = PromptMedia((), array("i"), runs=((run.start, run.stop),))
            self.open.append(sequence(name, prompt, max_tokens, **fields))
            self.open[-1].needs_ids = number == 0
            self.scheduler.add(self.open[-1], leader, since_ns=self.now_ns)
            self.arrived_ns[self.open[-1]] = self.now_ns
            leader = leader or self.open[-1]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.open))
        self.open.remove(gone)
        if (arrived_ns := self.arrived_ns.pop(gone, None)) is not None:
            assert sum(self.scheduler.of(gone).waits.settle(gone, self.now_ns).values()) == self.now_ns - arrived_ns
        self.memory.remove(gone)
        assert (gone.blocks, gone.state, gone.place) == ([], None, Place.NOWHERE)

    @rule(
        tokens=st.lists(st.lists(st.integers(0, LAST_TOKEN), max_size=4), min_size=4, max_size=4),
        drafts=st.lists(st.integers(0, LAST_TOKEN), max_size=8),
        num_right=st.integers(0, 4),
        took_ns=st.integers(0, 9),
        forced=st.lists(st.lists(st.integers(0, LAST_TOKEN), max_size=6), min_size=4, max_size=4),
    )
    def step(
        self,
        tokens: list[list[int]],
        drafts: Collection[int] = (),
        num_right: int = 0,
        took_ns: int = 1,
        forced: list[list[int]] | None = None,
    ) -> None:
        self.now_ns += took_ns
        if forced is not None:
            self.memory.forced = lambda one: forced[self.open.index(one) % len(forced)][: self.most_forced]
        for number, one in enumerate(self.open):
            one.draft = [*drafts][number : number + self.most_draws - 1]
        if self.fewest_draws == 1:
            tokens = [row or [0] for row in tokens]
        step = self.scheduler.schedule(self.now_ns)
        if step is None:
            present = [one for one in self.open if one.place is not Place.NOWHERE]
            has_turn = not present or any(one.is_held for one in present)
            assert has_turn or self.blocks_come_back(), "there is something to compute, or deadlock"
            self.memory.settle()
            self.forget_those_that_left()
            return
        admitted = [chunk.sequence for chunk in step.chunks if chunk.sequence in step.admitted]
        assert len(admitted) == len(step.admitted) or self.has_background
        for chunk in step.chunks:
            lacks_ids = chunk.known_end > len(chunk.sequence.token_ids)
            is_late = chunk.sequence.needs_ids and chunk.max_draws > 0 and lacks_ids
            assert chunk.draw is (Draw.LATE if is_late else Draw.AT_LAUNCH)
            if (arrived_ns := self.arrived_ns.pop(chunk.sequence, None)) is not None:
                assert chunk.sequence in admitted
                waits_ns = chunk.sequence.waits_ns
                assert sum(waits_ns.values()) == self.now_ns - arrived_ns, "every nanosecond of waiting has a reason"
                assert all(ns > 0 for ns in waits_ns.values())
            if (media := chunk.sequence.media) is not None:
                assert not any(first < chunk.end < end for first, end in media.runs), "a chunk ends inside an image"
        assert step.num_tokens <= self.scheduler.limits.max_step_tokens + max(0, self.longest_run - 1)
        ones = [chunk.num_tokens == 1 for chunk in step.chunks]
        assert ones == sorted(ones, reverse=True), "chunks of one token come first"
        assert len({id(chunk.sequence) for chunk in step.chunks}) == len(step.chunks)
        written = [
            (chunk.sequence.blocks[p // 4], p % 4) for chunk in step.chunks for p in range(chunk.start, chunk.end)
        ]
        assert len(written) == len(set(written)), "two sequences write to one place"
        assert all(self.scheduler.pool.is_writable(block) for block, _ in written), "a shared block is written to"
        positions = iter(tokens)
        self.memory.execute(step, lambda one: [*one.draft[:num_right], *next(positions)])
        self.forget_those_that_left()

    def blocks_come_back(self) -> bool:
        """Wait for blocks from the tier below, if there is one. Return False if none are on their way."""
        return False

    def forget_those_that_left(self) -> None:
        for one in self.open.copy():
            if one.place is Place.NOWHERE and not self.memory.is_in_flight(one):
                self.open.remove(one)
                assert len(one.token_ids) == one.max_len or one.token_ids[-1] == LAST_TOKEN
            assert LAST_TOKEN not in one.generated_ids[:-1], "it went on after its end"

    @invariant()
    def sequences_are_counted_by_adapter(self) -> None:
        counted = {}
        for adapter in {one.adapter for one in self.open} - {0}:
            places = [one.place for one in self.open if one.adapter == adapter]
            numbers = (places.count(Place.RUNNING), places.count(Place.WAITING) + places.count(Place.PARKED))
            if any(numbers):
                counted[adapter] = numbers
        assert self.scheduler.by_adapter() == counted

    @invariant()
    def consistent(self) -> None:
        self.scheduler.check_integrity()
        for background, lane in enumerate((self.scheduler.foreground, self.scheduler.background)):
            assert len(lane.running) <= self.scheduler.limits.max_running
            present = [s for s in self.open if s.place is not Place.NOWHERE and s.is_background == bool(background)]
            assert len(lane.running) + lane.num_waiting + lane.num_parked == len(present)

    def teardown(self) -> None:
        for _ in range(10_000):  # whatever happened: everybody gets to the end
            if not self.open:
                break
            self.step([[0], [1], [2], [0]])
        assert not self.open
        while self.blocks_come_back():  # Those who waited for them may have left.
            pass
        assert self.scheduler.pool.num_used == 0
        assert self.scheduler.states is None or self.scheduler.states.num_owned == 0
        self.memory.settle()
        self.consistent()


SEVERAL = {"fewest_draws": 0, "most_draws": 4}
WITHOUT_CACHE = {"prefix_cache": False}
OVERLAP = {"overlap": True}
MACHINES: dict[str, dict[str, object]] = {
    "fcfs": {},
    "without cache": WITHOUT_CACHE,
    "priority": {"policy": "priority"},
    "shortest": {"policy": "shortest"},
    "fair": {"policy": "fair"},
    "fair, with time": {"policy": "fair", "has_time": True},
    "overlap, several, fair, with time": {**OVERLAP, **SEVERAL, "policy": "fair", "has_time": True},
    "background": {"has_background": True},
    "background, with time": {"has_background": True, "has_time": True, "policy": "fair"},
    "background, overlap, several": {**OVERLAP, **SEVERAL, "has_background": True, "has_time": True, "policy": "fair"},
    "background, states": {**OVERLAP, "num_states": 4, "has_background": True, "has_time": True},
    "several": SEVERAL,
    "several, without cache": {**WITHOUT_CACHE, **SEVERAL},
    "forced": {"most_forced": 6},
    "runs": {"longest_run": 9},
    "overlap, several, runs, fair": {**OVERLAP, **SEVERAL, "longest_run": 3, "has_time": True, "policy": "fair"},
    "states": {"num_states": 4},
    "states, without cache": {**WITHOUT_CACHE, "num_states": 5},
    "overlap": OVERLAP,
    "overlap, without cache": {**OVERLAP, **WITHOUT_CACHE},
    "overlap, priority": {**OVERLAP, "policy": "priority"},
    "overlap, fair": {**OVERLAP, "policy": "fair"},
    # Steps often compute for a token that the step before does not draw.
    "overlap, at most one": {**OVERLAP, "fewest_draws": 0},
    "overlap, several": {**OVERLAP, **SEVERAL},
    "overlap, several, without cache": {**OVERLAP, **SEVERAL, **WITHOUT_CACHE},
    "overlap, several, priority": {**OVERLAP, **SEVERAL, "policy": "priority"},
    "overlap, several, fair": {**OVERLAP, **SEVERAL, "policy": "fair"},
    "overlap, several, forced": {**OVERLAP, **SEVERAL, "most_forced": 3},
    "overlap, forced": {**OVERLAP, "most_forced": 6},
    "overlap, forced, without cache": {**OVERLAP, **WITHOUT_CACHE, "most_forced": 6},
    "overlap, forced, fair": {**OVERLAP, "policy": "fair", "most_forced": 6},
    "overlap, states": {**OVERLAP, "num_states": 9, "shortest_kept": 4},
    "overlap, states, fair": {**OVERLAP, "policy": "fair", "num_states": 5},
    "overlap, states, forced": {**OVERLAP, "num_states": 9, "shortest_kept": 4, "most_forced": 6},
}


@pytest.mark.parametrize("fields", MACHINES.values(), ids=MACHINES)
def test_whatever_happens_the_promises_are_kept(fields: dict[str, object]) -> None:
    examples = int(os.environ.get("SCHEDULER_EXAMPLES", "20"))
    profile = settings(max_examples=examples, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(type("Machine", (SchedulerMachine,), fields), settings=profile)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("most_draws", [1, 4])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("policy", POLICIES)
def test_1000_steps_of_arrivals_departures_and_preemptions_leave_nothing_behind(
    policy: str, overlap: bool, most_draws: int
) -> None:
    """No sequence waits for ever. With `most_draws` above 1, a chunk draws 0 to 4 tokens, else one."""
    rng = random.Random(policy)
    memory = Memory(make(kv_blocks=24, max_running=6, max_step_tokens=16, policy=POLICIES[policy]), last_token=0)
    memory.overlap = overlap
    scheduler = memory.scheduler
    alive: dict[Sequence, int] = {}  # since which step
    num_arrived = 0

    def drawn(one: Sequence) -> list[int]:
        tokens = [rng.randrange(50) for _ in range(rng.randint(int(most_draws == 1), 4))]
        return [*one.draft[: rng.randrange(most_draws)], *tokens]

    for number in range(1_000):
        if len(alive) < 12:
            prompt = [*range(1, 1 + rng.randrange(3) * 6), *(rng.randrange(1, 50) for _ in range(rng.randint(1, 20)))]
            fields = {"priority": num_arrived // 50, "client_name": "aaab"[num_arrived % 4]}
            some = [sequence("", prompt, rng.randint(1, 24), **fields) for _ in range(rng.choice([1, 1, 3]))]
            memory.add_choices(*some)
            alive |= dict.fromkeys(some, number)
            num_arrived += len(some)
        if rng.random() < 0.02:
            gone = rng.choice(list(alive))
            memory.remove(gone)
            del alive[gone]
        for one in scheduler.running:
            one.draft = [rng.randrange(50) for _ in range(rng.randrange(most_draws))]
        if (step := scheduler.schedule()) is None:
            memory.settle()
        else:
            memory.execute(step, drawn)
        for one in list(alive):
            if one.place is Place.NOWHERE and not memory.is_in_flight(one):
                assert number - alive.pop(one) < 500
    for left in alive:
        memory.remove(left)
    scheduler.check_integrity()
    assert (scheduler.pool.num_used, scheduler.foreground.num_waiting, scheduler.foreground.num_parked) == (0, 0, 0)
    assert scheduler.foreground.num_preemptions > 25
    assert num_arrived > 250
    assert (10 < memory.num_accepted < memory.num_drafted) == (most_draws > 1)
