"""The scheduler, the block pool and the prefix cache without a model: one rule per test."""

import itertools

import pytest

from oaiserve.engine.scheduling.order import MOST_OVERTAKEN
from oaiserve.engine.scheduling.policy import priority, shortest
from oaiserve.engine.sequences.blocks import BlockPool, hash_block
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.facts.record import WaitReason
from tests.engine.memory import Memory, make, memory_of, sequence

pytestmark = pytest.mark.usefixtures("overlap")


# -- why those that wait do --------------------------------------------------------------------------------------------


def waited(memory: Memory, one: Sequence, until_ns: int = 10_000) -> dict[str, int]:
    """Return how long a sequence waits from its arrival at 0 on, by reason. There is a step every 1,000 ns."""
    for now_ns in range(1_000, until_ns, 1_000):
        step = memory.scheduler.schedule(now_ns)
        assert step is not None
        memory.execute(step)
        if any(chunk.sequence is one for chunk in step.chunks):
            return {str(reason): ns for reason, ns in one.waits_ns.items()}
    raise AssertionError("it was never in a step")


@pytest.mark.parametrize(
    ("options", "earlier", "further"),
    [
        ({}, (), {}),  # it arrives during a step, and waits for its end
        ({"max_running": 1}, (4, 3), {"batch_full": 3_000}),
        ({}, (24, 8), {"token_budget": 3_000}),
    ],
)
def test_a_sequence_waits_for_a_step_a_place_and_tokens(
    options: dict[str, int], earlier: tuple[int, ...], further: dict[str, int]
) -> None:
    one = sequence("b")
    before = [sequence("a", *earlier)] if earlier else []
    assert waited(memory_of(*before, one, **options), one) == {"step_under_way": 1_000, **further}


def test_a_sequence_waits_for_blocks_and_the_next_one_behind_it() -> None:
    big = sequence("b", 20, 3)
    small = sequence("c", 2)
    waits_ns = waited(memory_of(sequence("a", 8, max_tokens=3), big, small, kv_blocks=6, lookahead=0), small)
    assert waits_ns == {"step_under_way": 1_000, "token_budget": 3_000, "behind_others": 2_000}
    assert {str(reason): ns for reason, ns in big.waits_ns.items()} == {
        "step_under_way": 1_000,
        "token_budget": 1_000,
        "no_blocks": 2_000,
    }


def test_a_wait_for_blocks_that_is_reported_twice_counts_once() -> None:
    big = sequence("b", 20, 3)
    memory = memory_of(sequence("a", 8, max_tokens=3), big, kv_blocks=6, lookahead=0)
    for now_ns in (1_000, 2_000):
        memory.execute(memory.scheduler.schedule(now_ns))
    for now_ns in (2_300, 2_600):
        waits_ns = memory.scheduler.of(big).waits.settle(big, now_ns)
        assert sum(waits_ns.values()) == now_ns
        assert waits_ns[WaitReason.NO_BLOCKS] == now_ns - 2_000


def test_a_sequence_waits_for_another_one_that_computes_the_same_prefix() -> None:
    prefix = list(range(20))
    one = sequence("b", [*prefix, 100])
    waits_ns = waited(memory_of(sequence("a", [*prefix, 200, 201]), one, max_running=8), one)
    assert set(waits_ns) <= {"step_under_way", "token_budget", "same_prefix"}
    assert waits_ns["same_prefix"] >= 1_000


# -- order and budget -------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget() -> None:
    memory = memory_of(sequence("a", 20))
    assert [memory.run() for _ in range(4)] == [[("a", 8)], [("a", 8)], [("a", 4)], [("a", 1)]]


def test_decodes_come_first_and_prefill_gets_the_rest_of_the_budget() -> None:
    memory = memory_of(sequence("a"))
    memory.run()
    memory.add(sequence("b", 20))
    assert memory.run() == [("a", 1), ("b", 7)]


def test_with_a_limit_below_what_decodes_take_prompts_wait_until_a_decode_ends() -> None:
    memory = memory_of(sequence("a", 2, max_tokens=3), sequence("b", 2, max_tokens=4), sequence("c", 9, max_tokens=1))
    assert memory.run() == [("a", 2), ("b", 2), ("c", 4)]
    memory.scheduler.limit_step(1)
    steps = [memory.run() for _ in range(8)]
    assert steps == [[("a", 1), ("b", 1)], [("a", 1), ("b", 1)], [("b", 1)], *[[("c", 1)]] * 5]


def test_a_limit_of_prompts_in_a_step_counts_those_under_way_and_no_decodes() -> None:
    memory = memory_of(*(sequence(name, 6) for name in "abc"), max_step_tokens=8, prefill_max_requests=1)
    assert memory.run() == [("a", 6)]
    assert memory.run() == [("a", 1), ("b", 6)]
    memory = memory_of(sequence("long", 12), sequence("b", 2), max_step_tokens=8, prefill_max_requests=1)
    assert [memory.run() for _ in range(3)] == [[("long", 8)], [("long", 4)], [("long", 1), ("b", 2)]]


def test_a_sequence_that_does_not_fit_is_overtaken_by_a_bounded_number() -> None:
    first = sequence("first", 66, 60)
    big = sequence("big", 190, 1)
    small = [sequence(f"small{i}", 2, 1) for i in range(MOST_OVERTAKEN + 5)]
    memory = memory_of(first, big, *small, kv_blocks=4, block_size=64, max_step_tokens=512, lookahead=1)
    passed = 0
    for _ in range(100):
        admitted = [name for name, _ in memory.run() if name.startswith("small")]
        passed += len(admitted)
        if not admitted:
            break
    assert passed == MOST_OVERTAKEN
    memory.remove(first)
    assert memory.run()[0] == ("big", 190)


def test_without_lookahead_no_sequence_overtakes() -> None:
    sequences = [sequence(name, prompt_len, 1) for name, prompt_len in (("a", 8), ("b", 12), ("c", 1))]
    assert memory_of(*sequences, kv_blocks=4, max_step_tokens=64, lookahead=0).run() == [("a", 8)]


def test_priority_takes_the_lowest_number_first() -> None:
    numbers = (("low", 5), ("high", -1), ("high too", -1))
    sequences = [sequence(name, 2, 1, priority=number) for name, number in numbers]
    memory = memory_of(*sequences, max_running=1, policy=priority)
    order = []
    while admitted := memory.run():
        order += [name for name, _ in admitted]
    assert order == ["high", "high too", "low"]


def test_shortest_takes_the_shortest_first_until_a_long_one_has_waited_enough() -> None:
    options = {"max_running": 1, "max_step_tokens": 512, "kv_blocks": 256, "policy": shortest}
    memory = memory_of(sequence("running", 1, 1), **options)
    order = []
    memory.run()
    memory.add(sequence("long", 320, 1), *(sequence(f"s{i}", 1, 1) for i in range(20)))
    for _ in range(21):
        order += [name for name, _ in memory.run()]
    assert order.index("long") == 9  # 319 tokens longer, 32 a place: nine went before it


def test_what_can_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_step_tokens \(4\) must be at least max_running \(8\)"):
        make(max_running=8, max_step_tokens=4)
    with pytest.raises(ValueError, match="can never fit"):
        make(kv_blocks=1).add(sequence("a", 8))


# -- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_without_a_free_block_the_youngest_is_preempted_and_computed_again(prefix_cache: bool) -> None:
    old = sequence("old", 4, 4)
    young = sequence("young", 4, 4)
    memory = memory_of(old, young, kv_blocks=2, max_step_tokens=16, prefix_cache=prefix_cache)
    memory.run()
    assert memory.run() == [("old", 1)]  # both want a second block, none is free
    assert (young.num_preemptions, young.place, young.blocks) == (1, Place.WAITING, [])
    while old.place is Place.RUNNING:
        memory.run()
    assert memory.run() == [("young", 5)]  # its prompt and the token that it had: its block was needed


def test_a_preempted_sequence_finds_its_blocks_again_if_they_were_not_needed() -> None:
    old = sequence("old", 12, 8)
    young = sequence("young", 12, 2)
    memory = memory_of(old, young, kv_blocks=6, max_step_tokens=32)
    while young.num_preemptions == 0:
        memory.run()
    memory.remove(old)
    assert memory.run() == [("young", 5)]  # 13 tokens are known; the first two blocks stayed.


# -- prefix cache -----------------------------------------------------------------------------------------------------

EIGHT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("prompt", "fields", "prefix_cache", "num_computed"),
    [
        ([*EIGHT[:7], 9], {}, True, 4),  # from where they part
        (EIGHT, {}, True, 4),  # the last token is always computed, and so is its block
        (EIGHT, {"cache_salt": "other"}, True, 8),
        (EIGHT, {}, False, 8),
        (EIGHT, {"wants_prompt_logprobs": True}, True, 8),  # logprobs of every position
    ],
)
def test_a_prompt_is_computed_from_where_it_parts_with_an_earlier_one(
    prompt: list[int], fields: dict[str, object], prefix_cache: bool, num_computed: int
) -> None:
    memory = memory_of(sequence("a", EIGHT, 1), prefix_cache=prefix_cache)
    second = sequence("b", prompt, 1, **fields)
    memory.run_out()
    memory.add(second)
    assert memory.run() == [("b", num_computed)]
    assert second.num_cached == 8 - num_computed


def test_prompt_logprobs_take_more_of_a_step_in_which_others_decode() -> None:
    memory = memory_of(sequence("decodes", [1] * 8, 3), kv_blocks=64, max_step_tokens=17)
    memory.run()
    memory.add(*(sequence(name, [2] * 30, 1, wants_prompt_logprobs=True) for name in "ab"))
    assert memory.run() == [("decodes", 1), ("a", 4)]
    assert memory.run() == [("decodes", 1), ("a", 4)]
    assert memory.run() == [("a", 17)]  # nobody waits for the step any more


def test_64_that_arrive_together_compute_their_common_prefix_once() -> None:
    sequences = [sequence(f"{i}", [*range(512), 1000 + i, 2000 + i], 1) for i in range(64)]
    memory = memory_of(*sequences, kv_blocks=400, block_size=16, max_running=64, max_step_tokens=256)
    memory.run_out()
    assert memory.num_computed == 512 + 64 * 2


def test_least_recently_used_blocks_are_allocated_first_and_released_once() -> None:
    pool = BlockPool(3, 1)
    assert pool.allocate(3) == [0, 1, 2]
    for block in (1, 0):
        pool.publish(block, hash_block(None, [block]))
    for block in (1, 2, 0):
        pool.release([block])
    assert [pool.allocate(1) for _ in range(3)] == [[2], [1], [0]]
    pool.release([0])
    with pytest.raises(AssertionError, match="once too often"):
        pool.release([0])


# -- choices of one prompt --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 11])
def test_choices_of_a_prompt_compute_it_once_and_copy_where_they_part(prompt_len: int, prefix_cache: bool) -> None:
    memory = memory_of(kv_blocks=64, max_running=8, max_step_tokens=64, prefix_cache=prefix_cache)
    choices = [sequence(f"{i}", list(range(prompt_len)), 6) for i in range(4)]
    memory.add_choices(*choices)
    tokens = itertools.count(100)
    while (step := memory.scheduler.schedule()) is not None:
        memory.execute(step, lambda _: next(tokens))  # each choice goes its own way, so shared blocks would show
    memory.settle()
    assert len({token for choice in choices for token in choice.generated_ids}) == 4 * 6
    # The prompt once, its last token again for each other choice, and five of six answer tokens for each.
    assert memory.num_computed == prompt_len + 3 + 4 * 5
    assert memory.scheduler.pool.num_used == 0
