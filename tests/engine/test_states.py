"""States of sequences in the scheduler, without a model: one rule per test."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.blocks import BlockPool
from oaiserve.engine.policy import priority
from oaiserve.engine.scheduler import Limits, Scheduler
from oaiserve.engine.sequence import Place
from oaiserve.engine.states import StatePool
from tests.engine.memory import Memory, make, sequence


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"], autouse=True)
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: with each step committed before the next is scheduled, and after the next is launched."""
    monkeypatch.setattr(Memory, "overlap", request.param)


@given(st.integers(1, 5), st.lists(st.integers(0, 9)))
def test_a_pool_hands_out_each_state_once_and_the_lowest_first(num_states: int, choices: list[int]) -> None:
    """Even choices allocate, odd ones release what was allocated at some time before."""
    pool, used = StatePool(num_states), list[int]()
    for choice in choices:
        if choice % 2 == 0:
            state = pool.allocate()
            assert state == min({*range(num_states)} - {*used}, default=None)
            used += [] if state is None else [state]
        elif used:
            pool.release(used.pop(choice % len(used)))
        assert pool.num_free == num_states - len(used)


def test_a_state_that_is_free_cannot_be_released() -> None:
    pool = StatePool(2)
    state = pool.allocate()
    assert state is not None
    pool.release(state)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(state)


def test_each_running_sequence_has_a_state_until_it_ends() -> None:
    scheduler = make(num_states=4)
    memory = Memory(scheduler)
    first, second = sequence("a", 3, 2), sequence("b", 4, 4)
    scheduler.add(first)
    scheduler.add(second)
    memory.run()
    assert (first.state, second.state) == (0, 1)
    memory.run_out()
    assert (first.state, second.state) == (None, None)
    assert scheduler.states is not None
    assert scheduler.states.num_free == 4


def test_an_aborted_sequence_gives_its_state_to_the_next_one() -> None:
    scheduler = make(max_running=1, num_states=1)
    memory = Memory(scheduler)
    first, second = sequence("a", 20), sequence("b", 5)
    scheduler.add(first)
    scheduler.add(second)
    memory.run()
    memory.remove(first)
    memory.run()
    assert second.state == 0
    memory.run_out()
    assert second.num_generated == 8


def test_a_preempted_sequence_is_computed_again_from_its_first_token() -> None:
    scheduler = make(kv_blocks=5, num_states=4)
    memory = Memory(scheduler)
    first, second = sequence("a", 8), sequence("b", 7)
    scheduler.add(first)
    scheduler.add(second)
    while not scheduler.num_preemptions:
        memory.run()
    assert (second.state, second.num_computed) == (None, 0)
    memory.run_out()
    assert (first.num_generated, second.num_generated) == (8, 8)


@pytest.mark.parametrize("prompt_len", [2, 4, 5, 8, 9, 13])
def test_choices_of_a_prompt_compute_it_once_and_copy_its_state(prompt_len: int) -> None:
    scheduler = make(num_states=4)
    memory = Memory(scheduler)
    prompt = list(range(prompt_len))
    choices = [sequence(f"a{i}", prompt, 3) for i in range(3)]
    for choice in choices:
        scheduler.add(choice, None if choice is choices[0] else choices[0])
    memory.run_out()
    memory.settle()
    assert [choice.num_generated for choice in choices] == [3, 3, 3]
    # The prompt's last token is computed by each choice, and so are its own tokens but for the last one.
    assert memory.num_computed == prompt_len - 1 + 3 * 3


def test_a_prompt_of_one_token_has_nothing_to_share() -> None:
    scheduler = make(num_states=4)
    memory = Memory(scheduler)
    choices = [sequence(f"a{i}", [5], 3) for i in range(2)]
    for choice in choices:
        scheduler.add(choice, None if choice is choices[0] else choices[0])
    assert scheduler.num_parked == 0
    memory.run_out()
    assert memory.num_computed == 2 * 3


def test_a_choice_for_which_no_state_is_free_computes_its_prompt_itself() -> None:
    scheduler = make(max_running=2, num_states=2)
    memory = Memory(scheduler)
    choices = [sequence(f"a{i}", list(range(6)), 2) for i in range(3)]
    for choice in choices:
        scheduler.add(choice, None if choice is choices[0] else choices[0])
    memory.run()
    assert [choice.state for choice in choices] == [0, 1, None]
    assert choices[2].place is Place.WAITING
    memory.run_out()
    memory.settle()
    assert [choice.num_generated for choice in choices] == [2, 2, 2]
    assert memory.num_computed == 5 + 2 * 2 + 7


def test_a_sequence_that_may_run_takes_the_state_of_a_choice_that_waits() -> None:
    scheduler = make(max_running=2, num_states=2, policy=priority)
    memory = Memory(scheduler)
    choices = [sequence(f"a{i}", list(range(7)), 4, priority=5) for i in range(2)]
    scheduler.add(choices[0])
    scheduler.add(choices[1], choices[0])
    memory.run()
    assert [choice.state for choice in choices] == [0, 1]
    urgent = sequence("b", 3, 2, priority=0)
    scheduler.add(urgent)
    memory.run()
    assert (urgent.state, choices[1].state) == (1, None)
    memory.run_out()
    memory.settle()
    assert [one.num_generated for one in (*choices, urgent)] == [4, 4, 2]


def test_a_pool_that_is_too_small_for_what_may_run_is_refused() -> None:
    with pytest.raises(ValueError, match="each running sequence has one"):
        Scheduler(BlockPool(4, 4), Limits(2, 4), prefix_cache=False, states=StatePool(1))
