"""Steps that draw several tokens of a sequence, or none: answers and accounts are those of one token a step."""

import random
from collections.abc import Callable

import pytest

from oaiserve.engine.request import Aborted, Finished
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.facts.record import EventKind
from tests.engine.answers import run_to_the_end
from tests.engine.device import Device, answers, check_answers, some_requests
from tests.engine.doubles import LETTERS, Clock, ScriptedRunner, letter_id, make_engine, request

several = pytest.mark.usefixtures("overlap")


@several
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kv_blocks", [400, 30], ids=["much cache", "little cache"])
def test_answers_are_those_of_one_token_a_step(seed: int, kv_blocks: int) -> None:
    """There are preemptions, choices, ends of every kind, edits by ids, shortages and aborts."""
    rng = random.Random(seed)
    requests = some_requests(rng, 60)
    rooms = [8, 24, 48, 48, 48]
    device = Device(lambda step: step.num_tokens <= rng.choice(rooms), seed=seed, max_draws=1 + seed % 4)
    outcome = check_answers(rng, requests, device, share_leaving=0.2, kv_blocks=kv_blocks)
    assert all(isinstance(event, Finished | Aborted) for event in outcome.ended.values())


def test_a_device_that_draws_nothing_at_times_computes_void_chunks_and_draws_that_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Device, "is_asynchronous", True)
    device = Device(max_draws=2)
    edits = [{}, {"repetition_penalty": 1.2}]
    requests = [request(f"{i}", max_tokens=30, ignore_eos=True, **edits[i % 2]) for i in range(8)]
    outcome = answers(device, requests, kv_blocks=400, max_model_len=80)
    assert all(len(token_ids) == 30 for token_ids in outcome.token_ids.values())
    assert device.num_void > 10
    assert device.num_waited > 10


def alphabet(one: Sequence) -> list[int]:
    return (LETTERS[one.num_generated :] + LETTERS)[:9]


def timed(clock: Clock, token_of: Callable[[Sequence], int | list[int]]) -> ScriptedRunner:
    """A runner whose steps take 10 ms of the clock each."""
    return ScriptedRunner(token_of, max_draws=3, computing=lambda _: clock.move(0.010))


@several
def test_each_token_of_a_step_has_its_entry_between_tokens() -> None:
    clock = Clock()
    engine = make_engine(timed(clock, alphabet), clock_ns=clock, tokenize_workers=0)
    ended = run_to_the_end(engine, [request(prompt_len=20, max_tokens=8)]).ended["r"]
    gaps_ns = list(ended.account.inter_token_ns)
    assert gaps_ns == [0, 0, 10_000_000, 0, 0, 10_000_000, 0]
    assert sum(gaps_ns) == ended.times.last_token - ended.times.first_token
    assert [event.kind for event in ended.account.events].count(EventKind.FIRST_TOKEN) == 1


@several
def test_the_account_of_a_sequence_that_left_and_waits_again_has_a_stall() -> None:
    clock = Clock()
    drawn = iter([[], [letter_id("x")]])
    engine = make_engine(timed(clock, lambda _: next(drawn)), clock_ns=clock, tokenize_workers=0)
    outcome = run_to_the_end(engine, [request(prompt_len=4, max_tokens=1)])
    ended = outcome.ended["r"]
    assert outcome.num_preemptions == 1
    kinds = [event.kind for event in ended.account.events if event.kind is not EventKind.PREFILL_CHUNK]
    assert kinds == [EventKind.PREEMPTED, EventKind.RESUMED, EventKind.FIRST_TOKEN, EventKind.FINISHED]
    assert (ended.account.num_preemptions, len(ended.account.inter_token_ns)) == (1, 0)
