"""Steps that draw several tokens of a sequence, or none: answers and accounts are those of one token a step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from oaiserve.engine.request import Aborted, Event, Finished, PromptDone, TokenChunk
from oaiserve.engine.sequence import Place, Sequence
from oaiserve.facts.record import EventKind
from tests.engine.answers import run_to_the_end
from tests.engine.device import Device, answers, check_answers, some_requests
from tests.engine.doubles import EOS, LETTERS, Clock, ScriptedRunner, letter_id, make_engine, request
from tests.engine.memory import NEVER, launched, make, sequence

# -- the scheduler ----------------------------------------------------------------------------------------------------


def drafted(name: str, max_draws: int, prompt: int | list[int] = 4, max_tokens: int = 8) -> Sequence:
    one = sequence(name, prompt, max_tokens)
    one.draft = [NEVER] * (max_draws - 1)
    return one


def test_a_sequence_that_may_draw_several_is_held_until_their_commit_and_others_go_on() -> None:
    scheduler, several, other = make(max_step_tokens=16), drafted("several", 3), sequence("other")
    scheduler.add(several)
    scheduler.add(other)
    first = launched(scheduler).chunks
    assert [(chunk.max_draws, chunk.sequence.num_tokens) for chunk in first] == [(3, 7), (1, 5)]
    assert (several.is_held, other.is_held) == (True, False)
    assert [chunk.sequence for chunk in launched(scheduler).chunks] == [other]
    scheduler.commit(first[0], [7, 8])
    assert (several.is_held, several.num_tokens, several.num_computed, several.generated_ids) == (False, 6, 4, [7, 8])
    (decode, catch_up) = launched(scheduler).chunks
    assert (decode.sequence, decode.max_draws) == (other, 1)
    assert (catch_up.sequence, catch_up.start, catch_up.num_known, catch_up.max_draws) == (several, 4, 2, 3)


def test_a_sequence_reserves_no_more_than_its_length_has_room_for_and_leaves_when_that_is_known() -> None:
    scheduler, one = make(), drafted("a", 9, max_tokens=3)
    scheduler.add(one)
    (chunk,) = launched(scheduler).chunks
    assert (chunk.max_draws, one.num_tokens, one.place) == (3, 7, Place.RUNNING)
    assert scheduler.schedule() is None
    scheduler.commit(chunk, [7, 8, 9])
    assert (one.place, scheduler.pool.num_used, scheduler.num_preemptions) == (Place.NOWHERE, 0, 0)


def test_with_no_token_the_last_one_is_computed_again_for_its_logits() -> None:
    scheduler, one = make(), drafted("a", 3)
    scheduler.add(one)
    (chunk,) = launched(scheduler).chunks
    scheduler.commit(chunk, [])
    assert (one.num_tokens, one.num_computed) == (4, 3)
    (again,) = launched(scheduler).chunks
    assert (again.start, again.num_known, again.max_draws) == (3, 1, 3)
    assert scheduler.pool.is_writable(one.blocks[0]), "the block was in the prefix cache, so it is copied"


def test_a_sequence_that_left_for_its_length_and_got_no_token_waits_again() -> None:
    scheduler, one = make(), sequence("a", max_tokens=1)
    scheduler.add(one)
    (chunk,) = launched(scheduler).chunks
    assert one.place is Place.NOWHERE
    assert scheduler.commit(chunk, [])
    assert (one.place, one.num_preemptions, scheduler.num_preemptions) == (Place.WAITING, 1, 1)
    (again,) = launched(scheduler).chunks
    assert not scheduler.commit(again, [7])
    assert (one.place, one.generated_ids) == (Place.NOWHERE, [7])


def test_a_block_is_published_when_the_last_of_several_tokens_in_it_is_computed() -> None:
    scheduler, one = make(), drafted("a", 4, prompt=[1, 2])
    scheduler.add(one)
    (chunk,) = launched(scheduler).chunks
    scheduler.commit(chunk, [3, 4, 5])
    assert scheduler.pool.num_cached == 0
    (chunk,) = launched(scheduler).chunks
    assert (chunk.start, chunk.num_known, scheduler.pool.num_cached) == (2, 3, 1)


# -- the engine -------------------------------------------------------------------------------------------------------

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
    found = check_answers(rng, requests, device, share_leaving=0.2, kv_blocks=kv_blocks)
    assert all(isinstance(event, Finished | Aborted) for event in found.ended.values())


def test_a_device_that_draws_nothing_at_times_computes_void_chunks_and_draws_that_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Device, "is_asynchronous", True)
    device = Device(max_draws=2)
    edits = [{}, {"repetition_penalty": 1.2}]
    requests = [request(f"{i}", max_tokens=30, ignore_eos=True, **edits[i % 2]) for i in range(8)]
    found = answers(device, requests, kv_blocks=400, max_model_len=80)
    assert all(len(token_ids) == 30 for token_ids in found.token_ids.values())
    assert device.num_void > 10
    assert device.num_waited > 10


def alphabet(one: Sequence) -> list[int]:
    return (LETTERS[one.num_generated :] + LETTERS)[:9]


def answer_of(runner: ScriptedRunner, **params: object) -> tuple[str, list[TokenChunk], Event]:
    """Return text, chunks and terminal event of an answer. Its prompt is computed in two steps, so that the first draw
    may have several tokens."""
    with make_engine(runner, tokenize_workers=0) as engine:
        *events, end = engine.stream(request(prompt_len=20, **params))
        assert engine.snapshot().blocks_used == 0
    chunks = [event for event in events if isinstance(event, TokenChunk)]
    assert isinstance(events[0], PromptDone)
    return "".join(chunk.text for chunk in chunks), chunks, end


@several
@pytest.mark.parametrize(
    ("params", "text", "reason", "stop", "num_tokens"),
    [
        ({"max_tokens": 6}, "abcdef", "length", None, 6),
        ({"stop": ("cd",)}, "ab", "stop", "cd", 4),
        ({"stop": ("cd",), "include_stop_str_in_output": True}, "abcd", "stop", "cd", 4),
        ({"stop": ("b", "g"), "min_tokens": 4}, "abcdef", "stop", "g", 7),
        ({"stop_token_ids": (LETTERS[5],)}, "abcde", "stop", LETTERS[5], 6),
        ({"stop": ("fg",), "max_tokens": 7}, "abcde", "stop", "fg", 7),
        ({"max_tokens": 1}, "a", "length", None, 1),
    ],
)
def test_what_comes_after_the_end_in_a_step_counts_nowhere(
    params: dict[str, object], text: str, reason: str, stop: object, num_tokens: int
) -> None:
    found, chunks, end = answer_of(ScriptedRunner(alphabet, max_draws=4), **{"max_tokens": 20, "logprobs": 0, **params})
    assert found == text
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (reason, stop)
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert token_ids == LETTERS[:num_tokens]
    assert [token_id for chunk in chunks if chunk.logprobs for token_id, _, _ in chunk.logprobs.tokens()] == token_ids
    assert end.usage.completion_tokens == num_tokens


@several
@pytest.mark.parametrize(
    ("token_of", "max_tokens", "text", "reason", "num_tokens"),
    [(lambda _: [LETTERS[0], EOS, LETTERS[1]], 20, "a", "stop", 2), (alphabet, 0, "", "length", 0)],
    ids=["an end of sequence", "max_tokens 0"],
)
def test_what_is_drawn_behind_the_end_is_not_taken(
    token_of: Callable[[Sequence], list[int]], max_tokens: int, text: str, reason: str, num_tokens: int
) -> None:
    found, chunks, end = answer_of(ScriptedRunner(token_of, max_draws=4), max_tokens=max_tokens)
    assert (found, chunks[-1].finish_reason, end.usage.completion_tokens) == (text, reason, num_tokens)


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
    clock, drawn = Clock(), iter([[], [letter_id("x")]])
    engine = make_engine(timed(clock, lambda _: next(drawn)), clock_ns=clock, tokenize_workers=0)
    found = run_to_the_end(engine, [request(prompt_len=4, max_tokens=1)])
    ended = found.ended["r"]
    assert found.num_preemptions == 1
    kinds = [event.kind for event in ended.account.events if event.kind is not EventKind.PREFILL_CHUNK]
    assert kinds == [EventKind.PREEMPTED, EventKind.RESUMED, EventKind.FIRST_TOKEN, EventKind.FINISHED]
    assert (ended.account.num_preemptions, len(ended.account.inter_token_ns)) == (1, 0)
