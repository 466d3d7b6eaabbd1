"""The prefill budget with a machine whose steps take a known time."""

from __future__ import annotations

import pytest

from oaiserve.engine.pacing import LEAST_TOKENS, PrefillBudget
from tests.engine.doubles import TIMEOUT_SECONDS, Clock, Inbox, ScriptedRunner, make_engine, request


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
