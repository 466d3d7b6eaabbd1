"""The policy `deadline`: whose turn it is, who waits for whom at most, and what is refused by its forecast."""

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine import loop
from oaiserve.engine.accounts.step_causes import load_of
from oaiserve.engine.request import Finished
from oaiserve.engine.scheduling.pacing import StepTime
from oaiserve.engine.scheduling.policy import Policy, deadline, fcfs
from oaiserve.engine.scheduling.slack import MOST_SHARE, PATIENCE_NS, Slack, alone_ns, refusal, turn_ns
from oaiserve.engine.sequence import Place, Sequence
from oaiserve.explain.step_cost import KNOTS, StepCost
from oaiserve.facts.forecast import NO_FORECAST, Forecast
from tests.engine.doubles import Clock, Inbox, ScriptedRunner, make_engine, request
from tests.engine.memory import Memory, memory_of, sequence

SECOND_NS = 1_000_000_000
# The first token after 1 to 4 s, and the end after 4 to 16 s, with medians of 2 and 8.
FORECAST = Forecast(True, *(number * SECOND_NS for number in (1, 2, 4, 4, 8, 16)))


def due(name: str, start: float | None, at: float = 0, prompt: int = 4, share: float = 1.0, **fields: Any) -> Sequence:
    """Return a sequence that arrives at a second, with a latest start or without a deadline.

    Its turn comes after a share of its slack.
    """
    start_ns = None if start is None else int(start * SECOND_NS)
    at_ns = int(at * SECOND_NS)
    late = start_ns is not None and start_ns < at_ns
    return sequence(
        name, prompt, turn_ns=turn_ns(at_ns, start_ns, share), latest_start_ns=None if late else start_ns, **fields
    )


def admitted(memory: Memory, second: float = 0) -> list[str]:
    order = []
    while (step := memory.scheduler.schedule(int(second * SECOND_NS))) is not None:
        order += [one.request_id for one in step.admitted]
        memory.execute(step)
    return order


def test_the_least_slack_goes_first_and_without_a_deadline_it_is_half_a_minute() -> None:
    memory = memory_of(max_running=1, policy=deadline)
    memory.add(due("patient", 50), due("none", None), due("soon", 9), due("urgent", 2))
    assert admitted(memory) == ["urgent", "soon", "patient", "none"], "patience is the same for both"


def test_what_had_to_begin_earlier_goes_behind_what_can_still_be_met_and_is_not_given_up() -> None:
    memory = memory_of(max_running=1, policy=deadline)
    memory.add(due("late", 2), due("hopeless", 3, at=4), due("met", 9), due("none", None))
    assert admitted(memory, second=5) == ["met", "none", "late", "hopeless"]


def test_an_urgent_prompt_passes_one_under_way_which_goes_on_with_the_rest_of_the_step() -> None:
    memory = memory_of(kv_blocks=64, policy=deadline)
    memory.add(due("long", 20, prompt=40))
    assert memory.run() == [("long", 8)]
    memory.add(due("urgent", 5, prompt=6, max_tokens=1))
    assert memory.run() == [("urgent", 6), ("long", 2)]
    memory.add(due("patient", 25, prompt=6))
    assert memory.run() == [("long", 8)]


@dataclass
class Arrived:
    sequence: Sequence
    at: int


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), load=st.sampled_from([2, 4, 6]))
def test_nobody_is_overtaken_by_what_arrives_after_its_own_turn(seed: int, load: int) -> None:
    """However urgent and many those are that come later, each sequence is admitted before all of them."""
    rng = random.Random(seed)
    memory = memory_of(max_running=2, kv_blocks=64, policy=deadline, lookahead=0)
    arrived: dict[str, Arrived] = {}
    order: list[str] = []
    for at in range(0, 480, 4):
        for number in range(rng.randint(0, load)):
            start = rng.choice([None, at - 1, at, at + rng.randrange(5), at + rng.randrange(100)])
            length = rng.randint(1, 9)
            share = min(MOST_SHARE, 2 ** rng.uniform(-4, 4))
            one = due(f"{at}.{number}", start, at, length, share, max_tokens=rng.randint(1, 6))
            arrived[one.request_id] = Arrived(one, at)
            memory.add(one)
        step = memory.scheduler.schedule(at * SECOND_NS)
        if step is not None:
            order += [one.request_id for one in step.admitted if not one.num_preemptions]
            memory.execute(step)
    order += admitted(memory, second=10**6)
    assert sorted(order) == sorted(arrived), "all of them get their turn"
    patience = PATIENCE_NS / SECOND_NS
    for place, name in enumerate(order):
        before = max((arrived[other].at for other in order[:place]), default=0)
        assert before <= arrived[name].at + (MOST_SHARE + 1) * patience
        if arrived[name].sequence.turn_ns == arrived[name].sequence.key[0]:  # it was not late
            assert before * SECOND_NS <= arrived[name].sequence.turn_ns


def test_the_latest_start_leaves_time_for_the_prompt_and_the_answer_as_they_were_of_late() -> None:
    slack = Slack()
    cost = StepCost(tuple(1e6 * knot for knot in KNOTS))
    assert alone_ns(None, 100) == 0
    prompt_ns = alone_ns(cost, 64)
    assert prompt_ns == 64 * 10**6
    assert slack.latest_start_ns(None, None, prompt_ns, 10) is None
    assert slack.latest_start_ns(None, 9 * SECOND_NS, prompt_ns, 10) == 9 * SECOND_NS - prompt_ns
    for number in range(100):  # prompts take three times as long, answers have 21 tokens in the median, 50 ms each
        length = 11 + number % 21
        slack.note(prompt_ns, 3 * prompt_ns, (length - 1) * 50_000_000, length, is_whole=True)
    assert slack.latest_start_ns(9 * SECOND_NS, None, prompt_ns, 100) == 9 * SECOND_NS - 3 * prompt_ns
    assert slack.latest_start_ns(None, 9 * SECOND_NS, prompt_ns, 100) == 9 * SECOND_NS - 3 * prompt_ns - 21 * 50_000_000
    assert slack.latest_start_ns(None, 9 * SECOND_NS, prompt_ns, 4) == 9 * SECOND_NS - 3 * prompt_ns - 4 * 50_000_000
    assert slack.latest_start_ns(5 * SECOND_NS, 9 * SECOND_NS, prompt_ns, 4) == 5 * SECOND_NS - 3 * prompt_ns
    for _ in range(200):  # If answers are cut off at their deadlines, others count with their longest length.
        slack.note(0, 0, 2 * 50_000_000, 3, is_whole=False)
    assert slack.latest_start_ns(None, 9 * SECOND_NS, 0, 100) == 9 * SECOND_NS - 100 * 50_000_000
    assert slack.answer_ns(100) == 100 * 50_000_000


def test_the_shorter_a_prompt_is_beside_those_of_late_the_earlier_is_its_turn() -> None:
    slack = Slack()
    assert slack.turn_share(5) == slack.turn_share(0) == 1, "nothing is known yet"
    for alone_ns_ in (20, 20, 20, 500):
        slack.note(alone_ns_, alone_ns_, 0, 1, is_whole=True)
    assert [slack.turn_share(alone) for alone in (0, 10, 20, 40, 500)] == [1, 0.5, 1, 2, MOST_SHARE]
    assert turn_ns(SECOND_NS, 9 * SECOND_NS, 0.5) == 5 * SECOND_NS
    assert turn_ns(SECOND_NS, None, 0.5) == turn_ns(SECOND_NS, 0, 0.5) == SECOND_NS + PATIENCE_NS // 2


@pytest.mark.parametrize(
    ("policy", "seconds", "is_met"), [(deadline, 1.0, True), (fcfs, 1.0, False), (deadline, 0.19, False)]
)
def test_prompts_leave_answers_the_time_that_they_need_unless_that_is_too_little_in_any_case(
    policy: Policy, seconds: float, is_met: bool
) -> None:
    known = StepCost(tuple(1e7 + 1e6 * k for k in KNOTS))
    step_time = StepTime(lambda: known, 512)
    memory = memory_of(kv_blocks=2000, max_step_tokens=512, policy=policy, step_time=step_time)
    memory.add(answer := due("answer", None, prompt=2, max_tokens=20, deadline_ns=int(seconds * SECOND_NS)))
    memory.execute(memory.scheduler.schedule(0))
    memory.add(due("long", None, at=1, prompt=3000))
    now_ns = 0
    parts = list[int]()
    while answer.place is Place.RUNNING:
        step = memory.scheduler.schedule(now_ns)
        parts += [chunk.num_tokens for chunk in step.chunks if chunk.sequence is not answer]
        now_ns += known.expected_ns(load_of(step))
        memory.execute(step)
    assert (now_ns <= seconds * SECOND_NS) == is_met
    assert len(parts) == 19, "the prompt is in every step"
    assert (max(parts) < 64) == is_met


@pytest.mark.parametrize(
    ("first", "end", "says"),
    [
        (None, None, None),
        (None, 20, None),
        (None, 8, None),  # half of them keep it
        (None, 4, "end within 4,000 ms"),
        (1, 20, "begin within 1,000 ms"),
        (2, 20, None),
        (1, 4, "begin within 1,000 ms"),
    ],
)
def test_what_nine_in_ten_would_miss_is_refused_with_the_forecast(
    first: int | None, end: int | None, says: str | None
) -> None:
    limits = [None if limit is None else limit * SECOND_NS for limit in (first, end)]
    error = refusal(FORECAST, *limits)
    assert refusal(NO_FORECAST, *limits) is None, "nothing is refused by a forecast that is not calibrated"
    assert (error is None) == (says is None)
    if error is not None:
        assert says in error.message
        assert (error.status, error.code) == (503, "deadline_unreachable")
        assert error.forecast == {"first_token_ms": [1000, 2000, 4000], "end_ms": [4000, 8000, 16_000]}
        assert error.retry_after_seconds == (1 if "begin" in error.message else 4)


def test_without_a_forecast_of_the_end_a_first_token_after_its_deadline_is_refused() -> None:
    forecast = Forecast(True, *(number * SECOND_NS for number in (2, 3, 4)))
    assert refusal(forecast, None, 5 * SECOND_NS) is None
    error = refusal(forecast, None, SECOND_NS)
    assert error is not None
    assert error.forecast == {"first_token_ms": [2000, 3000, 4000]}


def test_the_engine_refuses_at_once_and_computes_nothing_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    forecasts = {"in vain": FORECAST, "met": FORECAST, "unknown": NO_FORECAST}
    forecaster = SimpleNamespace(forecast=lambda asked, now_ns: forecasts[asked.request_id], ended=[])
    monkeypatch.setattr(loop, "Forecaster", lambda *_: forecaster)
    runner = ScriptedRunner()
    inbox = Inbox()
    clock = Clock()
    with make_engine(runner, clock_ns=clock, tokenize_workers=0, policy="deadline") as engine:
        for name, seconds in (("in vain", 3), ("met", 20), ("unknown", 3)):
            own = replace(request(name, max_tokens=2), received_ns=clock(), deadline_ns=clock() + seconds * SECOND_NS)
            engine.submit(own, inbox)
        ended = inbox.wait_terminal("in vain", "met", "unknown")
    assert ended["in vain"].error.code == "deadline_unreachable"
    assert ended["in vain"].account.forecast == FORECAST
    assert all(isinstance(ended[name], Finished) for name in ("met", "unknown"))
    assert "in vain" not in {name for step in runner.steps for name, _, _ in step}


def test_without_a_free_block_the_one_with_more_slack_gives_way() -> None:
    memory = memory_of(kv_blocks=4, max_step_tokens=16, prefix_cache=False, policy=deadline)
    patient = due("patient", 25, max_tokens=8)
    urgent = due("urgent", 5, max_tokens=8)
    memory.add(patient, urgent)
    while memory.scheduler.foreground.num_preemptions == 0:
        memory.run()
    assert (patient.place, urgent.place) == (Place.WAITING, Place.RUNNING)
    assert admitted(memory, second=30) == ["patient"]
    assert patient.key[0] == patient.turn_ns, "what has begun once does not go further back"
