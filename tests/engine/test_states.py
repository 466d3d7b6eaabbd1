"""States of sequences in the scheduler, without a model: one rule per test."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.scheduling.limits import Limits
from oaiserve.engine.scheduling.policy import priority
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.sequences.blocks import BlockHash, BlockPool, StatePool
from oaiserve.engine.sequences.sequence import Place
from tests.engine.memory import Memory, memory_of, sequence

pytestmark = pytest.mark.usefixtures("overlap")


@given(st.integers(1, 5), st.lists(st.integers(0, 14)))
def test_a_pool_hands_out_each_state_once_and_the_lowest_first(num_states: int, choices: list[int]) -> None:
    """Each choice allocates, releases what was allocated at some time before, or keeps one of a few hashes."""
    pool = StatePool(num_states)
    used = list[int]()
    held = dict[BlockHash, int]()
    for choice in choices:
        free = {*range(num_states)} - {*used} - {*held.values()}
        expected = min(free) if free else next(iter(held.values()), None)  # or else the least recently used
        if choice % 3 == 1 and used:
            pool.release(used.pop(choice % len(used)))
            continue
        if choice % 3 == 2 and (block_hash := BlockHash(bytes([choice]))) in held:
            assert pool.keep(block_hash) is None
            assert pool.find(block_hash) == held[block_hash]
            held[block_hash] = held.pop(block_hash)
            continue
        state = pool.allocate() if choice % 3 != 2 else pool.keep(block_hash)
        assert state == expected
        held = {one: place for one, place in held.items() if place != state}
        if state is not None and choice % 3 == 2:
            held[block_hash] = state
        elif state is not None:
            used.append(state)
        assert (pool.num_owned, pool.num_kept) == (len(used), len(held))


def test_a_state_that_is_free_cannot_be_released() -> None:
    pool = StatePool(2)
    assert pool.allocate() == 0
    pool.release(0)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(0)


@pytest.mark.parametrize("prompt_len", [2, 4, 5, 8, 9, 13])
def test_choices_of_a_prompt_compute_it_once_and_copy_its_state(prompt_len: int) -> None:
    memory = memory_of(states=StatePool(4))
    choices = [sequence(f"a{i}", list(range(prompt_len)), 3) for i in range(3)]
    memory.add_choices(*choices)
    memory.run_out()
    assert [choice.num_generated for choice in choices] == [3, 3, 3]
    # The prompt's last token is computed by each choice, and so are its own tokens except the last one.
    assert memory.num_computed == prompt_len - 1 + 3 * 3


def test_a_choice_for_which_no_state_is_free_computes_its_prompt_itself() -> None:
    memory = memory_of(max_running=2, states=StatePool(2))
    choices = [sequence(f"a{i}", list(range(6)), 2) for i in range(3)]
    memory.add_choices(*choices)
    memory.run()
    assert [choice.state for choice in choices] == [0, 1, None]
    assert choices[2].place is Place.WAITING
    memory.run_out()
    assert [choice.num_generated for choice in choices] == [2, 2, 2]
    assert memory.num_computed == 5 + 2 * 2 + 7


def test_a_sequence_that_may_run_takes_the_state_of_a_choice_that_waits() -> None:
    memory = memory_of(max_running=2, states=StatePool(2), policy=priority)
    choices = [sequence(f"a{i}", list(range(7)), 4, priority=5) for i in range(2)]
    memory.add_choices(*choices)
    memory.run()
    assert [choice.state for choice in choices] == [0, 1]
    urgent = sequence("b", 3, 2, priority=0)
    memory.add(urgent)
    memory.run()
    assert (urgent.state, choices[1].state) == (1, None)
    memory.run_out()
    assert [one.num_generated for one in (*choices, urgent)] == [4, 4, 2]


# -- states that are kept ----------------------------------------------------------------------------------------------


def with_kept(num_states: int = 8, kv_blocks: int = 64) -> tuple[StatePool, Memory]:
    states = StatePool(num_states, shortest_kept=4)
    return states, memory_of(kv_blocks=kv_blocks, max_step_tokens=64, states=states)


def finish(memory: Memory, name: str, prompt: list[int], max_tokens: int = 1) -> tuple[int, int]:
    """Compute one sequence to its end, and return how many tokens of it were cached, and how many steps it took."""
    one = sequence(name, prompt, max_tokens)
    num_steps = 0
    memory.scheduler.add(one)
    while memory.run():
        num_steps += 1
    return one.num_cached, num_steps


def test_the_next_prompt_of_a_conversation_goes_on_from_the_state_of_the_one_before() -> None:
    _, memory = with_kept()
    first = list(range(23))
    assert finish(memory, "a", first) == (0, 2)  # up to token 20, which is five blocks, and to the end
    assert finish(memory, "b", [*first, 7, 50, 51, 52]) == (20, 2)
    assert finish(memory, "c", [*first, 7, 50, 51, 52, 7]) == (24, 1)  # what it adds is too little to be kept
    assert memory.num_computed == 23 + 7 + 4


def test_prompts_that_begin_alike_share_a_state_from_the_third_on() -> None:
    """The second one shows where they part, and leaves the state of it behind."""
    _, memory = with_kept()
    common = list(range(17))
    cached = [finish(memory, str(i), [*common, *range(100 + i, 108 + i)])[0] for i in range(4)]
    assert cached == [0, 0, 16, 16]


def test_the_same_prompts_at_once_wait_for_the_state_of_the_first() -> None:
    _, memory = with_kept()
    memory.add(*(sequence(str(i), list(range(30)), 1) for i in range(3)))
    memory.run_out()
    assert memory.num_computed == 28 + 3 * 2


def test_prompts_that_only_begin_alike_do_not_wait_for_each_other() -> None:
    _, memory = with_kept()
    memory.add(*(sequence(str(i), [*range(10), 100 + i, 200, 300], 1) for i in range(3)))
    assert memory.run() == [("0", 12), ("1", 12), ("2", 12)]


def test_choices_of_a_prompt_whose_state_was_kept_up_to_its_last_token_all_begin_with_that() -> None:
    _, memory = with_kept()
    prompt = list(range(21))
    finish(memory, "a", prompt)
    choices = [sequence(f"b{i}", prompt, 2) for i in range(3)]
    memory.add_choices(*choices)
    memory.run_out()
    assert [choice.num_cached for choice in choices] == [20, 20, 20]
    assert memory.num_computed == 21 + 3 * 2


def test_a_kept_state_whose_blocks_are_gone_is_of_no_use() -> None:
    states, memory = with_kept(kv_blocks=8)
    prompt = list(range(20))
    finish(memory, "a", prompt)
    finish(memory, "b", [*range(100, 130)])
    assert states.num_kept == 2
    assert finish(memory, "c", prompt)[0] == 0


def test_kept_states_make_room_for_sequences_the_least_recently_used_first() -> None:
    states, memory = with_kept(num_states=4)
    prompts = [[100 * i + j for j in range(12)] for i in range(3)]
    for i, prompt in enumerate(prompts):
        finish(memory, str(i), prompt)
    assert states.num_kept == 3
    assert finish(memory, "again", prompts[0])[0] == 8
    memory.add(*(sequence(f"r{i}", 4) for i in range(3)))
    memory.run()
    assert states.num_kept == 1
    memory.run_out()
    assert [finish(memory, "x", prompts[0])[0], finish(memory, "y", prompts[1])[0]] == [8, 0]


def test_without_a_prefix_cache_no_state_is_kept() -> None:
    states = StatePool(8, shortest_kept=4)
    memory = memory_of(prefix_cache=False, states=states, max_step_tokens=64)
    assert finish(memory, "a", list(range(20))) == (0, 1)
    assert states.num_kept == 0


def test_a_pool_that_is_too_small_for_what_may_run_is_refused() -> None:
    with pytest.raises(ValueError, match="1 states are too few for 2 running sequences"):
        Scheduler(BlockPool(4, 4), Limits(2, 4), states=StatePool(1))
