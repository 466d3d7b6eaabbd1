"""Background work: the steps of all others are those that they would have without it, up to a bound on their time."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.scheduling.pacing import BESIDE_FOREGROUND, StepTime
from oaiserve.engine.scheduling.policy import POLICIES
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.engine.sequences.step import Step
from oaiserve.engine.sequences.step_load import load_of
from oaiserve.explain.step_cost import KNOTS, StepCost
from oaiserve.facts.record import WaitReason
from tests.engine.memory import Memory, memory_of, sequence

# Weights are read for 5 ms, and rows are cheap compared to that; or each costs as much as the one before.
CHEAP_ROWS = StepCost(tuple(5e6 + 2e4 * knot for knot in KNOTS), decode_context_ns=100.0, draw_ns=1_000.0)
FLAT_BY_CHANCE = StepCost(tuple(5e6 if knot < 8 else 1e6 * knot for knot in KNOTS))
DEAR_ROWS = StepCost(tuple(1e6 * knot for knot in KNOTS), prompt_context_ns=1_000.0)


def memory_with(*sequences: Sequence, cost: StepCost | None = CHEAP_ROWS, **options: Any) -> Memory:
    options = {"kv_blocks": 200, "max_step_tokens": 64, **options}
    return memory_of(*sequences, step_time=StepTime(lambda: cost, options["max_step_tokens"]), **options)


def of_others(step: Step | None) -> Step:
    return Step([] if step is None else [chunk for chunk in step.chunks if not chunk.sequence.is_background])


def has_work(memory: Memory) -> bool:
    return memory.scheduler.foremost is memory.scheduler.foreground


arrivals = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps of the foreground since the one before
        st.integers(1, 40),
        st.integers(1, 20),
        st.sampled_from("ab"),
        st.integers(-1, 1),
        st.booleans(),
    ),
    max_size=20,
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=arrivals,
    policy=st.sampled_from(list(POLICIES)),
    overlap=st.booleans(),
    cost=st.sampled_from([CHEAP_ROWS, DEAR_ROWS, None]),
    blocks=st.integers(16, 40),
)
def test_others_are_scheduled_as_if_there_were_no_background_work(
    arrivals: list[tuple[int, int, int, str, int, bool]], policy: str, overlap: bool, cost: StepCost | None, blocks: int
) -> None:
    options = {"kv_blocks": blocks, "policy": POLICIES[policy], "prefix_cache": False, "max_step_tokens": 24}
    alone = memory_with(cost=cost, **options)
    both = memory_with(cost=cost, **options)
    alone.overlap = both.overlap = overlap
    for place, (after, prompt, max_tokens, client, number, is_background) in enumerate(arrivals):
        for _ in range(after):
            if not has_work(both):
                both.run()  # a step of background work alone: others would have none
                continue
            step = both.scheduler.schedule()
            reference = alone.scheduler.schedule()
            own = of_others(step)
            assert [(c.sequence.request_id, *c[1:]) for c in own.chunks] == [
                (c.sequence.request_id, *c[1:]) for c in of_others(reference).chunks
            ]
            if step is not None and own.chunks:
                most_ns = load_of(own) if cost is None else BESIDE_FOREGROUND * cost.expected_ns(load_of(own))
                assert (load_of(step) if cost is None else cost.expected_ns(load_of(step))) <= most_ns
            elif step is not None:
                assert not step.chunks, "it has held them up"
            for memory, next_step in ((both, step), (alone, reference)):
                memory.settle() if next_step is None else memory.execute(next_step)
        for memory in (both,) if is_background else (both, alone):
            fields = {"priority": number, "client_name": client, "is_background": is_background}
            memory.add(sequence(f"{place}", prompt, max_tokens, **fields))
    both.run_out()
    assert both.scheduler.pool.num_used == 0


def background(number: int, **fields: Any) -> list[Sequence]:
    return [sequence(f"later {n}", 4, 12, is_background=True, **fields) for n in range(number)]


def test_alone_background_work_has_the_steps_that_others_would_have() -> None:
    steps = []
    for is_background in (True, False):
        some = [sequence(f"{n}", 5 + n, 12, is_background=is_background) for n in range(9)]
        memory = memory_with(*some, cost=DEAR_ROWS, kv_blocks=60)
        steps.append([memory.run() for _ in range(40)])
    assert steps[0] == steps[1]


@pytest.mark.parametrize(("cost", "most"), [(CHEAP_ROWS, 4), (FLAT_BY_CHANCE, 0), (DEAR_ROWS, 0), (None, 0)])
def test_beside_others_it_has_the_rows_that_the_learnt_cost_allows_and_they_take_turns(
    cost: StepCost | None, most: int
) -> None:
    memory = memory_with(*(later := background(10)), cost=cost, max_running=16)
    memory.run()
    memory.run()
    memory.add(sequence("now", 4, 30))
    memory.run()
    steps = [dict(memory.run()) for _ in range(6)]
    assert {len(step.keys() - {"now"}) for step in steps} == {most}
    assert all("now" in step for step in steps)
    counts = [sum(one.request_id in step for step in steps) for one in later]
    assert max(counts) - min(counts) <= 1


def test_background_decodes_of_two_clients_take_turns_beside_the_foreground() -> None:
    cost = StepCost(tuple(5e6 + 1e5 * knot for knot in KNOTS))  # one row fits in addition to the foreground
    later = [sequence(f"a{n}", 4, 9, is_background=True, client_name="a") for n in range(60)]
    later.append(sequence("b", 4, 9, is_background=True, client_name="b"))
    options = {"policy": POLICIES["fair"], "max_running": 80, "max_step_tokens": 256, "kv_blocks": 400}
    memory = memory_with(*later, cost=cost, **options)
    while any(one.num_generated == 0 for one in later):
        memory.run()
    memory.add(sequence("now", 4, 140))
    memory.run()
    before = {one: one.num_generated for one in later}
    for _ in range(2 * len(later)):
        memory.run()
    assert {one.num_generated - before[one] for one in later} == {2}


def test_none_begins_while_others_wait_and_its_wait_has_a_reason() -> None:
    (later,) = background(1)
    memory = memory_with(sequence("a", 4, 3), sequence("b", 4, 3), later, max_running=1)
    for now_ns in range(1, 8):
        if (step := memory.scheduler.schedule(now_ns)) is not None:
            memory.execute(step)
    assert later.place is Place.RUNNING
    assert later.waits_ns == {WaitReason.STEP_UNDER_WAY: 1, WaitReason.FOREGROUND: 6}


def test_it_gives_up_places_and_blocks_and_goes_on_later_with_the_same_tokens() -> None:
    memory = memory_with(*(later := background(2)), kv_blocks=8, max_running=2)
    for _ in range(3):
        memory.run()
    memory.add(sequence("now", 20, 8))
    assert ("now", 20) in memory.run()
    assert [one.place for one in later].count(Place.WAITING) >= 1
    memory.run_out()
    assert [one.generated_ids for one in later] == [[7] * 12] * 2
    assert memory.scheduler.foreground.num_preemptions == 0, "nobody else was preempted"


def test_what_others_have_cached_stays_while_background_work_has_blocks_of_its_own_to_use_again() -> None:
    memory = memory_with(sequence("now", 16, 1), kv_blocks=12, max_running=1)
    memory.run_out()
    for one in background(6):
        memory.add(one)
        memory.run_out()
    memory.add(again := sequence("now", 16, 1))
    memory.run()
    assert again.num_cached == 12


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(list(POLICIES)),
    overlap=st.booleans(),
    cost=st.sampled_from([CHEAP_ROWS, DEAR_ROWS, None]),
    max_running=st.integers(1, 3),
    wait_steps=st.integers(0, 40),
    is_running=st.booleans(),
    choices=st.integers(1, 3),
    blocks=st.integers(12, 40),
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 10)), min_size=3, max_size=9),
)
def test_work_that_can_only_wait_for_a_time_has_its_turn_while_others_are_always_busy(
    policy: str,
    overlap: bool,
    cost: StepCost | None,
    max_running: int,
    wait_steps: int,
    is_running: bool,
    choices: int,
    blocks: int,
    sizes: list[tuple[int, int]],
) -> None:
    memory = memory_with(cost=cost, kv_blocks=blocks, max_running=max_running, policy=POLICIES[policy])
    memory.overlap = overlap
    prompt = [*range(9)]
    waits = {"is_background": True, "background_wait_ns": wait_steps}
    later = [sequence("later", prompt, 6, client_name="later", **waits) for _ in range(choices)]
    if is_running:
        memory.add_choices(*later)
        memory.run()
    busy: list[Sequence] = []
    most_steps = wait_steps + 200  # each of the others takes 22 steps at most, and takes turns with two more
    for now in range(1, most_steps):
        busy = [one for one in busy if one.place is not Place.NOWHERE or memory.is_in_flight(one)]
        for client in {"a", "b", "c"} - {one.client_name for one in busy}:
            length, max_tokens = sizes[now % len(sizes)]
            busy.append(sequence(f"{client} {now}", length, max_tokens, client_name=client))
            memory.add(busy[-1])
        if now == 1 and not is_running:
            memory.add_choices(*later)
        step = memory.scheduler.schedule(now)
        memory.settle() if step is None else memory.execute(step)
        if all(len(one.token_ids) == one.max_len for one in later):
            break
    assert [one.generated_ids for one in later] == [[7] * 6] * choices, "it still waits"
    memory.run_out()
    assert memory.scheduler.pool.num_used == 0


def test_running_work_keeps_its_blocks_when_it_no_longer_waits_for_others() -> None:
    (later,) = background(1, background_wait_ns=5)
    memory = memory_with(later, cost=None)
    memory.run()
    memory.add(sequence("now", 4, 30))
    for now_ns in (1, 4, 5):
        step = memory.scheduler.schedule(now_ns)
        assert step is not None
        assert [chunk.sequence.request_id for chunk in step.chunks] == ["now"]
        memory.execute(step)
    blocks = later.blocks
    assert sorted(memory.run()) == [("later 0", 1), ("now", 1)]
    assert (later.blocks, later.num_preemptions) == (blocks, 0)
    assert memory.scheduler.foreground.running == memory.scheduler.running
    assert later in memory.scheduler.running
