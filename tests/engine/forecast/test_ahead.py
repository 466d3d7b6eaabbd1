"""The queue ahead of a request, compared with steps that are counted by hand, and with the real scheduler."""

import random

import pytest

from oaiserve.engine.accounts.step_causes import load_of
from oaiserve.engine.forecast.ahead import Ahead, Decoding, Expected, Prompt, Rules, follow
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.scheduling.blocks import BlockPool
from oaiserve.engine.scheduling.limits import Limits
from oaiserve.engine.scheduling.pacing import StepTime
from oaiserve.engine.scheduling.policy import POLICIES
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.sequence import Sequence
from oaiserve.explain.step_cost import KNOTS, StepCost

# A step takes 10 ms, and 0.25 ms more for each row beyond 16.
COST = StepCost(tuple(1e6 * (10 + 0.25 * max(0, rows - 16)) for rows in KNOTS))


def rules(policy: str, **fields: float) -> Rules:
    return Rules(Scheduler(BlockPool(0, 16), Limits(4, 512), policy=POLICIES[policy]).order, services={}, **fields)


RULES = rules("fair")


def ahead(
    decodes: list[Decoding],
    prompts: list[Prompt],
    place: int = 0,
    rules: Rules = RULES,
    steps: int = 0,
    expected: Expected | None = None,
) -> Ahead:
    return follow(COST, StepTime(lambda: COST, 512), rules, decodes, prompts, place, steps, expected)


def test_a_prompt_alone_takes_its_steps() -> None:
    assert ahead([], [Prompt(16, 0, 10)], rules=rules("fair", host_ns=1e6)).first_token_ns == 11e6
    # 176 tokens fit into 50 ms: 10 + 0.25 * 160.
    two = ahead([], [Prompt(352, 0, 10)])
    assert two.first_token_ns == pytest.approx(100e6)


def test_a_request_waits_until_a_place_is_free() -> None:
    decodes = [Decoding(tokens, 100) for tokens in (7, 20, 30, 40)]
    found = ahead(decodes, [Prompt(12, 0, 10)])
    assert (found.first_token_ns, found.has_waited) == (80e6, True)


def test_an_answer_waits_for_the_prompts_that_come_meanwhile() -> None:
    """Of three in a second, each one lengthens a step of 10 ms by 40 ms: with the answer, it has 176 rows."""
    asked = [Prompt(16, 0, 100)]
    assert ahead([], asked, steps=99).decode_ns(99) == 990e6
    busy = ahead([], asked, steps=99, expected=Expected(333e6, 175, 1, ("a", "b")))
    assert busy.decode_ns(99) == pytest.approx(990e6 + 3 * 40e6)
    assert busy.decode_ns(33) == pytest.approx(330e6), "none has come"
    at_once = ahead([], [Prompt(16, 0, 9)], steps=8, expected=Expected(1, 175, 9, ("a",)))
    assert at_once.decode_ns(8) < 1e9
    # Beyond what is followed, the pace goes on.
    crowded = ahead([], [Prompt(16, 0, 10**6)], steps=10**6, expected=Expected(100e6, 175, 1, ("a",)))
    assert crowded.decode_ns(10**6) == pytest.approx(10**6 * 10e6 / (1 - 0.4), rel=0.03)


def test_short_prompts_share_a_step_and_a_later_one_waits_for_those_before() -> None:
    prompts = [Prompt(80, 0, 10), Prompt(80, 0, 10), Prompt(80, 0, 10)]
    times = [ahead([], prompts, place).first_token_ns for place in range(3)]
    assert times[0] == times[1] < times[2]


@pytest.mark.parametrize(("policy", "is_longer"), [("fair", True), ("fcfs", False)])
def test_prompts_get_only_part_of_a_step_where_the_scheduler_shortens_it(policy: str, is_longer: bool) -> None:
    prompts = [Prompt(352, 0, 10)]
    usual = ahead([], prompts, rules=rules(policy)).first_token_ns
    shorter = ahead([], prompts, rules=rules(policy, num_shorter_steps=128)).first_token_ns
    assert (shorter > usual) == is_longer


@pytest.mark.parametrize("seed", range(4))
def test_it_is_within_a_step_of_the_real_scheduler(seed: int) -> None:
    """A crowd of prompts comes at once to a server with decodes. The answers' lengths are known here."""
    rng = random.Random(seed)
    step_time = StepTime(lambda: COST, 512)
    scheduler = Scheduler(BlockPool(4096, 16), Limits(16, 512), policy=POLICIES["fair"], step_time=step_time)
    sizes = sorted(rng.randrange(20, 800) for _ in range(24))
    sequences = []
    for number, size in enumerate(sizes):
        ids = [10**6 * number + place for place in range(size)]
        sequences.append(Sequence(f"{number}", 0, ids, SamplingParams(), max_len=size + 40))
        scheduler.add(sequences[-1])
    asked = [Prompt(size, 0, 40) for size in sizes]
    forecast = [ahead([], asked, place, Rules(scheduler.order, {})).first_token_ns for place in range(len(sizes))]
    now_ns = 0
    came = dict[Sequence, int]()
    while (step := scheduler.schedule()) is not None:
        now_ns += COST.expected_ns(load_of(step))
        scheduler.advance(step)
        for chunk in step.chunks:
            if chunk.max_draws:
                came.setdefault(chunk.sequence, now_ns)
                scheduler.commit(chunk, [7])
    longest_step_ns = 70e6
    assert all(abs(told - came[one]) < longest_step_ns for told, one in zip(forecast, sequences, strict=True))
