"""Scheduler, block pool and prefix cache, driven without a model: a memory of token ids stands for keys and values."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from oaiserve.engine.blocks import BlockPool, hash_block
from oaiserve.engine.policy import POLICIES, fcfs, priority, shortest
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.scheduler import MOST_OVERTAKEN, Limits, Scheduler
from oaiserve.engine.sequence import Place, Sequence, Step


def make(
    kv_blocks: int = 16,
    block_size: int = 4,
    max_running: int = 4,
    max_step_tokens: int = 8,
    policy: Any = fcfs,
    prefix_cache: bool = True,
    **limits: Any,
) -> Scheduler:
    pool = BlockPool(kv_blocks, block_size)
    return Scheduler(pool, Limits(max_running, max_step_tokens, **limits), policy=policy, prefix_cache=prefix_cache)


def sequence(name: str, prompt: int | list[int] = 4, max_tokens: int = 8, **fields: Any) -> Sequence:
    """With a prompt of its own where only the length is given."""
    ids = [hash((name, i)) % 10**6 for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Sequence(name, 0, ids, SamplingParams(), max_len=len(ids) + max_tokens, **fields)


class Memory:
    """Runs steps: a slot holds the token whose keys and values would be there, and everything before it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_computed = 0  # tokens, in all

    def run(self, next_token: int = 7) -> list[tuple[str, int]]:
        step = self.scheduler.schedule()
        return [] if step is None else self.execute(step, next_token)

    def execute(self, step: Step, next_token: int = 7) -> list[tuple[str, int]]:
        size = self.scheduler.pool.block_size
        copied = {
            (new, i): self.slots[old, i] for old, new in step.copies for i in range(size) if (old, i) in self.slots
        }
        self.slots |= copied
        for chunk in step.chunks:
            blocks, ids = chunk.sequence.blocks, chunk.sequence.token_ids
            for position in range(chunk.start, chunk.end):
                self.slots[blocks[position // size], position % size] = tuple(ids[: position + 1])
            self.num_computed += chunk.num_tokens
        for chunk in step.chunks:
            blocks, ids = chunk.sequence.blocks, chunk.sequence.token_ids
            for position in range(chunk.end):
                found = self.slots[blocks[position // size], position % size]
                assert found == tuple(ids[: position + 1]), f"position {position} of {chunk.sequence.request_id}"
        for chunk in step.chunks:
            self.scheduler.commit(chunk.sequence, chunk.end, next_token if chunk.samples else None)
        self.scheduler.check_integrity()
        return [(chunk.sequence.request_id, chunk.num_tokens) for chunk in step.chunks]

    def run_out(self) -> None:
        """Until nothing is left to do; sequences leave at their max_len."""
        while self.run():
            for known in list(self.scheduler.running):
                if len(known.token_ids) >= known.max_len:
                    self.scheduler.remove(known)


# -- why those that wait do --------------------------------------------------------------------------------------------


def waited(scheduler: Scheduler, one: Sequence, until_ns: int = 10_000) -> dict[str, int]:
    """By reason, from its arrival at 0 until it is in a step, with a step every 1,000 ns."""
    memory = Memory(scheduler)
    for now_ns in range(1_000, until_ns, 1_000):
        step = scheduler.schedule(now_ns)
        assert step is not None
        memory.execute(step)
        if any(chunk.sequence is one for chunk in step.chunks):
            return {str(reason): ns for reason, ns in one.waits_ns.items()}
        for known in list(scheduler.running):
            if len(known.token_ids) >= known.max_len:
                scheduler.remove(known)
    raise AssertionError("it was never in a step")


def test_one_that_comes_during_a_step_waits_for_its_end() -> None:
    scheduler, one = make(), sequence("a")
    scheduler.add(one)
    assert waited(scheduler, one) == {"step_under_way": 1_000}


def test_one_waits_for_a_place_in_the_batch() -> None:
    scheduler, one = make(max_running=1), sequence("b")
    scheduler.add(sequence("a", max_tokens=3))
    scheduler.add(one)
    assert waited(scheduler, one) == {"step_under_way": 1_000, "batch_full": 3_000}


def test_one_waits_for_the_tokens_of_a_step() -> None:
    scheduler, one = make(), sequence("b")
    scheduler.add(sequence("a", 24))
    scheduler.add(one)
    assert waited(scheduler, one) == {"step_under_way": 1_000, "token_budget": 3_000}


def test_one_waits_for_blocks_and_the_one_behind_it_for_others() -> None:
    scheduler, big, small = make(kv_blocks=6, lookahead=0), sequence("b", 20, 3), sequence("c", 2)
    scheduler.add(sequence("a", 8, max_tokens=3))
    scheduler.add(big)
    scheduler.add(small)
    waits_ns = waited(scheduler, small)
    assert waits_ns == {"step_under_way": 1_000, "token_budget": 3_000, "behind_others": 2_000}
    assert {str(reason): ns for reason, ns in big.waits_ns.items()} == {
        "step_under_way": 1_000,
        "token_budget": 1_000,
        "no_blocks": 2_000,
    }


def test_one_waits_for_another_that_computes_the_same_prefix() -> None:
    scheduler = make(max_step_tokens=8, max_running=8)
    prefix = list(range(20))
    one = sequence("b", [*prefix, 100])
    scheduler.add(sequence("a", [*prefix, 200, 201]))
    scheduler.add(one)
    waits_ns = waited(scheduler, one)
    assert set(waits_ns) <= {"step_under_way", "token_budget", "same_prefix"}
    assert waits_ns["same_prefix"] >= 1_000


# -- order and budget -------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_no_step() -> None:
    assert make().schedule() is None


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget() -> None:
    scheduler = make()
    memory = Memory(scheduler)
    scheduler.add(sequence("a", 20))
    assert [memory.run() for _ in range(4)] == [[("a", 8)], [("a", 8)], [("a", 4)], [("a", 1)]]


def test_decodes_come_first_and_prefill_gets_the_rest_of_the_budget() -> None:
    scheduler = make()
    memory = Memory(scheduler)
    scheduler.add(sequence("a"))
    memory.run()
    scheduler.add(sequence("b", 20))
    assert memory.run() == [("a", 1), ("b", 7)]


def test_prefill_can_have_a_budget_of_its_own() -> None:
    scheduler = make(max_step_tokens=64, prefill_max_tokens=6, prefill_max_requests=2)
    memory = Memory(scheduler)
    for name in "abc":
        scheduler.add(sequence(name, 3))
    assert memory.run() == [("a", 3), ("b", 3)]
    assert memory.run() == [("a", 1), ("b", 1), ("c", 3)]


def test_max_running_bounds_admission() -> None:
    scheduler = make(max_running=2)
    for name in "abc":
        scheduler.add(sequence(name, 2))
    assert Memory(scheduler).run() == [("a", 2), ("b", 2)]


def test_one_that_does_not_fit_lets_a_bounded_number_pass() -> None:
    scheduler = make(kv_blocks=4, block_size=64, max_step_tokens=512, lookahead=1)
    memory = Memory(scheduler)
    first, big = sequence("first", 66, 60), sequence("big", 190, 1)
    scheduler.add(first)
    scheduler.add(big)
    for i in range(MOST_OVERTAKEN + 5):
        scheduler.add(sequence(f"small{i}", 2, 1))
    passed = 0
    for _ in range(100):
        admitted = [name for name, _ in memory.run() if name.startswith("small")]
        passed += len(admitted)
        for known in [s for s in scheduler.running if s is not first]:
            scheduler.remove(known)
        if not admitted:
            break
    assert passed == MOST_OVERTAKEN
    scheduler.remove(first)
    assert memory.run()[0] == ("big", 190)


def test_without_lookahead_nobody_overtakes() -> None:
    scheduler = make(kv_blocks=4, max_step_tokens=64, lookahead=0)
    for name, prompt_len in (("a", 8), ("b", 12), ("c", 1)):
        scheduler.add(sequence(name, prompt_len, 1))
    assert Memory(scheduler).run() == [("a", 8)]


def test_priority_takes_the_lowest_number_first() -> None:
    scheduler = make(max_running=1, policy=priority)
    for name, number in (("low", 5), ("high", -1), ("high too", -1)):
        scheduler.add(sequence(name, 2, 1, priority=number))
    memory, order = Memory(scheduler), []
    while admitted := memory.run():
        order += [name for name, _ in admitted]
        scheduler.remove(scheduler.running[0])
    assert order == ["high", "high too", "low"]


def test_shortest_takes_the_shortest_first_until_a_long_one_has_waited_enough() -> None:
    scheduler = make(max_running=1, max_step_tokens=512, kv_blocks=256, policy=shortest)
    scheduler.add(sequence("running", 1, 1))
    memory, order = Memory(scheduler), []
    memory.run()
    scheduler.add(sequence("long", 320, 1))
    for i in range(20):
        scheduler.add(sequence(f"s{i}", 1, 1))
    for _ in range(21):
        scheduler.remove(scheduler.running[0])
        order += [name for name, _ in memory.run()]
    assert order.index("long") == 9  # 319 tokens longer, 32 a place: nine went before it


def test_a_budget_below_one_token_for_each_running_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_step_tokens \(4\) must be at least max_running \(8\)"):
        make(max_running=8, max_step_tokens=4)


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="can never fit"):
        make(kv_blocks=1).add(sequence("a", 8))


# -- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_without_a_free_block_the_youngest_gives_way_and_is_computed_again(prefix_cache: bool) -> None:
    scheduler = make(kv_blocks=2, max_step_tokens=16, prefix_cache=prefix_cache)
    memory = Memory(scheduler)
    old, young = sequence("old", 4, 4), sequence("young", 4, 4)
    scheduler.add(old)
    scheduler.add(young)
    memory.run()
    assert memory.run() == [("old", 1)]  # both want a second block, none is free
    assert (young.num_preemptions, young.place, young.blocks) == (1, Place.WAITING, [])
    while old.num_generated < 4:
        memory.run()
    scheduler.remove(old)
    assert memory.run() == [("young", 5)]  # its prompt and the token that it had: its block was needed


def test_what_a_preempted_sequence_had_computed_is_found_again_where_there_was_room() -> None:
    scheduler = make(kv_blocks=6, max_step_tokens=32)
    memory = Memory(scheduler)
    old, young = sequence("old", 12, 8), sequence("young", 12, 2)
    scheduler.add(old)
    scheduler.add(young)
    while young.num_preemptions == 0:
        memory.run()
    scheduler.remove(old)
    assert memory.run() == [("young", 5)]  # of 13 known tokens; the first two blocks stayed


# -- prefix cache -----------------------------------------------------------------------------------------------------


def test_a_prompt_that_begins_like_an_earlier_one_is_computed_from_where_they_part() -> None:
    scheduler = make()
    memory = Memory(scheduler)
    scheduler.add(sequence("a", [1, 2, 3, 4, 5, 6, 7, 8], 1))
    memory.run_out()
    hit = sequence("b", [1, 2, 3, 4, 5, 6, 7, 9], 1)
    scheduler.add(hit)
    assert memory.run() == [("b", 4)]
    assert hit.num_cached == 4


def test_the_last_token_is_always_computed() -> None:
    scheduler = make()
    memory = Memory(scheduler)
    for name in "ab":
        scheduler.add(sequence(name, [1, 2, 3, 4, 5, 6, 7, 8], 1))
        memory.run_out()
    assert memory.num_computed == 8 + 4


@pytest.mark.parametrize("fields", [{"cache_salt": "other"}, {}], ids=["another salt", "switched off"])
def test_nothing_is_shared_across_salts_or_without_the_cache(fields: dict[str, str]) -> None:
    scheduler = make(prefix_cache=bool(fields))
    memory = Memory(scheduler)
    scheduler.add(sequence("a", [1] * 8, 1))
    memory.run_out()
    scheduler.add(sequence("b", [1] * 8, 1, **fields))
    assert memory.run() == [("b", 8)]


def test_prompt_logprobs_need_every_position_computed() -> None:
    scheduler = make()
    memory = Memory(scheduler)
    scheduler.add(sequence("a", [1] * 8, 1))
    memory.run_out()
    asking = sequence("b", [1] * 8, 1)
    asking.wants_prompt_logprobs = True
    scheduler.add(asking)
    assert memory.run() == [("b", 8)]


def test_64_that_arrive_together_compute_their_common_prefix_once() -> None:
    prefix = list(range(512))
    scheduler = make(kv_blocks=400, block_size=16, max_running=64, max_step_tokens=256)
    memory = Memory(scheduler)
    for i in range(64):
        scheduler.add(sequence(f"{i}", [*prefix, 1000 + i, 2000 + i], 1))
    memory.run_out()
    assert memory.num_computed == 512 + 64 * 2


def test_followers_go_on_by_themselves_when_their_leader_leaves() -> None:
    scheduler = make(kv_blocks=64, max_step_tokens=64)
    leader, follower = sequence("leader", [1] * 24, 1), sequence("follower", [*[1] * 24, 2], 1)
    scheduler.add(leader)
    scheduler.add(follower)
    scheduler.schedule()
    assert follower.place is Place.PARKED
    scheduler.remove(leader)
    assert Memory(scheduler).run() == [("follower", 25)]


def test_blocks_unused_for_longest_are_taken_first() -> None:
    pool = BlockPool(3, 1)
    blocks = pool.allocate(3)
    assert blocks == [0, 1, 2]
    for block in (1, 0):
        pool.publish(block, hash_block(None, [block]))
    for block in (1, 2, 0):
        pool.release([block])
    assert [pool.allocate(1) for _ in range(3)] == [[2], [1], [0]]


def test_a_block_released_once_too_often_is_noticed() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="once too often"):
        pool.release(blocks)


# -- choices of one prompt --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 11])
def test_choices_of_a_prompt_compute_it_once_and_copy_where_they_part(prompt_len: int, prefix_cache: bool) -> None:
    scheduler = make(kv_blocks=64, max_running=8, max_step_tokens=64, prefix_cache=prefix_cache)
    memory = Memory(scheduler)
    prompt = list(range(prompt_len))
    choices = [sequence(f"{i}", prompt, 6) for i in range(4)]
    for choice in choices:
        scheduler.add(choice, None if choice is choices[0] else choices[0])
    token = 100
    while any(choice.place is not Place.NOWHERE for choice in choices):
        step = scheduler.schedule()
        assert step is not None
        for chunk in step.chunks:  # each choice goes its own way, so shared blocks would show
            token += 1
            chunk.sequence.token_ids[-1:] = (
                [token] if chunk.sequence.num_generated and chunk.samples else chunk.sequence.token_ids[-1:]
            )
        memory.execute(step, next_token=token)
        for choice in choices:
            if len(choice.token_ids) == choice.max_len:
                scheduler.remove(choice)
    # The prompt once, its last token again for each other choice, and five of six answer tokens for each.
    assert memory.num_computed == prompt_len + 3 + 4 * 5
    assert scheduler.pool.num_used == 0


# -- everything at once -----------------------------------------------------------------------------------------------


class SchedulerMachine(RuleBasedStateMachine):
    """Any mix of arrivals, steps and departures keeps the promises of scheduler, pool and cache."""

    policy, prefix_cache = "fcfs", True

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make(
            kv_blocks=8, max_running=4, max_step_tokens=6, policy=POLICIES[self.policy], prefix_cache=self.prefix_cache
        )
        self.memory = Memory(self.scheduler)
        self.open: list[Sequence] = []
        self.num_steps = 0
        self.now_ns = 0
        self.arrived_ns: dict[Sequence, int] = {}  # of those that have not been in a step

    @rule(
        shared=st.integers(0, 12),
        own=st.integers(1, 9),
        max_tokens=st.integers(1, 10),
        choices=st.sampled_from([1, 1, 2, 3]),
        number=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "a"]),
    )
    def arrive(self, shared: int, own: int, max_tokens: int, choices: int, number: int, salt: str) -> None:
        prompt = [*range(shared), *(100 + i % 2 for i in range(own))]
        leader = None
        self.now_ns += 3
        for choice in range(choices):
            name = f"{len(self.open)}.{choice}"
            self.open.append(sequence(name, prompt, max_tokens, priority=number, cache_salt=salt))
            self.scheduler.add(self.open[-1], leader, since_ns=self.now_ns)
            self.arrived_ns[self.open[-1]] = self.now_ns
            leader = leader or self.open[-1]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.open))
        self.open.remove(gone)
        if (arrived_ns := self.arrived_ns.pop(gone, None)) is not None:
            assert sum(self.scheduler.waits.settle(gone, self.now_ns).values()) == self.now_ns - arrived_ns
        self.scheduler.remove(gone)
        assert (gone.blocks, gone.place) == ([], Place.NOWHERE)

    @rule(next_token=st.integers(0, 3), took_ns=st.integers(0, 9))
    def step(self, next_token: int = 0, took_ns: int = 1) -> None:
        self.now_ns += took_ns
        step = self.scheduler.schedule(self.now_ns)
        assert (step is None) == (not self.open), "there is always something to compute, or deadlock"
        if step is None:
            return
        self.num_steps += 1
        for chunk in step.chunks:
            if (arrived_ns := self.arrived_ns.pop(chunk.sequence, None)) is not None:
                waits_ns = chunk.sequence.waits_ns
                assert sum(waits_ns.values()) == self.now_ns - arrived_ns, "every nanosecond of waiting has a reason"
                assert all(ns > 0 for ns in waits_ns.values())
        assert step.num_tokens <= self.scheduler.limits.max_step_tokens
        ones = [chunk.num_tokens == 1 for chunk in step.chunks]
        assert ones == sorted(ones, reverse=True), "chunks of one token come first"
        assert len({id(chunk.sequence) for chunk in step.chunks}) == len(step.chunks)
        written = [
            (chunk.sequence.blocks[p // 4], p % 4) for chunk in step.chunks for p in range(chunk.start, chunk.end)
        ]
        assert len(written) == len(set(written)), "two sequences write to one place"
        assert all(self.scheduler.pool.is_writable(block) for block, _ in written), "a shared block is written to"
        self.memory.execute(step, next_token)
        for chunk in step.chunks:
            if len(chunk.sequence.token_ids) == chunk.sequence.max_len:
                self.scheduler.remove(chunk.sequence)
                self.open.remove(chunk.sequence)

    @invariant()
    def consistent(self) -> None:
        self.scheduler.check_integrity()
        scheduler = self.scheduler
        assert len(scheduler.running) <= scheduler.limits.max_running
        assert len(scheduler.running) + scheduler.num_waiting + scheduler.num_parked == len(self.open)

    def teardown(self) -> None:
        for _ in range(10_000):  # whatever happened: everybody gets to the end
            if not self.open:
                break
            self.step()
        assert not self.open
        assert self.scheduler.pool.num_used == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_life_of_arrivals_departures_and_preemptions_ends_empty(policy: str) -> None:
    """35,000 steps for each policy; nobody waits for ever."""
    rng = random.Random(policy)
    scheduler = make(kv_blocks=24, max_running=6, max_step_tokens=16, policy=POLICIES[policy])
    alive: dict[Sequence, int] = {}  # since which step
    num_arrived = 0
    for number in range(35_000):
        if len(alive) < 12:
            prompt = [*range(rng.randrange(3) * 6), *(rng.randrange(50) for _ in range(rng.randint(1, 20)))]
            leader = None
            for _ in range(rng.choice([1, 1, 3])):
                made = sequence(f"{num_arrived}", prompt, rng.randint(1, 24), priority=num_arrived // 50)
                scheduler.add(made, leader)
                leader, alive[made], num_arrived = leader or made, number, num_arrived + 1
        if rng.random() < 0.02:
            gone = rng.choice(list(alive))
            scheduler.remove(gone)
            del alive[gone]
        step = scheduler.schedule()
        assert step is not None or not alive
        for chunk in step.chunks if step else ():
            scheduler.commit(chunk.sequence, chunk.end, rng.randrange(50) if chunk.samples else None)
            if len(chunk.sequence.token_ids) >= chunk.sequence.max_len:
                scheduler.remove(chunk.sequence)
                assert number - alive.pop(chunk.sequence) < 2_000
        if number % 25 == 0:
            scheduler.check_integrity()
    for left in list(alive):
        scheduler.remove(left)
    scheduler.check_integrity()
    assert (scheduler.pool.num_used, scheduler.num_waiting, scheduler.num_parked) == (0, 0, 0)
    assert scheduler.num_preemptions > 100
    assert num_arrived > 2_000


class WithoutCache(SchedulerMachine):
    prefix_cache = False


class ByPriority(SchedulerMachine):
    policy = "priority"


class ShortestFirst(SchedulerMachine):
    policy = "shortest"


MACHINES = (SchedulerMachine, WithoutCache, ByPriority, ShortestFirst)
for machine in MACHINES:
    examples = int(os.environ.get("SCHEDULER_EXAMPLES", "60"))
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=50, deadline=None)
TestFCFS, TestWithoutCache, TestByPriority, TestShortestFirst = (machine.TestCase for machine in MACHINES)
