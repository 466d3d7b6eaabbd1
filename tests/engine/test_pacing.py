"""The prefill budget with a machine whose steps take a known time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.accounts.step_causes import load_of
from oaiserve.engine.pacing import FIRST, LEAST_SECONDS, LEAST_TOKENS, UNIT, PrefillBudget, StepTime
from oaiserve.engine.policy import Policy, fair, fcfs
from oaiserve.engine.step import Step
from oaiserve.explain.step_cost import KNOTS, StepCost
from tests.engine.doubles import TIMEOUT_SECONDS, Clock, Inbox, ScriptedRunner, make_engine, request
from tests.engine.memory import memory_of, sequence


def settle(budget: PrefillBudget, ns_per_token: int, steps: int = 60) -> int:
    for _ in range(steps):
        budget.observe(
            num_decodes=4, num_prefill_tokens=budget.tokens, step_ns=10_000_000 + ns_per_token * budget.tokens
        )
    return budget.tokens


@pytest.mark.parametrize(("ns_per_token", "fitting"), [(100_000, 400), (1_000_000, 40)])
def test_the_budget_settles_where_a_step_takes_the_target(ns_per_token: int, fitting: int) -> None:
    budget = PrefillBudget(target_seconds=0.05, most_tokens=2048)
    assert fitting * 0.7 <= settle(budget, ns_per_token) <= fitting * 1.3


def test_the_budget_grows_again_when_steps_get_faster() -> None:
    budget = PrefillBudget(target_seconds=0.05, most_tokens=512)
    settle(budget, 1_000_000)
    assert settle(budget, 1_000) == 512


def test_the_budget_never_stops_prefill() -> None:
    budget = PrefillBudget(target_seconds=0.001, most_tokens=512)
    assert settle(budget, 1_000_000) == LEAST_TOKENS


def test_steps_without_decodes_or_without_prefill_change_nothing() -> None:
    budget = PrefillBudget(target_seconds=0.05, most_tokens=512)
    budget.observe(num_decodes=0, num_prefill_tokens=512, step_ns=10**10)
    budget.observe(num_decodes=4, num_prefill_tokens=0, step_ns=10**10)
    assert budget.tokens == 512


@pytest.mark.usefixtures("overlap")
def test_a_long_prompt_is_cut_smaller_while_another_request_decodes() -> None:
    clock, inbox = Clock(), Inbox()
    runner = ScriptedRunner(gated=True, computing=lambda step: clock.move(0.001 * step.num_tokens))
    options = {"max_step_tokens": 200, "kv_blocks": 400, "tokenize_workers": 0, "itl_target_seconds": 0.04}
    with make_engine(runner, clock_ns=clock, **options) as engine:
        engine.submit(request("decodes", prompt_len=2, max_tokens=60), inbox)
        runner.started.get(timeout=TIMEOUT_SECONDS)  # so that there is something to wait for the other's prompt
        engine.submit(request("long", prompt_len=1400), inbox)
        runner.permit(1000)
        inbox.wait_terminal("decodes", "long")
    mixed = [step for step in runner.steps if len(step) == 2 and step[1][2] > 1]
    assert all(tokens <= 45 for (_, _, _), (_, _, tokens) in mixed[8:])
    assert len(mixed) > 15


# -- the time of a step -----------------------------------------------------------------------------------------------


def cost(ns_per_row: float, least_ns: float = 0.0) -> StepCost:
    return StepCost(tuple(max(least_ns, ns_per_row * knot) for knot in KNOTS), prompt_context_ns=1_000.0)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6), policy=st.sampled_from([fair, fcfs]))
def test_no_step_takes_longer_than_its_target_and_prompts_go_on(lengths: list[int], policy: Policy) -> None:
    memory, known = memory_of(kv_blocks=300, max_step_tokens=512, policy=policy), cost(1e6)
    memory.scheduler.step_time = pace = StepTime(lambda: known, 0.04, 512)
    memory.add(*(sequence(f"{number}", length, 20) for number, length in enumerate(lengths)))
    while (step := memory.scheduler.schedule()) is not None:
        prompts = [chunk for chunk in step.chunks if chunk.num_tokens > 1]
        least_ns = known.expected_ns(load_of(Step([chunk for chunk in step.chunks if chunk.num_tokens == 1])))
        most_ns = max(pace.target_ns, least_ns + pace.target_ns)
        assert known.expected_ns(load_of(step)) <= most_ns + UNIT * 150 * known.prompt_context_ns
        assert prompts or all(one.num_uncomputed == 1 for one in memory.scheduler.running)
        memory.execute(step)


@pytest.mark.parametrize(
    ("known", "seconds"),
    [
        (cost(1e6), 0.128),  # rows are computed with from the first one on
        (cost(1e6, 60e6), 0.192),  # weights are read for 60 ms
        (cost(1e3), LEAST_SECONDS),  # all is fast
    ],
)
def test_the_target_is_the_time_of_the_smallest_efficient_step(known: StepCost, seconds: float) -> None:
    pace = StepTime(lambda: known, None, 2048)
    pace.begin(Step())
    assert pace.target_ns == pytest.approx(seconds * 1e9)


def test_prompts_are_cut_small_while_nobody_knows_what_a_step_costs() -> None:
    learnt: list[StepCost] = []
    memory = memory_of(kv_blocks=900, max_step_tokens=512, policy=fair)
    memory.scheduler.step_time = StepTime(lambda: learnt[0] if learnt else None, 1.0, 512)
    memory.add(sequence("a", 1300))
    assert [memory.run() for _ in range(2)] == [[("a", FIRST)]] * 2
    learnt.append(cost(1e3))
    assert [memory.run()[0][1] for _ in range(4)] == [128, 256, 512, 148]
