"""The host pool below the KV blocks: what is evicted comes back, and answers are those of a server without it."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from oaiserve.config import Bytes, EngineOptions, OptionError
from oaiserve.engine.model import block_copies
from oaiserve.engine.model.block_copies import BlockCopies
from oaiserve.engine.request import Finished, Request, TokenPrompt
from oaiserve.engine.sequences.blocks import BlockHash, BlockPool, hash_block
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.engine.sequences.step import Step, StepResult
from oaiserve.engine.tiers import host_pool
from oaiserve.engine.tiers.host_pool import HostPool
from oaiserve.engine.tiers.lower_tier import BlocksArrived
from oaiserve.errors import StartupError
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import WaitReason
from oaiserve.runtime import Runtime
from tests.engine.answers import collect
from tests.engine.device import Device, check_answers, some_requests
from tests.engine.doubles import Launched
from tests.engine.executors.fake_gpu import GPU, watched
from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.engine.in_world import started_in
from tests.engine.late_device import LateCache
from tests.engine.memory import Memory, make, sequence
from tests.engine.model.runners import greedy, greedy_answers
from tests.engine.remembered import save, started
from tests.engine.test_scheduler_machines import LAST_TOKEN, SEVERAL, SchedulerMachine
from tests.world.loop import World
from tests.world.schedules import schedules

BLOCK_SIZE = 4
BLOCK_BYTES = 3 * 8 * BLOCK_SIZE  # those of a LateCache


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore single blocks, save up to three together, and copy two at a time."""
    monkeypatch.setattr(host_pool, "SAVED_TOGETHER", 3)
    monkeypatch.setattr(host_pool, "LEAST_RESTORED", BLOCK_SIZE)
    monkeypatch.setattr(block_copies, "PIECE_BYTES", 2 * BLOCK_BYTES)


# -- the pool on a device whose streams are late -----------------------------------------------------------------------


class LateMemory(Memory):
    """A device with late streams, and a host pool below its blocks."""

    def __init__(self, world: World, num_slots: int, last_token: int | None = None, **options: Any) -> None:
        self.world = world
        self.arrived: deque[BlocksArrived] = deque()  # The engine thread has not taken these yet.
        scheduler = make(**options, make_tier=lambda pool: self._make_tier(num_slots, pool))
        super().__init__(scheduler, last_token=last_token, cache=self.cache)

    def _make_tier(self, num_slots: int, pool: Any) -> HostPool:
        self.cache = LateCache(pool.num_blocks, pool.block_size, num_slots)
        self.tier = HostPool(self.cache.copies, pool, self.arrived.append, self.world)
        self.tier.start()
        return self.tier

    def _commit(self, step: Step, drawn: Any) -> None:
        self.cache.collect(step)
        super()._commit(step, drawn)

    def come_back(self) -> bool:
        """Take the blocks that come back next. Return False if there are none."""
        if not self.world.run_until(lambda: bool(self.arrived)):
            return False
        self.scheduler.take_arrived(self.arrived.popleft())
        return True

    def run_to_the_end(self) -> None:
        self.run_out()
        while self.come_back():
            self.run_out()


class HostPoolMachine(SchedulerMachine):
    """The machine of the scheduler, with a host pool whose copies end at any time that they may."""

    num_slots = 6
    num_hits = 0

    def make_memory(self, **options: Any) -> Memory:
        self.world = World(0)
        self.device = LateMemory(self.world, self.num_slots, LAST_TOKEN, **options)
        return self.device

    def blocks_come_back(self) -> bool:
        return self.device.come_back()

    @precondition(lambda self: self.device.tier.on_their_way)
    @rule()
    def come_back(self) -> None:
        self.device.come_back()

    @rule(number=st.integers(0, 2), times=st.integers(1, 9))
    def go_on(self, number: int, times: int) -> None:
        for _ in range(times):
            self.device.cache.streams[number].go_on()

    @invariant()
    def no_slot_is_lost(self) -> None:
        self.device.tier.check_integrity()

    def teardown(self) -> None:
        super().teardown()
        self.world.close()


MACHINES: dict[str, dict[str, object]] = {
    "in turn": {},
    "overlap": {"overlap": True},
    "overlap, few slots, fair": {"overlap": True, "num_slots": 2, "policy": "fair"},
    "overlap, several, background": {**SEVERAL, "overlap": True, "has_background": True, "has_time": True},
    "overlap, forced": {"overlap": True, "most_forced": 6},
}


@pytest.mark.parametrize("fields", MACHINES.values(), ids=MACHINES)
def test_whatever_happens_each_sequence_reads_its_own_keys(fields: dict[str, object]) -> None:
    examples = int(os.environ.get("SCHEDULER_EXAMPLES", "20"))
    profile = settings(max_examples=examples, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(type("Machine", (HostPoolMachine,), fields), settings=profile)  # type: ignore[no-untyped-call]


class LateDevice(Device):
    """A device that computes what `Device` does, with a LateCache. Steps begin before the results of the one before."""

    is_asynchronous = True

    def __init__(self, num_blocks: int, num_slots: int, seed: int) -> None:
        super().__init__()
        self._cache = self.cache = LateCache(num_blocks, BLOCK_SIZE, num_slots)
        self._chance = random.Random(seed)

    def launch(self, step: Step) -> Launched:
        for stream in self.cache.streams:
            for _ in range(self._chance.randrange(4)):
                stream.go_on()
        return super().launch(step)

    def collect(self, launched: Launched) -> StepResult:
        self.cache.collect(launched.step)
        return super().collect(launched)


def test_clients_get_the_same_under_evictions_preemptions_and_cancellations() -> None:
    """The reference is a device with so much memory that nothing is evicted."""
    tiers: list[HostPool] = []

    def make_tier(
        copies: BlockCopies, pool: BlockPool, post: Callable[[BlocksArrived], None], runtime: Runtime
    ) -> HostPool:
        tiers.append(HostPool(copies, pool, post, runtime))
        return tiers[-1]

    for seed in range(4):
        rng = random.Random(seed)
        device = LateDevice(24, num_slots=30, seed=seed)
        options = {"kv_blocks": 24, "make_tier": partial(make_tier, device.cache.copies)}
        check_answers(rng, some_requests(rng), device, share_leaving=0.2, **options)
        assert device.cache.num_checked > 1000
        assert shown(tiers[-1]).offload_out_bytes > 50 * BLOCK_BYTES
    assert sum(shown(tier).num_offload_hits for tier in tiers) > 4


@schedules(40)
def test_whenever_blocks_come_back_or_the_pool_stops_each_sequence_reads_its_own_keys(world: World) -> None:
    draw = world.random
    memory = memory_with(world, num_slots=draw.choice([2, 6, 30]), kv_blocks=10)
    prompts = [list(range(first, first + 17)) for first in (40, 60, 80)]

    def go_on() -> None:
        draw.choice(memory.cache.streams).go_on()

    for number in range(12):
        memory.add(sequence(f"{number}", draw.choice(prompts)[: draw.randint(5, 17)], draw.randint(1, 4)))
        for _ in range(draw.randrange(8)):
            memory.run()
            world.call_later(0.01 * draw.random(), go_on)
            world.run_until(most_seconds=0.01 * draw.random())
            if memory.arrived and draw.random() < 0.5:
                memory.scheduler.take_arrived(memory.arrived.popleft())
            memory.tier.check_integrity()
    if draw.random() < 0.5:
        memory.run_to_the_end()
        assert not memory.tier.on_their_way
        assert memory.scheduler.pool.num_used == 0
    memory.tier.stop()
    assert not memory.tier._waiter.is_alive
    assert not memory.tier._waiter.num_waiting()
    memory.tier.check_integrity()
    memory.scheduler.check_integrity()
    assert not world.wrong


def shown(tier: HostPool) -> EngineNumbers:
    numbers = EngineNumbers()
    tier.show(numbers)
    return numbers


def memory_with(world: World, *, num_slots: int = 16, kv_blocks: int = 8, **options: Any) -> LateMemory:
    memory = LateMemory(world, num_slots, kv_blocks=kv_blocks, **options)
    memory.overlap = True
    return memory


def ended(memory: LateMemory, *sequences: Sequence) -> None:
    """Compute sequences until they leave."""
    memory.add(*sequences)
    memory.run_to_the_end()
    assert all(one.place is Place.NOWHERE for one in sequences)


PROMPT = list(range(40, 57))  # four full blocks, and one token
OTHER = list(range(70, 100))  # takes all blocks


@schedules(3)
def test_an_evicted_prompt_comes_back_and_is_not_computed(world: World) -> None:
    memory = memory_with(world)
    ended(memory, sequence("a", PROMPT, 2))
    ended(memory, sequence("b", OTHER, 2))
    computed_before = memory.num_computed
    again = sequence("c", PROMPT, 2)
    memory.add(again)
    assert again.place is Place.WAITING
    assert not memory.tier.on_their_way, "nothing comes back before its turn"
    assert memory.run() == []
    assert again.place is Place.PARKED, "the prompt waits in the queue, and other sequences would go on"
    memory.run_to_the_end()
    assert (again.num_cached, again.num_restored) == (16, 16)
    assert memory.num_computed - computed_before == 2


@schedules(3)
def test_only_tokens_that_memory_had_lost_count_as_restored(world: World) -> None:
    memory = memory_with(world)
    ended(memory, sequence("a", PROMPT, 2))
    ended(memory, sequence("b", OTHER, 2))
    beginning = sequence("c", PROMPT[:9], 2)
    ended(memory, beginning)
    assert (beginning.num_cached, beginning.num_restored) == (8, 8)
    whole = sequence("d", PROMPT, 2)
    ended(memory, whole)
    assert (whole.num_cached, whole.num_restored) == (16, 8)
    again = sequence("e", PROMPT, 2)
    ended(memory, again)
    assert (again.num_cached, again.num_restored) == (16, 0)


@schedules(3)
def test_another_salt_finds_nothing(world: World) -> None:
    memory = memory_with(world)
    ended(memory, sequence("a", PROMPT, 2, cache_salt="one"))
    ended(memory, sequence("b", OTHER, 2))
    for salt, num_cached in (("another", 0), ("", 0), ("one", 16)):
        again = sequence("c", PROMPT, 2, cache_salt=salt)
        ended(memory, again)
        assert again.num_cached == num_cached, salt


@schedules(3)
def test_a_preempted_sequence_gets_its_blocks_back(world: World) -> None:
    memory = memory_with(world, kv_blocks=10, max_step_tokens=32)
    first = sequence("a", PROMPT, 20)
    second = sequence("b", OTHER[:14], 20)
    memory.add(first, second)
    memory.run_to_the_end()
    assert first.num_preemptions + second.num_preemptions > 0
    numbers = shown(memory.tier)
    assert numbers.num_offload_hits > 0


@pytest.mark.parametrize("length", [13, 16])
@schedules(3)
def test_a_prompt_without_room_gets_its_blocks_when_there_is_room(world: World, length: int) -> None:
    """The shorter one leaves room for the blocks that come back, and none for the rest of the prompt."""
    memory = memory_with(world, max_step_tokens=32)
    ended(memory, sequence("a", PROMPT, 2))
    ended(memory, sequence("b", OTHER, 2))
    long = sequence("c", list(range(110, 110 + length)), 8)
    memory.add(long)
    memory.run()
    again = sequence("d", PROMPT, 2)
    memory.add(again)
    memory.run()
    assert not memory.tier.on_their_way
    assert again.place is Place.WAITING
    memory.run_to_the_end()
    assert again.num_cached == 16


@schedules(3)
def test_two_prompts_wait_for_the_same_blocks_and_one_may_leave(world: World) -> None:
    memory = memory_with(world)
    ended(memory, sequence("a", PROMPT, 2))
    ended(memory, sequence("b", OTHER, 2))
    one = sequence("c", PROMPT, 2)
    other = sequence("d", PROMPT, 2)
    memory.add(one, other)
    memory.run()
    memory.remove(one)
    memory.run_to_the_end()
    assert (other.num_cached, other.num_restored) == (16, 16)
    assert memory.scheduler.pool.num_used == 0
    numbers = shown(memory.tier)
    assert (numbers.num_offload_hits, numbers.offload_in_bytes) == (1, 4 * BLOCK_BYTES)


@schedules(3)
def test_the_least_recently_used_blocks_make_room_and_a_prefix_loses_its_last_ones_first(world: World) -> None:
    memory = memory_with(world, num_slots=6)
    ended(memory, sequence("a", PROMPT, 2))
    ended(memory, sequence("b", OTHER, 2))
    ended(memory, sequence("c", list(range(110, 140)), 2))
    numbers = shown(memory.tier)
    assert numbers.num_offloaded == 6
    again = sequence("d", OTHER, 2)
    ended(memory, again)
    assert again.num_cached == 24, "six of its blocks"
    again = sequence("e", PROMPT, 2)
    ended(memory, again)
    assert again.num_cached == 0


class Pool:
    """A pool of two blocks with a host pool below it, on late streams. A test takes the place of the steps."""

    def __init__(self, world: World, num_slots: int = 4) -> None:
        self.world = world
        self.cache = LateCache(2, BLOCK_SIZE, num_slots)
        self.pool = BlockPool(2, BLOCK_SIZE)
        self.arrived: deque[BlocksArrived] = deque()
        self.tier = HostPool(self.cache.copies, self.pool, self.arrived.append, world)
        self.tier.start()
        self.num_steps = 0  # that have been computed

    def compute(self, content: int) -> BlockHash:
        """Launch a step that fills a block, and publish it."""
        blocks = self.pool.allocate(1)
        assert blocks is not None

        def step() -> None:
            for tensor in self.cache.tensors:
                tensor[blocks[0]] = content
            self.num_steps += 1

        self.tier.flush()
        self.cache.streams.steps.run(step)
        block_hash = hash_block(None, [content])
        self.pool.publish(blocks[0], block_hash)
        self.tier.offer(blocks[0], block_hash, None)
        self.pool.release(blocks)
        return block_hash

    def evict(self) -> None:
        """Let another step overwrite both blocks, and copies to the host go as far as they may."""
        blocks = self.pool.allocate(2)
        assert blocks is not None
        self.tier.flush()
        for _ in range(9):
            self.cache.streams.out.go_on()
        self.cache.streams.steps.run(lambda: [tensor.fill_(-1) for tensor in self.cache.tensors])
        self.pool.release(blocks)

    def restored(self, block_hash: BlockHash) -> list[int]:
        """Return the content of a block that comes back, in each layer."""
        assert self.ask(block_hash) == block_hash
        self.come_back()
        return self.content(block_hash)

    def come_back(self) -> None:
        """Take the blocks that come back next."""
        assert self.world.run_until(lambda: bool(self.arrived))
        self.arrived.popleft().take()

    def ask(self, *hashes: BlockHash, num_in_memory: int = 0, one: Sequence | None = None) -> BlockHash | None:
        """Ask for blocks as a sequence of this many blocks whose turn it is."""
        one = one or sequence("a", BLOCK_SIZE * len(hashes))
        one.place = Place.WAITING
        return self.tier.ask(one, [*hashes], num_in_memory)

    def content(self, block_hash: BlockHash) -> list[int]:
        block = self.pool.find(block_hash)
        assert block is not None
        return [int(tensor[block, 0]) for tensor in self.cache.tensors]


@schedules(3)
def test_a_block_of_the_step_that_runs_is_saved_after_it(world: World) -> None:
    pool = Pool(world)
    block_hash = pool.compute(7)
    pool.evict()
    assert pool.num_steps == 1
    assert pool.restored(block_hash) == [7] * 3


@schedules(3)
def test_saving_an_older_block_does_not_wait_for_the_step_that_runs(world: World) -> None:
    pool = Pool(world)
    older = pool.compute(7)
    pool.compute(8)
    blocks = pool.pool.allocate(1)
    assert blocks is not None
    pool.tier.flush()
    for _ in range(9):
        pool.cache.streams.out.go_on()
    assert pool.num_steps == 1, "the second step has not been computed yet"
    pool.pool.release(blocks)
    assert pool.restored(older) == [7] * 3


@schedules(3)
def test_blocks_that_are_evicted_next_are_saved_together(world: World) -> None:
    pool = Pool(world)
    hashes = [pool.compute(7), pool.compute(8)]
    pool.tier.flush()
    blocks = pool.pool.allocate(1)
    assert blocks is not None
    pool.tier.flush()
    assert shown(pool.tier).offload_out_bytes == 2 * BLOCK_BYTES
    pool.pool.release(blocks)
    pool.evict()
    assert shown(pool.tier).offload_out_bytes == 2 * BLOCK_BYTES
    assert [pool.restored(block_hash) for block_hash in hashes] == [[7] * 3, [8] * 3]


@schedules(3)
def test_a_block_that_is_computed_and_evicted_again_while_it_comes_back_has_one_slot(world: World) -> None:
    pool = Pool(world)
    block_hash = pool.compute(7)
    pool.evict()
    assert pool.ask(block_hash) == block_hash
    assert pool.compute(7) == block_hash
    pool.compute(8)
    pool.come_back()
    pool.tier.check_integrity()
    assert pool.content(block_hash) == [7] * 3


@schedules(3)
def test_a_block_comes_back_after_the_steps_that_were_launched_before(world: World) -> None:
    pool = Pool(world)
    block_hash = pool.compute(7)
    pool.evict()
    blocks = pool.pool.allocate(2)
    assert blocks is not None
    pool.cache.streams.steps.run(lambda: [tensor.fill_(99) for tensor in pool.cache.tensors])
    pool.pool.release(blocks)
    assert pool.ask(block_hash) == block_hash
    pool.come_back()
    pool.cache.streams.steps.mark().synchronize()
    assert pool.content(block_hash) == [7] * 3


@schedules(3)
def test_a_block_that_makes_room_for_one_that_comes_back_is_saved_before(world: World) -> None:
    pool = Pool(world)
    first = pool.compute(7)
    second = pool.compute(8)
    pool.evict()
    third = pool.compute(9)
    pool.compute(10)
    assert pool.restored(first) == [7] * 3
    pool.evict()
    assert pool.restored(third) == [9] * 3
    assert pool.restored(second) == [8] * 3


@schedules(3)
def test_cached_blocks_before_those_that_come_back_stay(world: World) -> None:
    pool = Pool(world)
    first = pool.compute(7)
    second = pool.compute(8)
    pool.evict()
    assert pool.restored(first) == [7] * 3
    assert pool.ask(first, second, num_in_memory=1) == second
    assert sorted(pool.tier.held) == [0, 1]
    pool.come_back()
    assert pool.content(first) == [7] * 3


@schedules(3)
def test_a_sequence_asks_once_for_what_it_may_lose_again(world: World) -> None:
    pool = Pool(world)
    block_hash = pool.compute(7)
    pool.evict()
    one = sequence("a", BLOCK_SIZE)
    assert pool.ask(block_hash, one=one) == block_hash
    pool.come_back()
    pool.evict()
    assert pool.ask(block_hash, one=one) is None
    assert pool.restored(block_hash) == [7] * 3, "another sequence may ask"


@schedules(3)
def test_the_block_that_was_used_last_keeps_its_slot(world: World) -> None:
    pool = Pool(world, num_slots=2)
    first = pool.compute(7)
    second = pool.compute(8)
    pool.evict()
    assert pool.restored(first) == [7] * 3
    assert pool.restored(second) == [8] * 3
    block = pool.pool.find(first)
    assert block is not None
    pool.pool.allocate(0, [block])
    pool.pool.release([block])
    pool.evict()
    pool.compute(9)
    pool.evict()
    assert pool.ask(second) is None
    assert pool.restored(first) == [7] * 3


@schedules(3)
def test_few_tokens_are_computed_and_not_restored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "LEAST_RESTORED", 2 * BLOCK_SIZE)
    memory = memory_with(world)
    ended(memory, sequence("a", PROMPT, 2))
    ended(memory, sequence("b", OTHER, 2))
    ended(memory, sequence("c", PROMPT[: BLOCK_SIZE + 1], 2))
    assert shown(memory.tier).num_offload_hits == 0
    ended(memory, sequence("d", PROMPT[: 3 * BLOCK_SIZE + 1], 2))
    assert shown(memory.tier).num_offload_hits == 1


@schedules(3)
def test_a_preempted_sequence_may_ask_again(world: World) -> None:
    memory = memory_with(world, kv_blocks=10, max_step_tokens=32)
    ended(memory, sequence("a", PROMPT, 2))
    ended(memory, sequence("b", list(range(110, 148)), 2))
    again = sequence("d", PROMPT, 20)
    memory.add(sequence("c", OTHER[:6], 26), again)
    memory.run()
    assert memory.come_back()
    memory.run_to_the_end()
    assert (again.num_cached, again.num_restored) == (16, 16)
    assert again.num_preemptions > 0
    assert shown(memory.tier).num_offload_hits > 1


@schedules(3)
def test_background_work_waits_for_its_blocks_and_goes_on(world: World) -> None:
    memory = memory_with(world)
    ended(memory, sequence("a", PROMPT, 2))
    ended(memory, sequence("b", OTHER, 2))
    again = sequence("c", PROMPT, 2, is_background=True)
    ended(memory, again)
    assert (again.num_cached, again.num_restored) == (16, 16)


@schedules(3)
def test_blocks_without_room_keep_their_slots(world: World) -> None:
    """There is room for the whole sequence only with its cached blocks."""
    memory = memory_with(world)
    prompt = list(range(40, 65))
    ended(memory, sequence("a", prompt, 2))
    ended(memory, sequence("b", OTHER, 2))
    ended(memory, sequence("c", prompt[:9], 2))
    memory.add(sequence("d", list(range(110, 119)), 3))
    memory.run()
    again = sequence("e", prompt, 2)
    memory.add(again)
    memory.run()
    memory.tier.check_integrity()
    memory.run_to_the_end()
    memory.tier.check_integrity()
    assert (again.num_cached, again.num_restored) == (24, 16)


@schedules(3)
def test_a_copy_that_fails_is_an_error_of_the_engine(world: World) -> None:
    memory = memory_with(world)
    ended(memory, sequence("a", PROMPT, 2))
    ended(memory, sequence("b", OTHER, 2))
    memory.cache.copies.restore = lambda pairs, after: Broken()
    memory.add(sequence("c", PROMPT, 2))
    memory.run()
    with pytest.raises(RuntimeError, match="the device is gone"):
        memory.come_back()


class Broken:
    def synchronize(self) -> None:
        raise RuntimeError("the device is gone")


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_blocks_come_back_with_the_same_bytes(dtype: torch.dtype) -> None:
    bytes_of = [torch.randint(256, (9, 4, size), dtype=torch.uint8) for size in (8, 12)]
    tensors = [one.view(dtype) for one in bytes_of]
    copies = BlockCopies(tensors, 6 * 80)
    assert (copies.num_slots, copies.block_bytes) == (6, 80)
    before = [one.clone() for one in bytes_of]
    copies.save([(1, 0), (8, 5), (3, 2), (4, 0)], copies.launched())
    for one in bytes_of:
        one[[1, 8, 3, 4]] = 0
    copies.restore([(5, 8), (2, 1), (0, 0)], copies.launched()).synchronize()
    for one, was in zip(bytes_of, before, strict=True):
        assert torch.equal(one[[8, 1, 0]], was[[8, 3, 4]])
        assert torch.equal(one[[2, 5, 6, 7]], was[[2, 5, 6, 7]])


def test_copies_begin_without_waiting_for_the_device() -> None:
    tensors = [torch.empty((9, 4, 2, 8), dtype=torch.bfloat16, device=GPU) for _ in range(4)]
    with watched():
        copies = BlockCopies(tensors, 1 << 12)
        copies.save([(1, 0), (8, 5), (3, 2)], copies.launched())
        copies.restore([(5, 8), (2, 1)], copies.launched())


# -- in a server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(FAMILIES["llama"]), tmp_path_factory.mktemp("model"))


OPTIONS: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "kv_blocks": 20, "kv_offload": Bytes("16MiB")}


@pytest.mark.parametrize("options", [{"compile": False}, pytest.param({}, marks=pytest.mark.compiler)], ids=str)
@schedules(1)
def test_answers_are_those_of_a_server_without_a_host_pool(world: World, model: Path, options: dict[str, Any]) -> None:
    """Prompts with common beginnings come at random, some at once, and memory holds a fifth of them."""
    chance = random.Random(5)
    common = [[chance.randrange(97) for _ in range(80)] for _ in range(6)]
    prompts = [
        [*chance.choice(common), *(chance.randrange(97) for _ in range(chance.randrange(1, 30)))] for _ in range(40)
    ]
    with started_in(world, model, **{**OPTIONS, **options, "kv_offload": None}) as engine:
        expected = greedy_answers(engine, prompts)
    with started_in(world, model, **OPTIONS, **options) as engine:
        outcome = [answer for i in range(0, 40, 4) for answer in greedy_answers(engine, prompts[i : i + 4])]
        numbers = engine.snapshot()
    assert outcome == expected
    assert numbers.num_offload_hits > 5
    assert numbers.offload_in_bytes > 0
    assert numbers.num_offloaded > 20


@schedules(2)
def test_a_request_says_how_long_it_waited_for_its_prefix(world: World, model: Path) -> None:
    prompts = [[(step * i + 1) % 97 for i in range(110)] for step in (7, 11, 7)]
    requests = [Request(f"{number}", (TokenPrompt(prompt),), greedy(8)) for number, prompt in enumerate(prompts)]
    with started_in(world, model, **{**OPTIONS, "compile": False, "kv_blocks": 8}) as engine:
        ends = [collect(engine, [one]).ended[one.request_id] for one in requests]
    assert all(isinstance(end, Finished) for end in ends)
    assert [end.usage.cached_tokens for end in ends] == [0, 0, 96]
    assert [end.account.num_restored_tokens for end in ends] == [0, 0, 96]
    assert ends[2].account.waits_ns[WaitReason.PREFIX_RESTORED] > 0


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ("9000000GiB", r"--kv-offload is 9000000GiB, but only \d+\.\d GiB of memory are available"),
        ("1KiB", "--kv-offload is 1KiB, but one block of this model takes 12288 bytes"),
    ],
)
def test_a_size_that_cannot_be_is_refused(model: Path, size: str, problem: str) -> None:
    with pytest.raises(StartupError, match=problem):
        started(model, **{**OPTIONS, "kv_offload": Bytes(size), "compile": False})


@pytest.mark.parametrize(
    ("other", "problem"),
    [({"prefix_cache": False}, "--no-prefix-cache"), ({"prefix_cache_dir": Path("blocks")}, "--prefix-cache-dir")],
)
def test_contradictions_are_refused(other: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=f"{problem}.* do not go together"):
        EngineOptions(kv_offload=Bytes("1GiB"), **other)
