"""All ways in which a request to the engine ends, and limits beyond which one is refused, with a scripted runner."""

from dataclasses import replace
from itertools import count

import pytest

from oaiserve.engine import admission
from oaiserve.engine.request import Aborted, Failed, Finished, Request, SamplingParams, TextPrompt
from oaiserve.errors import Overloaded, Unavailable
from oaiserve.facts.record import WaitReason
from oaiserve.wire.continuation import Piece
from tests.engine.doubles import (
    TIMEOUT_SECONDS,
    BlockedTokenizer,
    Clock,
    Gate,
    Inbox,
    ScriptedRunner,
    SimulatedEngine,
    device_is_gone,
    make_engine,
    request,
    stepping,
    wait_until_idle,
)

pytestmark = pytest.mark.usefixtures("overlap")


def text_request(request_id: str, text: str) -> Request:
    return Request(request_id, (TextPrompt(text),), SamplingParams(max_tokens=3, temperature=0.0))


def test_a_blocked_tokenizer_delays_neither_submit_nor_the_others() -> None:
    tokenizer = BlockedTokenizer()
    inbox = Inbox()
    with make_engine(tokenizer=tokenizer, tokenize_workers=2) as engine:
        engine.submit(text_request("stuck", "blocked"), inbox)
        tokenizer.entered.wait()  # submit has returned, encode has not
        for i in range(20):
            engine.submit(text_request(f"free-{i}", "hello"), inbox)
        ended = inbox.wait_terminal(*(f"free-{i}" for i in range(20)))
        assert all(isinstance(event, Finished) for event in ended.values())
        assert "stuck" not in ended
        tokenizer.release.set()
        assert isinstance(inbox.wait_terminal("stuck")["stuck"], Finished)


def test_request_that_the_tokenizer_drops_at_once_when_it_is_aborted_has_not_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = BlockedTokenizer()
    inbox = Inbox()
    with make_engine(tokenizer=tokenizer, tokenize_workers=1) as engine:
        stage = engine._tokenize
        abort = stage.abort

        def abort_and_wait_for_the_end(request_id: str) -> None:
            abort(request_id)
            tokenizer.release.set()
            engine.world.wait_for(lambda: not stage._places)

        monkeypatch.setattr(stage, "abort", abort_and_wait_for_the_end)
        engine.submit(text_request("first", "blocked"), inbox)
        tokenizer.entered.wait()
        engine.submit(text_request("waits", "hello"), inbox)
        engine.abort("waits")
        assert isinstance(inbox.wait_terminal("waits")["waits"], Aborted)


def test_aborting_a_request_that_has_ended_or_never_was_does_nothing() -> None:
    with make_engine() as engine:
        engine.abort("never submitted")
        assert isinstance(list(engine.stream(request()))[-1], Finished)
        engine.abort("r")
        assert isinstance(list(engine.stream(request("again")))[-1], Finished)


def test_engine_waits_for_requests_under_a_time_limit_of_centuries() -> None:
    inbox = Inbox()
    with make_engine(tokenize_workers=0, request_timeout_seconds=1e10) as engine:
        for name in ("first", "second"):  # Between the two, the engine waits for the limit of the first.
            engine.submit(request(name), inbox)
            assert isinstance(inbox.wait_terminal(name)[name], Finished)
            wait_until_idle(engine)


class ReadyForEver(SimulatedEngine):
    """An engine whose thread may end between the check in `submit` and the post."""

    is_ready = True


def test_a_request_that_is_posted_after_the_end_of_the_thread_fails() -> None:
    inbox = Inbox()
    with make_engine(ScriptedRunner(computing=device_is_gone), kind=ReadyForEver) as engine:
        engine.submit(request("first"), inbox)
        assert isinstance(inbox.wait_terminal("first")["first"], Failed)
        engine.submit(request("late"), inbox)
        assert isinstance(inbox.wait_terminal("late")["late"], Failed)


def test_account_of_a_request_that_ends_before_its_first_step_does_not_change_afterwards() -> None:
    waits_ns: list[dict[WaitReason, int]] = []
    clock = count(10**9, 1_000)
    inbox = Inbox(lambda events: waits_ns.extend(e.account.waits_ns.copy() for e in events if isinstance(e, Aborted)))
    runner = ScriptedRunner(gated=True)
    with make_engine(runner, clock_ns=clock.__next__, tokenize_workers=0) as engine:
        engine.submit(request("runs"), inbox)
        runner.started.get()
        engine.submit(request("leaves"), inbox)
        engine.abort("leaves")
        runner.permit(100)
        ended = inbox.wait_terminal("runs", "leaves")
    assert [ended["leaves"].account.waits_ns] == waits_ns
    assert waits_ns[0][WaitReason.STEP_UNDER_WAY] > 0


@pytest.mark.parametrize("end", ["the client leaves", "it is complete", "it cannot be continued"])
def test_continued_request_without_a_step_has_waited_for_the_whole_phase_queue(end: str) -> None:
    clock = Clock()
    inbox = Inbox()
    runner = ScriptedRunner(gated=True)
    sent = (Piece(0, [70 + number for number in range(100)]),)
    max_tokens = {"the client leaves": 200, "it is complete": 100, "it cannot be continued": 99}[end]
    with make_engine(runner, clock_ns=clock, tokenize_workers=0) as engine:
        engine.submit(request("runs", max_tokens=30), inbox)
        runner.started.get()
        engine.submit(replace(request("rest", max_tokens=max_tokens), sent=sent), inbox)
        clock.now_ns += 1_000
        if end == "the client leaves":  # after some of the tokens have been taken up
            engine.abort("rest")
        runner.permit(100)
        rest = inbox.wait_terminal("rest", "runs")["rest"]
    assert rest.times.scheduled is None
    assert rest.account.waits_ns == {WaitReason.STEP_UNDER_WAY: 1_000}


def test_each_choice_of_a_request_waits_but_a_request_of_any_size_is_taken_if_nothing_waits() -> None:
    with stepping(request("many", n=5), max_running=1, max_waiting=3) as (engine, runner, inbox):
        assert engine.num_waiting == 4
        with pytest.raises(Overloaded, match="4 sequences are waiting already, this request has 1, and the limit is 3"):
            engine.submit(request("one more"), inbox)
        polite = replace(request("polite"), client="polite")
        engine.submit(polite, inbox)  # another client has its share
        with pytest.raises(Overloaded, match="5 sequences are waiting already"):
            engine.submit(replace(polite, request_id="more"), inbox)
        runner.permit(100)
        inbox.wait_terminal("many", "polite")
        assert engine.num_waiting == 0
        engine.submit(request("later"), inbox)
        inbox.wait_terminal("later")
        assert engine.num_waiting == 0


def test_aborted_and_failed_choices_wait_no_longer() -> None:
    requests = [request("runs", n=3), request("waits", n=4), request("bad", n=2, logit_bias={10**6: 1.0})]
    with stepping(*requests, max_running=1, max_waiting=100) as (engine, runner, inbox):
        engine.abort("waits")
        engine.abort("runs")
        runner.permit(100)
        inbox.wait_terminal("waits", "runs", "bad")
        assert engine.num_waiting == 0


def test_bodies_in_the_tokenizer_are_bounded_but_never_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_BODY_BYTES", 100)
    tokenizer = BlockedTokenizer()
    inbox = Inbox()
    with make_engine(tokenizer=tokenizer, tokenize_workers=1) as engine:
        engine.submit(replace(text_request("first", "blocked"), num_bytes=500), inbox)
        tokenizer.entered.wait()
        with pytest.raises(Overloaded, match="too many bytes") as caught:
            engine.submit(replace(text_request("second", "hello"), num_bytes=1), inbox)
        with pytest.raises(Overloaded, match="too many bytes"):
            engine.run_in_turns((_ for _ in ()), client="", num_bytes=1)
        tokenizer.release.set()
        inbox.wait_terminal("first")
        engine.submit(replace(text_request("third", "hello"), num_bytes=100), inbox)
        inbox.wait_terminal("third")
    assert caught.value.retry_after_seconds is not None


def test_a_request_that_waits_too_long_gets_503_and_one_that_takes_too_long_408() -> None:
    requests = [request("runs", max_tokens=50), request("waits")]
    clock = Clock()
    options = {"max_running": 1, "tokenize_workers": 0, "queue_timeout_seconds": 5, "request_timeout_seconds": 60}
    with stepping(*requests, clock_ns=clock, **options) as (engine, runner, inbox):
        clock.move(6)
        runner.permit(1)
        waited = inbox.wait_terminal("waits")["waits"]
        clock.move(60)
        runner.permit(1)
        ran = inbox.wait_terminal("runs")["runs"]
        engine.submit(request("next", max_tokens=1), inbox)
        runner.permit(10)
        assert isinstance(inbox.wait_terminal("next")["next"], Finished)
    assert (waited.error.status, ran.error.status) == (503, 408)
    assert (ran.error.type, ran.error.headers()) == ("timeout", {"x-should-retry": "false"})
    assert ran.usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("field", "says"),
    [("deadline_ns", "not ended within 6,000 ms"), ("first_token_deadline_ns", "not begun within 6,000 ms")],
)
def test_a_request_ends_at_a_deadline_of_its_own_whether_it_waits_or_runs(field: str, says: str) -> None:
    clock = Clock()
    soon = {field: clock() + 6 * 10**9}
    requests = [
        replace(request(name, max_tokens=50), received_ns=clock(), **limit)
        for name, limit in (("runs", soon), ("waits", soon), ("last", {}))
    ]
    with stepping(*requests, clock_ns=clock, max_running=1, tokenize_workers=0) as (_, runner, inbox):
        runner.permit(1)
        runner.started.get()
        clock.move(6)
        runner.permit(200)
        ended = inbox.wait_terminal("runs", "waits", "last")
    late = [ended["waits"]] if field == "first_token_deadline_ns" else [ended["waits"], ended["runs"]]
    assert [(one.error.status, one.error.code) for one in late] == [(408, "deadline_missed")] * len(late)
    assert all(says in one.error.message for one in late)
    assert ended["runs"].usage.completion_tokens > ended["waits"].usage.completion_tokens == 0
    assert isinstance(ended["runs"], Finished) == (len(late) == 1), "its first token had come in time"
    assert isinstance(ended["last"], Finished)


def test_stop_with_a_drain_timeout_refuses_new_requests_and_lets_open_ones_finish() -> None:
    with stepping(request()) as (engine, runner, inbox):
        engine.drain()
        with pytest.raises(Unavailable, match="shutting down") as refused:
            engine.submit(request("late"), inbox)
        assert refused.value.retry_after_seconds == 5
        stopper = engine.world.begin(engine.stop, TIMEOUT_SECONDS)
        runner.permit(100)
        assert isinstance(inbox.wait_terminal("r")["r"], Finished)
        assert stopper.join()


def test_stop_without_a_drain_timeout_fails_them_and_frees_their_blocks() -> None:
    with stepping(request(max_tokens=200), tokenize_workers=0) as (engine, runner, inbox):
        stopper = engine.world.begin(engine.stop)
        engine.world.settle()  # Both commands of the stop wait for the end of the step.
        runner.permit(1)
        assert inbox.wait_terminal("r")["r"].error.status == 503
        assert stopper.join()
    assert engine.snapshot().blocks_used == 0


def test_stop_waits_until_a_thread_that_fails_has_delivered_the_ends_of_requests() -> None:
    has_stopped = Gate()
    delivered_after_stop: list[bool] = []
    engine = make_engine(ScriptedRunner(computing=device_is_gone))
    has_stopped.live_in(engine.world)
    engine.start()
    engine.submit(request(), lambda events: delivered_after_stop.append(has_stopped.wait(0.1)))
    engine.world.wait_for(lambda: engine._loop.is_stopped)
    engine.stop()
    has_stopped.set()
    assert delivered_after_stop == [False]


def test_closing_the_event_iterator_early_aborts_the_request() -> None:
    with make_engine() as engine:
        events = engine.stream(request(max_tokens=200))
        next(events)
        events.close()
        list(engine.stream(request("next")))
        assert engine.snapshot().blocks_used == 0


def test_background_work_takes_no_room_of_others_and_has_its_own_limit_and_no_timeouts() -> None:
    clock = Clock()
    later = [replace(request(f"later {number}"), is_background=True) for number in range(2)]
    options = {"max_waiting": 2, "max_running": 1, "queue_timeout_seconds": 1}
    with stepping(request("first"), *later, clock_ns=clock, **options) as (engine, runner, inbox):
        assert engine.num_waiting == 0
        for number in range(2):
            engine.submit(request(f"now {number}"), inbox)
        with pytest.raises(Overloaded, match="2 sequences are waiting already"):
            engine.submit(request("one too many"), inbox)
        clock.move(10)
        runner.permit(100)
        ended = inbox.wait_terminal("first", "now 0", "now 1", "later 0", "later 1")
    assert {name: type(event) for name, event in ended.items()} == {
        **dict.fromkeys(("first", "later 0", "later 1"), Finished),
        **dict.fromkeys(("now 0", "now 1"), Failed),
    }


def test_as_many_requests_in_the_background_are_open_as_others_may_wait() -> None:
    requests = [replace(request(f"{number}"), is_background=True) for number in range(3)]
    with stepping(*requests[:2], max_waiting=2) as (engine, runner, inbox):
        runner.permit(1)
        runner.started.get()  # The commands before this step have been taken.
        with pytest.raises(Overloaded, match="2 requests in the background are open already"):
            engine.submit(requests[2], inbox)
        runner.permit(100)
        inbox.wait_terminal("0", "1")
