"""The prompts of steps on a machine whose steps take a known time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.scheduling import scheduler
from oaiserve.engine.scheduling.pacing import FIRST, LEAST_SECONDS, UNIT, StepTime
from oaiserve.engine.scheduling.policy import Policy, fair, fcfs
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Step
from oaiserve.engine.sequences.step_load import load_of
from oaiserve.explain.step_cost import KNOTS, StepCost
from tests.engine.memory import FixedTarget, Memory, memory_of, sequence


def cost(ns_per_row: float, least_ns: float = 0.0) -> StepCost:
    return StepCost(tuple(max(least_ns, ns_per_row * knot) for knot in KNOTS), prompt_context_ns=1_000.0)


def paced(known: StepCost, seconds: float, *sequences: Sequence, itl_seconds: float | None = None) -> Memory:
    step_time = FixedTarget(lambda: known, seconds, 512, itl_seconds)
    return memory_of(*sequences, kv_blocks=900, max_step_tokens=512, policy=fair, step_time=step_time)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6), policy=st.sampled_from([fair, fcfs]))
def test_no_step_takes_longer_than_its_target_and_prompts_go_on(lengths: list[int], policy: Policy) -> None:
    known = cost(1e6)
    pace = FixedTarget(lambda: known, 0.04, 512)
    some = [sequence(f"{number}", length, 20) for number, length in enumerate(lengths)]
    memory = memory_of(*some, kv_blocks=300, max_step_tokens=512, policy=policy, step_time=pace)
    while (step := memory.scheduler.schedule()) is not None:
        prompts = [chunk for chunk in step.chunks if chunk.num_tokens > 1]
        least_ns = known.expected_ns(load_of(Step([chunk for chunk in step.chunks if chunk.num_tokens == 1])))
        most_ns = max(pace.target_ns, least_ns + pace.target_ns)
        assert known.expected_ns(load_of(step)) <= most_ns + UNIT * 150 * known.prompt_context_ns
        assert prompts or all(one.num_uncomputed == 1 for one in memory.scheduler.running)
        memory.execute(step)


@pytest.mark.parametrize(("itl_seconds", "most_rows"), [(0.04, 40), (0.001, 1 + UNIT), (None, 170)])
def test_a_step_with_decodes_keeps_the_target_of_itl_and_prompts_go_on(
    itl_seconds: float | None, most_rows: int
) -> None:
    memory = paced(cost(1e6), 0.2, sequence("decodes", 2, 60), itl_seconds=itl_seconds)
    memory.run()
    memory.add(sequence("long", 1400))
    steps = [dict(memory.run()) for _ in range(30)]
    mixed = [1 + step["long"] for step in steps if step.get("long", 0) > 1 and "decodes" in step]
    assert most_rows - UNIT < max(mixed) <= most_rows
    assert min(mixed[:-1]) >= UNIT


@pytest.mark.parametrize(
    ("known", "seconds"),
    [
        (cost(1e6), 0.128),  # rows are computed with from the first one on
        (cost(1e6, 60e6), 0.192),  # weights are read for 60 ms
        (cost(1e3), LEAST_SECONDS),  # all is fast
    ],
)
def test_the_target_is_the_time_of_the_smallest_efficient_step(known: StepCost, seconds: float) -> None:
    pace = StepTime(lambda: known, 2048)
    pace.begin(Step())
    assert pace.target_ns == pytest.approx(seconds * 1e9)


def test_prompts_are_cut_small_while_nobody_knows_what_a_step_costs() -> None:
    learnt: list[StepCost] = []
    step_time = FixedTarget(lambda: learnt[0] if learnt else None, 1.0, 512)
    memory = memory_of(sequence("a", 1300), kv_blocks=900, max_step_tokens=512, policy=fair, step_time=step_time)
    assert [memory.run() for _ in range(2)] == [[("a", FIRST)]] * 2
    learnt.append(cost(1e3))
    assert [memory.run()[0][1] for _ in range(4)] == [128, 256, 512, 148]


WEIGHTS = StepCost(tuple(20e6 + 1e6 * knot for knot in KNOTS))  # the weights are read for 20 ms


def test_a_short_prompt_ends_in_a_step_that_a_long_one_hardly_lengthens() -> None:
    memory = paced(WEIGHTS, 0.2, sequence("long", 2000))
    assert [memory.run() for _ in range(3)][-1] == [("long", 176)]
    memory.add(sequence("short", 37, 1))
    assert memory.run() == [("short", 37)]  # 57 ms; with 16 more tokens it would be 73 ms
    memory.add(sequence("another", 70, 1))
    assert memory.run() == [("another", 70), ("long", 16)]  # 106 ms instead of 90 ms


def test_steps_are_shorter_for_a_while_after_a_short_prompt_came_beside_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "SHORTER_STEPS", 8)
    memory = paced(WEIGHTS, 0.4, sequence("long", 3500))
    before = [memory.run() for _ in range(4)][-1][0][1]
    memory.add(sequence("short", 37, 1))
    assert memory.run() == [("short", 37)]
    *during, after = [dict(memory.run())["long"] for _ in range(8)]
    assert during == [192] * 7  # as many as 95 % of the pace of 368 tokens takes
    assert before == after == 368


def test_short_prompts_share_a_step_as_others_do() -> None:
    memory = paced(WEIGHTS, 0.2, sequence("long", 2000))
    for _ in range(3):
        memory.run()
    memory.add(*(sequence(f"{number}", 40, 1) for number in range(3)))
    assert memory.run() == [("0", 40), ("1", 40), ("2", 40), ("long", 32)]  # 172 ms instead of 140 ms


def test_prompts_of_background_work_fill_each_step() -> None:
    memory = paced(WEIGHTS, 0.2, sequence("long", 2000, is_background=True))
    for _ in range(3):
        memory.run()
    memory.add(sequence("short", 37, 1, is_background=True))
    assert memory.run() == [("short", 37), ("long", 128)]


def test_a_prompt_about_as_long_as_the_one_beside_it_leaves_steps_as_they_are() -> None:
    memory = paced(cost(1e6), 0.16, sequence("long", 1400))
    memory.run()
    memory.add(sequence("other", 400))
    assert sum(dict(memory.run()).values()) > 100
