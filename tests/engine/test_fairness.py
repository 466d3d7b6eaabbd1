"""Clients take turns under the policy `fair`: the rules one by one, and what holds whatever arrives."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.scheduling.policy import Policy, fair, fcfs
from oaiserve.engine.scheduling.waiting import GENERATED_WEIGHT, MOST_ABSENT, WaitingQueue
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.explain.step_cost import KNOTS, StepCost
from oaiserve.facts.record import WaitReason
from tests.engine.doubles import request, stepping
from tests.engine.memory import FixedTarget, Memory, memory_of, sequence


def add(memory: Memory, client: str, number: int = 1, prompt: int | list[int] = 4, **fields: Any) -> None:
    memory.add(*(sequence(f"{client}{index}", prompt, client_name=client, **fields) for index in range(number)))


def admitted_in_order(memory: Memory) -> list[str]:
    order = []
    while (step := memory.scheduler.schedule()) is not None:
        order += [one.request_id for one in step.admitted]
        memory.execute(step)
    return order


# -- whose turn it is -------------------------------------------------------------------------------------------------


def test_a_client_with_short_answers_has_several_turns_for_one_of_a_client_with_long_ones() -> None:
    memory = memory_of(max_running=1, kv_blocks=64, policy=fair)
    add(memory, "long", 2, max_tokens=38)  # 4 + 2 * 38 = 80
    add(memory, "short", 8, max_tokens=8)  # 4 + 2 * 8 = 20
    order = admitted_in_order(memory)
    assert order == ["long0", *(f"short{i}" for i in range(4)), "long1", *(f"short{i}" for i in range(4, 8))]


def test_a_client_that_was_idle_has_earned_nothing() -> None:
    memory = memory_of(max_running=1, policy=fair)
    add(memory, "idle", max_tokens=1)
    admitted_in_order(memory)
    add(memory, "busy", 4)
    while memory.scheduler.foreground.num_waiting > 2:
        memory.run()
    add(memory, "idle", 3)
    assert admitted_in_order(memory) == ["idle0", "busy2", "idle1", "busy3", "idle2"]


def test_prompt_tokens_that_are_cached_cost_nothing_and_others_cost_one_each() -> None:
    memory = memory_of(policy=fair)
    add(memory, "other", prompt=2, max_tokens=1)
    admitted_in_order(memory)
    for expected in (12 + GENERATED_WEIGHT, 4 + GENERATED_WEIGHT):
        one = sequence("a", [*range(12)], max_tokens=1, client_name="a")
        memory.add(one)
        before_service = one.client.service
        admitted_in_order(memory)
        assert one.client.service - before_service == expected


def test_what_is_computed_again_after_a_preemption_is_not_charged_again() -> None:
    memory = memory_of(kv_blocks=4, max_step_tokens=16, prefix_cache=False, policy=fair)
    one, other = (sequence(client, 4, max_tokens=8, client_name=client) for client in "ab")
    memory.add(one, other)
    admitted_in_order(memory)
    assert memory.scheduler.foreground.num_preemptions > 0
    assert one.client.service == other.client.service == 4 + GENERATED_WEIGHT * 8


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_the_engine_knows_whose_request_it_is_and_how_urgent(policy: str) -> None:
    requests = [replace(request(name), client=name[0], priority=-ord(name[0])) for name in ("a0", "a1", "a2", "b0")]
    with stepping(*requests, max_running=1, tokenize_workers=0, policy=policy) as (_, runner, inbox):
        runner.permit(100)
        inbox.wait_terminal("a0", "a1", "a2", "b0")
    order = dict.fromkeys(request_id for step in runner.steps for request_id, _, _ in step)
    assert list(order) == ["a0", "b0", "a1", "a2"]


def test_a_newcomer_for_whom_nobody_can_make_way_waits_for_a_place_and_not_for_blocks() -> None:
    memory = memory_of(max_running=1, policy=fair)
    add(memory, "a")
    memory.run()
    newcomer = sequence("b", 4, client_name="b")
    memory.add(newcomer)
    memory.scheduler.schedule(now_ns=100)
    assert memory.scheduler.of(newcomer).waits.settle(newcomer, 250) == {
        WaitReason.STEP_UNDER_WAY: 100,
        WaitReason.BATCH_FULL: 150,
    }


# -- who gives way ----------------------------------------------------------------------------------------------------


def test_without_a_free_block_the_client_that_got_most_is_preempted_even_if_it_came_first() -> None:
    memory = memory_of(kv_blocks=6, max_running=4, max_step_tokens=32, prefix_cache=False, policy=fair)
    add(memory, "greedy", 3, max_tokens=8)
    memory.run()
    polite = sequence("polite", client_name="polite")
    memory.add(polite)
    for _ in range(7):
        memory.run()
    assert memory.scheduler.foreground.num_preemptions > 0
    assert polite.num_preemptions == 0


def test_a_client_with_nothing_running_gets_a_place_while_another_one_has_several() -> None:
    memory = memory_of(kv_blocks=64, max_running=3, policy=fair)
    add(memory, "greedy", 8, max_tokens=40)
    for _ in range(4):
        memory.run()
    add(memory, "polite", 2, max_tokens=4)
    memory.run()  # it begins with the counter of the one that waits before it
    memory.run()
    assert Counter(one.client_name for one in memory.scheduler.running) == {"greedy": 2, "polite": 1}
    for _ in range(2):
        memory.run()
    assert memory.scheduler.foreground.num_preemptions == 1, "it has a place now, and waits for the next one"


def test_a_client_with_nothing_running_gets_blocks_while_another_one_has_several_sequences() -> None:
    memory = memory_of(kv_blocks=8, max_running=8, max_step_tokens=32, policy=fair)
    add(memory, "greedy", 4, prompt=5, max_tokens=20)
    memory.run()
    add(memory, "polite", prompt=5, max_tokens=1)
    memory.run()  # it begins with the counter of the one that came before it
    step = memory.scheduler.schedule()
    assert [one.client_name for one in step.admitted] == ["polite"]
    assert {one.client_name for one in step.preempted} == {"greedy"}
    memory.execute(step)


def test_a_long_prompt_leaves_half_of_a_step_to_a_client_with_nothing_running() -> None:
    memory = memory_of(kv_blocks=64, policy=fair)
    add(memory, "greedy", prompt=40)
    assert memory.run() == [("greedy0", 8)]
    add(memory, "polite", prompt=10, max_tokens=1)
    assert memory.run() == [("polite0", 4), ("greedy0", 4)]
    assert memory.run() == [("polite0", 6), ("greedy0", 2)]  # it ends in this step


def test_a_long_prompt_leaves_half_of_a_step_also_to_a_client_that_has_something_running() -> None:
    memory = memory_of(kv_blocks=64, policy=fair)
    add(memory, "polite", max_tokens=20)
    memory.run()
    add(memory, "greedy", prompt=40)
    assert memory.run() == [("polite0", 1), ("greedy0", 7)]
    memory.add(sequence("another", 6, client_name="polite", max_tokens=1))
    assert memory.run() == [("polite0", 1), ("greedy0", 4), ("another", 3)]  # the polite one got more so far
    assert memory.run() == [("polite0", 1), ("greedy0", 4), ("another", 3)]


def test_a_prompt_leaves_no_more_than_others_want() -> None:
    memory = memory_of(kv_blocks=64, policy=fair)
    add(memory, "polite", max_tokens=20)
    memory.run()
    memory.add(sequence("another", 8, client_name="polite", max_tokens=1))
    add(memory, "greedy", prompt=40)
    for _ in range(2):
        assert memory.run() == [("polite0", 1), ("greedy0", 4), ("another", 3)]
    assert memory.run() == [("polite0", 1), ("greedy0", 5), ("another", 2)]


def test_of_three_clients_the_one_with_the_least_service_gets_half_of_a_step() -> None:
    memory = memory_of(kv_blocks=64, policy=fair)
    add(memory, "greedy", prompt=40)
    memory.run()
    for name in ("first", "second"):
        add(memory, name, prompt=40)
    tokens = [dict(memory.run()) for _ in range(3)]
    assert [max(step, key=lambda name: step[name]) for step in tokens] == ["first0", "greedy0", "second0"]
    assert [sorted(step.values()) for step in tokens] == [[2, 2, 4]] * 3


def test_a_prompt_leaves_others_their_part_of_a_step() -> None:
    memory = memory_of(kv_blocks=64, policy=fair)
    memory.add(sequence("large", 40, client_name="large", share=3), sequence("small", 40, client_name="small"))
    for _ in range(3):
        assert sorted(memory.run()) == [("large", 6), ("small", 2)]


def test_a_request_gets_a_place_from_one_of_its_client_that_has_several_and_keeps_one() -> None:
    memory = memory_of(kv_blocks=64, max_running=3, policy=fair)
    large = [sequence("large", 4, 40, client_name="only") for _ in range(8)]
    memory.add(*large)
    for _ in range(4):
        memory.run()
    memory.add(*(sequence(name, 4, 20, client_name="only") for name in ("b", "c", "d")))
    for _ in range(3):
        memory.run()
    assert Counter(one.request_id for one in memory.scheduler.running) == {"large": 1, "b": 1, "c": 1}
    assert memory.scheduler.foreground.num_preemptions == 2
    memory.run_out()


def test_where_decodes_take_all_the_time_only_requests_without_a_place_get_one() -> None:
    cost = StepCost(tuple(1e6 * knot for knot in KNOTS))
    memory = memory_of(kv_blocks=64, max_running=8, policy=fair, step_time=FixedTarget(lambda: cost, 0.002, 8))
    memory.add(*(sequence("large", 2, 40, client_name="only") for _ in range(8)))
    for _ in range(6):
        memory.run()
    assert len(memory.scheduler.running) == 3
    memory.add(sequence("other", 2, 40, client_name="only"))
    assert ("other", 2) in memory.run()


def crowded(num_large: int, *others: int) -> Memory:
    """Return a memory in which sequences of a client decode, and some of others; a row takes 10 ms."""
    cost = StepCost(tuple(1e7 * knot for knot in KNOTS))
    step_time = FixedTarget(lambda: cost, 100.0, 512)
    memory = memory_of(kv_blocks=1024, max_running=64, max_step_tokens=512, policy=fair, step_time=step_time)
    for name, number in zip(("large", *"abc"), (num_large, *others), strict=False):
        add(memory, name, number, max_tokens=60)
    memory.run()
    return memory


def decodes_of(chunks: list[tuple[str, int]]) -> Counter[str]:
    return Counter(name.rstrip("0123456789") for name, _ in chunks)


def test_beside_few_decodes_of_others_a_client_with_many_gets_as_many_rows_and_all_have_their_turns() -> None:
    memory = crowded(20, 1, 2)
    steps = [memory.run() for _ in range(28)]
    assert [decodes_of(step) for step in steps] == [{"large": 3, "a": 1, "b": 2}] * 28
    for first in range(21):
        turns = {name for step in steps[first : first + 7] for name, _ in step if name.startswith("large")}
        assert len(turns) == 20, "each of 20 in seven steps of three"


@pytest.mark.parametrize("others", [(), (20,), (20, 20), (18, 22)])
def test_alone_or_among_clients_with_as_many_nobody_is_left_out(others: tuple[int, ...]) -> None:
    memory = crowded(20, *others)
    assert decodes_of(memory.run()).total() == 20 + sum(others)


def test_masks_that_take_long_wait_for_their_turn_where_others_are_in_the_step() -> None:
    constraint = SimpleNamespace(mask_ns=3_000_000)
    memory = crowded(0, 4)
    add(memory, "slow", 4, max_tokens=60, constraint=constraint)
    memory.run()
    turns = [{name for name, _ in memory.run() if name.startswith("slow")} for _ in range(4)]
    assert [len(names) for names in turns] == [2] * 4
    assert turns[0] | turns[1] == turns[2] | turns[3] == {f"slow{i}" for i in range(4)}
    constraint.mask_ns = 1_000
    assert decodes_of(memory.run()) == {"a": 4, "slow": 4}


def steps_with_masks(memory: Memory, number: int, mask_ns: int) -> list[Counter[str]]:
    """Run steps in which each mask of the client "slow" takes this CPU time, and return the decodes of each client."""
    steps = []
    for _ in range(number):
        step = memory.scheduler.schedule()
        assert step is not None
        for chunk in step.chunks:
            if chunk.sequence.constraint is not None:
                chunk.sequence.constraint.mask_ns = mask_ns
        memory.scheduler.charge_masks(step.chunks)
        steps.append(decodes_of(memory.execute(step)))
    return steps


def with_masks(*others: int, number: int = 1) -> Memory:
    """Return a memory in which a client with masks decodes beside others; a row takes 10 ms."""
    memory = crowded(0, *others)
    memory.add(
        *(sequence(f"slow{i}", 4, 60, client_name="slow", constraint=SimpleNamespace(mask_ns=0)) for i in range(number))
    )
    memory.run()
    return memory


@pytest.mark.parametrize("number", [1, 3], ids=["one answer", "several answers"])
def test_beside_others_masks_take_a_quarter_of_the_time_of_their_steps(number: int) -> None:
    steps = steps_with_masks(with_masks(1, number=number), 41, mask_ns=20_000_000)
    assert all(step["a"] == 1 for step in steps)
    # A step of the other client takes 10 ms, so a mask is worth eight steps.
    assert [place for place, step in enumerate(steps) if step["slow"]] == [*range(0, 41, 8)]


def test_masks_within_their_share_wait_for_nothing() -> None:
    steps = steps_with_masks(with_masks(2, number=2), 20, mask_ns=2_400_000)
    assert steps == [{"a": 2, "slow": 2}] * 20


def test_masks_of_a_client_alone_wait_for_nothing_also_after_others_have_left() -> None:
    assert steps_with_masks(with_masks(number=2), 20, mask_ns=20_000_000) == [{"slow": 2}] * 20
    memory = crowded(0)
    add(memory, "a", max_tokens=4)
    memory.run()
    add(memory, "slow", max_tokens=60, constraint=SimpleNamespace(mask_ns=0))
    memory.run()
    steps = steps_with_masks(memory, 20, mask_ns=80_000_000)
    num_beside = sum(step["a"] for step in steps)
    assert [step["slow"] for step in steps[num_beside:]] == [1] * (20 - num_beside)


def test_clients_that_all_wait_for_masks_go_on() -> None:
    memory = crowded(0)
    for name in "ab":
        add(memory, name, max_tokens=60, constraint=SimpleNamespace(mask_ns=0))
    memory.run()
    assert all(step.total() for step in steps_with_masks(memory, 20, mask_ns=50_000_000))


def test_masks_of_background_work_take_as_little_of_the_steps_of_others_as_the_rest_of_it() -> None:
    cost = StepCost(tuple(1e7 + 1e3 * knot for knot in KNOTS))
    step_time = FixedTarget(lambda: cost, 100.0, 512)
    memory = memory_of(kv_blocks=1024, max_running=64, max_step_tokens=512, policy=fair, step_time=step_time)
    add(memory, "a", max_tokens=250)
    add(memory, "slow", max_tokens=250, constraint=SimpleNamespace(mask_ns=0), is_background=True)
    for _ in range(4):
        memory.run()
    steps = steps_with_masks(memory, 101, mask_ns=2_000_000)
    assert all(step["a"] == 1 for step in steps)
    assert 9 <= sum(step["slow"] for step in steps) <= 11, "2 ms of 10 steps of 10 ms"


def test_a_client_that_comes_finds_a_short_step_and_one_that_leaves_gives_all_rows_back() -> None:
    memory = crowded(20)
    assert decodes_of(memory.run()) == {"large": 20}
    add(memory, "a", max_tokens=3)
    assert [decodes_of(memory.run()) for _ in range(4)] == [
        {"large": 2, "a": 1},
        *[{"large": 1, "a": 1}] * 2,
        {"large": 20},
    ]


def test_a_single_place_is_never_taken_away() -> None:
    memory = memory_of(kv_blocks=64, max_running=1, policy=fair)
    add(memory, "first", max_tokens=20)
    memory.run()
    add(memory, "second", max_tokens=20)
    memory.run_out()
    assert memory.scheduler.foreground.num_preemptions == 0


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_client_that_is_ahead_is_not_forgotten_while_others_wait() -> None:
    queue = WaitingQueue([], by_client=True)

    def waiting(client: str) -> Sequence:
        one = sequence("x", client_name=client)
        one.place = Place.WAITING
        queue.arrive(one, 4)
        queue.add(one)
        return one

    _ = waiting("waits")
    ahead = waiting("ahead")
    queue.discard(ahead)
    ahead.client.service = 100
    for number in range(3 * MOST_ABSENT):
        queue.discard(waiting(str(number)))
    queue.add(ahead)
    assert ahead.client.service == 100
    assert len(queue._clients) <= 2 * MOST_ABSENT + 2


# -- what always holds ------------------------------------------------------------------------------------------------

Arrival = tuple[int, int, int]  # the step, the answer, and whether it is aborted after a while
ARRIVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(arrivals=ARRIVALS, overlap=st.booleans())
def test_equal_prompts_of_one_client_are_served_as_they_came(arrivals: list[Arrival], overlap: bool) -> None:
    def steps(policy: Policy) -> list[list[tuple[str, int]]]:
        memory = memory_of(kv_blocks=8, policy=policy)
        rows = []
        memory.overlap = overlap
        for number in range(120):
            for index, (at, answer, aborted) in enumerate(arrivals):
                if at == number:
                    one = sequence(f"{index}", 9, answer, client_name="only")
                    memory.add(one)
                    if aborted < 10:
                        memory.remove(one)
            rows.append(memory.run())
        return rows

    assert steps(fair) == steps(fcfs)


@dataclass
class Prompt:
    """A prompt of a client, and the tokens of prompts that the client had got in all at some moments."""

    sequence: Sequence
    arrived: int
    side_by_side: float | None = None  # when it would have ended, with equal shares
    ended: int | None = None


def computed_by_turns(arrivals: list[tuple[int, int]], step_tokens: int) -> list[Prompt]:
    """Compute prompts (the step of its arrival, its length) of one client, and again with equal shares."""
    memory = memory_of(kv_blocks=600, block_size=4, max_running=64, max_step_tokens=step_tokens, policy=fair)
    prompts: list[Prompt] = []
    left: dict[int, float] = {}  # tokens that each prompt would still need
    got = 0
    for number in range(80):
        for index, (at, length) in enumerate(arrivals):
            if at == number:
                left[len(prompts)] = length
                prompts.append(Prompt(sequence(f"{index}", length, 1, client_name="only"), got))
                memory.add(prompts[-1].sequence)
        spent = sum(tokens for _, tokens in memory.run())
        equal = float(spent)
        moment = float(got)
        got += spent
        while equal > 1e-9 and left:
            share = min(min(left.values()), equal / len(left))
            moment = moment + share * len(left)
            equal = equal - share * len(left)
            left = {index: rest - share for index, rest in left.items()}
            for index in [index for index, rest in left.items() if rest < 1e-9]:
                prompts[index].side_by_side = moment
                del left[index]
        for prompt in prompts:
            if prompt.ended is None and prompt.sequence.place is Place.NOWHERE:
                prompt.ended = got
    return prompts


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 25), st.sampled_from([1, 5, 5, 40, 120])), min_size=1, max_size=14),
    step_tokens=st.sampled_from([64, 80]),
)
def test_a_prompt_takes_at_most_twice_the_tokens_of_its_client_that_it_would_take_side_by_side(
    arrivals: list[tuple[int, int]], step_tokens: int
) -> None:
    for prompt in computed_by_turns(arrivals, step_tokens):
        assert prompt.ended is not None
        assert prompt.side_by_side is not None
        side_by_side = prompt.side_by_side - prompt.arrived
        assert prompt.ended - prompt.arrived <= 2 * side_by_side + 2 * step_tokens


LONGEST_PROMPT = 20
LONGEST_ANSWER = 12
PLACES = 4
# The most tokens of a batch: choices of a prompt share its blocks, so the KV cache does not bound it.
MOST_IN_BATCH = PLACES * (LONGEST_PROMPT + LONGEST_ANSWER)
BOUND = 2 * max(LONGEST_PROMPT, GENERATED_WEIGHT * MOST_IN_BATCH)


def largest_difference(policy: Policy, seed: int, kv_blocks: int, num_steps: int = 300) -> int:
    """Return by how much more service one client got than another, while both had sequences waiting all the time.

    One sends long prompts with several choices, others sometimes. All have something waiting before each step.
    """
    rng = random.Random(seed)
    options = {"max_running": PLACES, "max_step_tokens": 16, "lookahead": 0, "prefix_cache": seed % 2 == 0}
    memory = memory_of(kv_blocks=kv_blocks, policy=policy, **options)
    scheduler = memory.scheduler
    memory.overlap = seed % 3 == 0
    service: Counter[str] = Counter()
    computed: Counter[Sequence] = Counter()
    lowest: Counter[str] = Counter()
    most = 0
    open_: list[Sequence] = []
    greed = {"a": 1.0, "b": rng.random(), "c": rng.random()}
    for _ in range(num_steps):
        for client, share in greed.items():
            while sum(one.client_name == client and one.place is Place.WAITING for one in open_) < 2:
                prompt = [
                    *range(rng.choice([0, 8])),
                    *(rng.randrange(99) for _ in range(rng.randint(1, 2 + int(10 * share)))),
                ]
                some = [
                    sequence("", prompt, rng.randint(1, 2 + int(10 * share)), client_name=client)
                    for _ in range(rng.choice([1, 3]) if share == 1 else 1)
                ]
                memory.add_choices(*some)
                open_ += some
        if rng.random() < 0.1:
            memory.remove(open_.pop(rng.randrange(len(open_))))
            if not all(any(o.client_name == c and o.place is Place.WAITING for o in open_) for c in greed):
                continue
        step = scheduler.schedule()
        if step is None:
            memory.settle()
            continue
        for one, start, num_tokens, max_draws, _, _ in step.chunks:
            end = min(start + num_tokens, one.prompt_len)
            service[one.client_name] += max(0, end - max(start, computed[one])) + GENERATED_WEIGHT * max_draws
            computed[one] = max(end, computed[one])
        memory.execute(step, lambda _: rng.randrange(99))
        open_ = [one for one in open_ if one.place is not Place.NOWHERE]
        for pair in ("ab", "ba", "bc", "cb", "ac", "ca"):
            difference = service[pair[0]] - service[pair[1]]
            lowest[pair] = min(lowest[pair], difference)
            most = max(most, difference - lowest[pair])
    return most


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), kv_blocks=st.sampled_from([10, 16, 64]))
def test_while_clients_wait_all_the_time_the_difference_of_their_service_is_bounded(seed: int, kv_blocks: int) -> None:
    """Theorem 4.4 of Sheng et al. (OSDI 2024)."""
    assert largest_difference(fair, seed, kv_blocks) <= BOUND
