"""Scheduler and block pool, driven without a model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from oaiserve.engine.blocks import BlockPool
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.scheduler import Scheduler
from oaiserve.engine.sequence import Sequence, Step


def make(kv_blocks: int = 16, block_size: int = 4, max_running: int = 4, max_step_tokens: int = 8) -> Scheduler:
    pool = BlockPool(kv_blocks, block_size)
    return Scheduler(pool, max_running=max_running, max_step_tokens=max_step_tokens)


def sequence(name: str, prompt_len: int = 4, max_tokens: int = 8) -> Sequence:
    return Sequence(name, 0, [0] * prompt_len, SamplingParams(), max_len=prompt_len + max_tokens)


def shape(step: Step | None) -> list[tuple[str, int]]:
    return [] if step is None else [(chunk.sequence.request_id, chunk.num_tokens) for chunk in step.chunks]


def run(scheduler: Scheduler) -> list[tuple[str, int]]:
    """One step, every sampled token 7."""
    step = scheduler.schedule()
    for chunk in step.chunks if step else ():
        scheduler.commit(chunk.sequence, chunk.end, 7 if chunk.samples else None)
    return shape(step)


def test_nothing_to_do_is_no_step() -> None:
    assert make().schedule() is None


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget() -> None:
    scheduler = make()
    scheduler.add(sequence("a", prompt_len=20))
    assert [run(scheduler) for _ in range(4)] == [[("a", 8)], [("a", 8)], [("a", 4)], [("a", 1)]]


def test_decodes_come_first_and_prefill_gets_the_rest_of_the_budget() -> None:
    scheduler = make()
    scheduler.add(sequence("a"))
    run(scheduler)
    scheduler.add(sequence("b", prompt_len=20))
    assert run(scheduler) == [("a", 1), ("b", 7)]


def test_the_first_that_does_not_fit_is_not_overtaken() -> None:
    scheduler = make(kv_blocks=4, max_step_tokens=64)
    for name, prompt_len in (("a", 8), ("b", 12), ("c", 1)):
        scheduler.add(sequence(name, prompt_len, max_tokens=1))
    assert run(scheduler) == [("a", 8)]


def test_max_running_bounds_admission() -> None:
    scheduler = make(max_running=2)
    for name in "abc":
        scheduler.add(sequence(name, prompt_len=2))
    assert run(scheduler) == [("a", 2), ("b", 2)]


def test_without_a_free_block_the_youngest_gives_way_and_is_computed_again() -> None:
    scheduler = make(kv_blocks=2, max_step_tokens=16)
    old, young = sequence("old", 4, 4), sequence("young", 4, 4)
    scheduler.add(old)
    scheduler.add(young)
    run(scheduler)
    assert run(scheduler) == [("old", 1)]  # both want a second block, none is free
    assert (young.num_preemptions, young.num_computed, young.blocks) == (1, 0, [])
    while old in scheduler.running:
        run(scheduler)
        if old.num_generated == 4:
            scheduler.remove(old)
    assert run(scheduler) == [("young", 5)]  # its prompt and the token that it had


def test_a_budget_below_one_token_for_each_running_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_step_tokens \(4\) must be at least max_running \(8\)"):
        make(max_running=8, max_step_tokens=4)


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="can never fit"):
        make(kv_blocks=1).add(sequence("a", 8))


def test_a_block_released_twice_is_noticed() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


class SchedulerMachine(RuleBasedStateMachine):
    """Any mix of arrivals, steps and departures keeps the promises of scheduler and pool."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make(kv_blocks=8, max_running=4, max_step_tokens=6)
        self.open: list[Sequence] = []

    @rule(prompt_len=st.integers(1, 20), max_tokens=st.integers(1, 12))
    def arrive(self, prompt_len: int, max_tokens: int) -> None:
        self.open.append(sequence(f"{len(self.open)}", prompt_len, max_tokens))
        self.scheduler.add(self.open[-1])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.open))
        self.open.remove(gone)
        self.scheduler.remove(gone)
        assert gone.blocks == []

    @rule()
    def step(self) -> None:
        step = self.scheduler.schedule()
        assert (step is None) == (not self.open), "there is always something to compute, or deadlock"
        if step is None:
            return
        assert step.num_tokens <= self.scheduler.max_step_tokens
        ones = [chunk.num_tokens == 1 for chunk in step.chunks]
        assert ones == sorted(ones, reverse=True), "chunks of one token come first"
        assert len({id(chunk.sequence) for chunk in step.chunks}) == len(step.chunks)
        for chunk in step.chunks:
            known = chunk.sequence
            assert chunk.start == known.num_computed
            assert chunk.end <= len(known.blocks) * self.scheduler.pool.block_size
            self.scheduler.commit(known, chunk.end, 7 if chunk.samples else None)
            if len(known.token_ids) == known.max_len:
                self.scheduler.remove(known)
                self.open.remove(known)

    @invariant()
    def consistent(self) -> None:
        self.scheduler.check_integrity()
        assert len(self.scheduler.running) <= self.scheduler.max_running
        assert len(self.scheduler.running) + len(self.scheduler.waiting) == len(self.open)

    def teardown(self) -> None:
        for _ in range(10_000):  # whatever happened: everybody gets to the end
            if not self.open:
                break
            self.step()
        assert not self.open
        assert self.scheduler.pool.num_used == 0


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestSchedulerProperties = SchedulerMachine.TestCase
