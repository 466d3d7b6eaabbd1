"""The learnt cost of a step, compared with a machine whose steps take a known time."""

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.explain.step_cost import KNOTS, Load, Seen, StepCost, Work, place
from oaiserve.explain.step_cost_fit import BATCH, FIT_NS, LEAST_NS, LEAST_STEPS, SPEED_SECONDS, StepCostFit

# Up to 4 rows, weights are read; more are computed with. Steps with prompts begin with an effort of their own.
TRUE = StepCost(
    rows_ns=tuple(5e6 + 3e5 * max(0, rows - 4) for rows in KNOTS),
    decode_context_ns=900.0,
    cached_context_ns=100.0,
    prompt_context_ns=150.0,
    draw_ns=60_000.0,
    edit_ns=200_000.0,
    prompts_ns=800_000.0,
)


def some_load(rng: random.Random) -> Load:
    decodes = rng.choice([0, 1, 1, 2, 5, 9, 30, 64])
    prompt_tokens = rng.choice([0, 0, 0, 7, 100, 400]) if decodes else rng.choice([5, 60, 512])
    draws = decodes + (prompt_tokens > 0 and rng.random() < 0.5)
    return Load(
        decodes,
        sum(rng.randrange(600) for _ in range(decodes)),
        512 * decodes if rng.random() < 0.3 else 0,
        prompt_tokens,
        prompt_tokens * rng.randrange(800),
        draws,
        rng.randrange(draws + 1) if rng.random() < 0.2 else 0,
    )


def taught(rng: random.Random, number: int, noise: float = 0.0, outliers: float = 0.0) -> StepCostFit:
    fit = StepCostFit()
    for _ in range(number):
        load = some_load(rng)
        ns = TRUE.expected_ns(load) * rng.gauss(1, noise) * (rng.uniform(2, 4) if rng.random() < outliers else 1)
        fit.observe(load, int(ns))
    return fit


def errors(cost: StepCost, rng: random.Random) -> list[float]:
    loads = [some_load(rng) for _ in range(200)]
    return sorted(abs(cost.expected_ns(load) / TRUE.expected_ns(load) - 1) for load in loads)


def test_nothing_is_expected_before_the_first_steps() -> None:
    fit = StepCostFit()
    assert fit.cost is None
    fit.observe(Load(1, draws=1), 1_000_000)
    assert fit.cost is None


def test_the_cost_of_steps_is_learnt_despite_noise_and_steps_that_were_held_up() -> None:
    rng = random.Random(1)
    relative = errors(taught(rng, 600, noise=0.03, outliers=0.05).cost, rng)
    assert statistics.median(relative) < 0.025
    assert relative[int(0.95 * len(relative))] < 0.08


def test_steps_that_lacked_a_core_teach_little_beside_others_and_all_if_there_are_no_others() -> None:
    load = Load(4, 500, draws=4)
    others = StepCostFit()
    for _ in range(400):
        others.observe(load, 9_000_000, 0.01)
    assert others.cost.expected_ns(load) == pytest.approx(9_000_000, rel=0.01)
    mixed = StepCostFit()
    for number in range(400):
        mixed.observe(load, *((6_000_000, 1.0) if number % 4 == 0 else (9_000_000, 0.01)))
    assert mixed.cost.expected_ns(load) == pytest.approx(6_000_000, rel=0.03)


def test_two_rows_may_cost_less_than_one_and_contexts_still_cost_what_they_do() -> None:
    rng = random.Random(6)
    fit = StepCostFit()
    true = replace(TRUE, rows_ns=(5.6e6, *TRUE.rows_ns[1:]), draw_ns=0.0)
    for _ in range(800):
        decodes = rng.choice([1, 2, 3])
        load = Load(decodes, sum(rng.randrange(100, 400) for _ in range(decodes)), draws=decodes)
        fit.observe(load, true.expected_ns(load))
    load = Load(3, 4500, draws=3)
    assert fit.cost.expected_ns(load) == pytest.approx(true.expected_ns(load), rel=0.03)


def test_what_no_new_step_says_anything_about_is_not_forgotten() -> None:
    rng = random.Random(3)
    fit = taught(rng, 400)
    for _ in range(3000):
        load = Load(64, sum(rng.randrange(600) for _ in range(64)), draws=64)
        fit.observe(load, TRUE.expected_ns(load))
    alone = Load(1, 300, draws=1)
    assert fit.cost.expected_ns(alone) == pytest.approx(TRUE.expected_ns(alone), rel=0.05)


def test_what_long_prompts_and_few_rows_taught_gives_way_within_seconds() -> None:
    rng = random.Random(5)
    fit = taught(random.Random(5), 400)
    for _ in range(4000):  # minutes
        prompt_tokens = rng.choice([0, 512])
        load = Load(rng.choice([1, 2, 3]), 500, 0, prompt_tokens, 600 * prompt_tokens, 3)
        fit.observe(load, TRUE.expected_ns(load))
    many = Load(64, 9000, draws=64)
    few = Load(2, 500, draws=3)
    since_ns = 0
    while since_ns < 3e9 * SPEED_SECONDS:
        ns = int(1.08 * TRUE.expected_ns(many))
        fit.observe(many, ns)
        since_ns += ns
    assert fit.cost.expected_ns(many) == pytest.approx(1.08 * TRUE.expected_ns(many), rel=0.01)
    # Whether all steps or only these have become slower cannot be known yet.
    assert TRUE.expected_ns(few) <= fit.cost.expected_ns(few) <= 1.08 * TRUE.expected_ns(few)


def test_a_cached_token_costs_no_more_than_another_one_and_as_much_while_none_was_cached() -> None:
    def learnt(true: StepCost, most_cached: int) -> StepCost:
        rng = random.Random(7)
        fit = StepCostFit()
        for _ in range(800):
            load = Load(8, rng.randrange(8000), rng.randrange(most_cached + 1), draws=8)
            fit.observe(load, true.expected_ns(load))
        return fit.cost

    cost = learnt(TRUE, most_cached=0)
    assert cost.decode_context_ns == pytest.approx(900, rel=0.05)
    assert cost.cached_context_ns == pytest.approx(cost.decode_context_ns, rel=0.01)
    assert learnt(TRUE, most_cached=8000).cached_context_ns == pytest.approx(100, abs=30)
    cost = learnt(replace(TRUE, cached_context_ns=1500.0), most_cached=8000)
    assert cost.cached_context_ns <= cost.decode_context_ns * 1.0001


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 300), st.integers(LEAST_NS // LEAST_STEPS, 10**9)),
        min_size=LEAST_STEPS,
        max_size=80,
    )
)
def test_whatever_was_seen_more_than_one_row_is_never_cheaper(steps: list[tuple[int, int, int]]) -> None:
    fit = StepCostFit()
    for decodes, prompt_tokens, ns in steps:
        fit.observe(Load(decodes, 100 * decodes, 0, max(1 - decodes, prompt_tokens), 0, decodes), ns)
    cost = fit.cost
    assert all(low <= high + 1e-6 for low, high in pairwise(cost.rows_ns[1:]))
    assert cost.rows_ns[1] >= 0.49 * cost.rows_ns[0]
    assert min(cost.rows_ns[0], cost.decode_context_ns, cost.prompt_context_ns, cost.draw_ns, cost.prompts_ns) >= 0


@given(st.integers(1, 30_000))
def test_a_number_of_rows_lies_on_the_line_through_its_knots(rows: int) -> None:
    index, way = place(rows)
    assert (1 - way) * KNOTS[index] + way * KNOTS[index + 1] == pytest.approx(rows)
    assert 0 <= way < 1 or rows >= KNOTS[-1]


def test_one_fit_runs_at_a_time_and_what_is_gathered_meanwhile_is_bounded() -> None:
    fits: list[Callable[[], None]] = []
    fit = StepCostFit(fits.append)
    load = Load(1, draws=1)
    for ns in (LEAST_NS, 10 * LEAST_NS):  # The second batch is one too many.
        for _ in range(BATCH + LEAST_STEPS):
            fit.observe(load, ns)
    assert (len(fits), fit.cost) == (1, None)
    fits.pop()()
    assert fit.cost is not None
    fit.observe(load, LEAST_NS)
    fits.pop()()
    assert fit.cost.expected_ns(load) == pytest.approx(LEAST_NS, rel=0.01)


def test_fits_come_by_the_time_of_steps_and_sooner_if_these_surprise() -> None:
    fits: list[Callable[[], None]] = []
    fit = StepCostFit(fits.append)
    load = Load(1, draws=1)

    def steps_until_the_next_fit(ns: int, error: float) -> int:
        number = 0
        before = len(fits)
        while len(fits) == before:
            fit.observe(load, ns, error=error)
            number += 1
        fits[-1]()
        return number

    assert steps_until_the_next_fit(LEAST_NS, 0.0) == LEAST_STEPS  # nothing was expected
    assert steps_until_the_next_fit(10_000_000, 0.0) == FIT_NS // 10_000_000
    assert steps_until_the_next_fit(10_000_000, 0.3) == LEAST_NS // 10_000_000
    assert steps_until_the_next_fit(1000, 0.3) == LEAST_NS // 1000
    assert steps_until_the_next_fit(10 * FIT_NS, 0.0) == LEAST_STEPS


def test_a_fit_that_fails_is_logged_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fit = StepCostFit()
    load = Load(1, draws=1)
    with monkeypatch.context() as broken:
        broken.setattr(fit, "_solve", lambda: 1 / 0)
        for _ in range(LEAST_STEPS):
            fit.observe(load, LEAST_NS)
    assert "could not be learnt from 4 steps" in caplog.text
    assert fit.cost is None
    for _ in range(LEAST_STEPS):
        fit.observe(load, LEAST_NS)
    assert fit.cost is not None


@pytest.mark.parametrize(
    ("load", "is_covered"),
    [
        (Load(4, 400, draws=4), True),
        (Load(8, 800, draws=8), True),
        (Load(9, 900, draws=9), False),  # more than twice as many rows
        (Load(1, 4096, draws=1), True),
        (Load(1, 4097, draws=1), False),  # a context more than four times as long
        (Load(prompt_tokens=4, prompt_context=16), False),  # no prompt was seen
    ],
)
def test_steps_far_from_those_seen_are_not_covered(load: Load, is_covered: bool) -> None:
    assert Seen(least_rows=1, most_rows=4, decode_context=1000).covers(load) is is_covered


def test_steps_with_far_fewer_rows_than_those_seen_are_not_covered() -> None:
    seen = Seen(least_rows=64, most_rows=512, prompt_tokens=512)
    assert [seen.covers(Load(rows, draws=rows)) for rows in (15, 16)] == [False, True]


def test_a_fit_covers_the_steps_that_it_learnt_from() -> None:
    fit = StepCostFit()
    for _ in range(LEAST_STEPS):
        fit.observe(Load(1, 100, draws=1), LEAST_NS)
    assert [fit.cost.covers(load) for load in (Load(2, draws=2), Load(prompt_tokens=200))] == [True, False]
    assert fit.cost.alone_ns(Work(1, 200, 0, 1, 20, 20, needs_ids=False), 512) is None
    for _ in range(LEAST_STEPS):
        fit.observe(Load(prompt_tokens=200, prompt_context=20_000, draws=1), 10 * FIT_NS, error=None)
    assert fit.cost.covers(Load(prompt_tokens=200))
    assert fit.cost.alone_ns(Work(1, 200, 0, 1, 20, 20, needs_ids=False), 512) > 10 * FIT_NS


def test_a_slower_cost_is_slower_in_all_of_its_numbers() -> None:
    load = Load(3, 500, 100, 20, 300, 3, 1, 1)
    assert TRUE.times(2.5).expected_ns(load) == pytest.approx(2.5 * TRUE.expected_ns(load), abs=3)
