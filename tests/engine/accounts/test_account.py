"""The accounts of requests and steps: events, inter-token latencies, reasons of waits, and times of steps."""

from typing import NamedTuple

import pytest

from oaiserve.engine.accounts.step_account import RequestNotes
from oaiserve.engine.request import Request, Terminal
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.facts.media import MediaAccount
from oaiserve.facts.record import MOST_EVENTS, EngineAccount, EventKind
from oaiserve.facts.step_record import StepKind
from oaiserve.facts.times import RequestTimes
from tests.engine.doubles import EOS, Clock, ScriptedRunner, next_letter, request, stepping

pytestmark = pytest.mark.usefixtures("overlap")
STEP_NS = 10_000_000


class Ran(NamedTuple):
    """The terminal events of some requests, the kinds of their steps, and the idle time between these."""

    ended: dict[str, Terminal]
    kinds: list[StepKind]
    idle_ns: int


def run(*requests: Request, **options: int) -> Ran:
    """Run requests that are all submitted before the first step ends."""
    clock = Clock()
    runner = ScriptedRunner(gated=True, computing=lambda _: clock.move(STEP_NS / 1e9))
    with stepping(*requests, runner=runner, clock_ns=clock, tokenize_workers=0, **options) as (engine, _, inbox):
        runner.permit(10_000)
        ended = inbox.wait_terminal(*(each.request_id for each in requests))
        snapshot = engine.snapshot()
        steps = engine.take_steps()
        assert engine.take_steps() == []
    assert snapshot.num_steps == len(steps)
    assert snapshot.model_ns == sum(step.duration_ns for step in steps) == len(steps) * STEP_NS
    return Ran(ended, [step.kind for step in steps], snapshot.idle_with_work_ns)


def events_of(account: EngineAccount) -> list[tuple[str, int, dict[str, int | str]]]:
    return [(str(event.kind), event.choice, dict(event.details)) for event in account.events]


def test_events_are_noted_in_order() -> None:
    one = run(request("a", prompt_len=20, max_tokens=2), max_step_tokens=8).ended["a"]
    assert events_of(one.account) == [
        ("prefill_chunk", 0, {"start": 0, "tokens": 8, "batch": 1}),
        ("prefill_chunk", 0, {"start": 8, "tokens": 8, "batch": 1}),
        ("prefill_chunk", 0, {"start": 16, "tokens": 4, "batch": 1}),
        ("first_token", 0, {"batch": 1}),
        ("finished", 0, {"reason": "length", "batch": 1}),
    ]
    times = [event.at_ns for event in one.account.events]
    assert times == sorted(times)
    assert one.times.first_token == one.account.events[3].at_ns
    assert one.times.last_token == one.account.events[4].at_ns


def test_gaps_between_tokens_are_those_of_each_choice() -> None:
    one = run(request("a", prompt_len=4, max_tokens=4, n=2)).ended["a"]
    assert list(one.account.inter_token_ns) == [STEP_NS] * 6


def test_a_prefix_cache_hit_is_an_event() -> None:
    first, second = run(*(request(name, prompt_len=12, max_tokens=1) for name in "ab")).ended.values()
    hits = [event for event in second.account.events if event.kind is EventKind.PREFIX_CACHE_HIT]
    assert [event.details for event in hits] == [{"tokens": 8}]  # the last block is computed, for its logits
    assert hits[0].at_ns == second.times.scheduled
    assert not [event for event in first.account.events if event.kind is EventKind.PREFIX_CACHE_HIT]


def test_preemption_and_its_end_are_events_and_the_gap_contains_the_stall(caplog: pytest.LogCaptureFixture) -> None:
    requests = [request(f"{i}", prompt_len=4, max_tokens=16) for i in range(3)]
    ended = run(*requests, kv_blocks=6, max_model_len=24).ended.values()
    accounts = [each.account for each in ended]
    assert [line.levelname for line in caplog.records if "The KV cache is full" in line.message] == ["WARNING"]
    assert sum(account.num_preemptions for account in accounts) > 0
    for account in accounts:
        stalls = [event.details["stalled_ns"] for event in account.events if event.kind is EventKind.RESUMED]
        assert len(stalls) == account.num_preemptions
        assert sum(map(int, stalls)) == account.stalled_ns
        assert sum(account.inter_token_ns) == 15 * STEP_NS + account.stalled_ns
    for each in ended:  # waiting again, after a preemption, is no part of the queue
        assert sum(each.account.waits_ns.values()) == each.times.scheduled - each.times.tokenized


def test_choice_that_ends_while_it_is_preempted_is_stalled_no_longer(overlap: bool) -> None:
    """The step under way may draw its last token."""
    ends_preempted = 0
    for length in range(2, 12):

        def token_of(sequence: Sequence, length: int = length) -> int:
            return EOS if sequence.index and sequence.num_generated == length else next_letter(sequence)

        clock = Clock()
        runner = ScriptedRunner(
            token_of, gated=True, is_asynchronous=overlap, computing=lambda _, clock=clock: clock.move(STEP_NS / 1e9)
        )
        options = {"kv_blocks": 8, "max_model_len": 32, "tokenize_workers": 0}
        with stepping(request("a", prompt_len=6, max_tokens=24, n=2), runner=runner, clock_ns=clock, **options) as lab:
            runner.permit(10_000)
            account = lab[2].wait_terminal("a")["a"].account
        stalled_ns = 0
        since_ns: dict[int | None, int] = {}
        for event in account.events:
            if event.kind is EventKind.PREEMPTED:
                since_ns[event.choice] = event.at_ns
            elif event.kind in (EventKind.RESUMED, EventKind.FINISHED) and event.choice in since_ns:
                stalled_ns += event.at_ns - since_ns.pop(event.choice)
                ends_preempted += event.kind is EventKind.FINISHED
        assert account.stalled_ns == stalled_ns
    assert (ends_preempted > 0) == overlap


def test_the_reasons_of_a_wait_add_up_to_the_queue_phase(overlap: bool) -> None:
    requests = [request(f"{i}", prompt_len=8, max_tokens=3) for i in range(4)]
    ended = run(*requests, max_running=1).ended
    for number, each in enumerate(ended[f"{i}"] for i in range(4)):
        assert sum(each.account.waits_ns.values()) == each.times.scheduled - each.times.tokenized
        # The first was in a step while the others came; each one before them took three steps, the first one less. With
        # overlap a place is free when the last of these has been launched.
        waits = {str(reason): ns // STEP_NS for reason, ns in each.account.waits_ns.items()}
        expected = {"step_under_way": 1, "batch_full": 3 * number - (2 if overlap else 1)}
        assert waits == (expected if number else {})


def test_steps_are_counted_from_the_first_of_a_request_to_its_last(overlap: bool) -> None:
    ended, kinds, idle_ns = run(request("a", prompt_len=4, max_tokens=5), request("b", prompt_len=4, max_tokens=2))
    before = [StepKind.DECODE] if overlap else []  # it was launched before the second came
    after = [StepKind.DECODE] * (3 - len(before))
    assert kinds == [StepKind.PREFILL, *before, StepKind.MIXED, *after]
    account = ended["a"].account
    assert (account.first_step, account.num_steps, account.model_ns) == (0, 5, 5 * STEP_NS)
    assert (account.num_step_sequences, account.num_step_tokens) == (5 + 2, 4 + 4 + 4 + 1)
    account = ended["b"].account
    assert (account.first_step, account.num_steps, account.model_ns) == (1 + len(before), 2, 2 * STEP_NS)
    assert (account.num_step_sequences, account.num_step_tokens) == (2 + 2, 5 + 2)
    assert idle_ns == 0  # the clock stands still between steps


def test_a_request_with_too_many_events_keeps_the_first() -> None:
    one_request = request("a", prompt_len=4 * MOST_EVENTS, max_tokens=1)
    one = run(one_request, max_step_tokens=2, max_running=1, kv_blocks=128).ended["a"]
    assert len(one.account.events) == MOST_EVENTS
    assert one.account.num_events_dropped == 2 * MOST_EVENTS + 2 - MOST_EVENTS


def test_the_account_counts_images_sounds_and_their_tokens_until_all_are_encoded() -> None:
    times = RequestTimes()
    account = EngineAccount(media=MediaAccount(num_cached=1, encode_ns=9))
    for kind, num_tokens in (("image", 5), ("audio", 3), ("image", 7)):
        account.media.note(kind, num_tokens)
    media = account.media
    assert (media.num_images, media.num_sounds, media.num) == (2, 1, 3)
    assert (media.image_tokens, media.audio_tokens) == (12, 3)
    RequestNotes("a", times, account, None, None).media_encoded(1000)
    assert times.media_encoded == 1000
    assert events_of(account) == [("media_encoded", None, {"encode_ns": 9, "cached": 1, "tokens": 15})]
