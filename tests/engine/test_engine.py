"""The engine as its callers see it, with a scripted runner: events, ends, stamps, limits."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from oaiserve.engine import engine as engine_module
from oaiserve.engine.engine import Engine
from oaiserve.engine.loop import Stop, Submitted
from oaiserve.engine.request import (
    Aborted,
    ChatPrompt,
    Event,
    Failed,
    Finished,
    FinishReason,
    Grammar,
    PromptDone,
    Request,
    SamplingParams,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
)
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import ChunkResult, Step
from oaiserve.errors import ContextLengthExceeded, InternalError, InvalidRequest, Overloaded, Unavailable
from tests.engine.doubles import (
    EOS,
    TIMEOUT_SECONDS,
    BlockedTokenizer,
    Clock,
    Inbox,
    ScriptedRunner,
    letter_id,
    make_engine,
    request,
)

pytestmark = pytest.mark.usefixtures("overlap")


def events_of(engine: Engine, asked: Request) -> list[Event]:
    with engine:
        return list(engine.stream(asked))


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, TokenChunk)]


def test_a_request_gets_its_prompt_then_chunks_then_one_terminal_event() -> None:
    events = events_of(make_engine(), request(max_tokens=3))
    assert [type(event) for event in events] == [PromptDone, TokenChunk, TokenChunk, TokenChunk, Finished]
    assert texts(events) == ["a", "b", "c"]
    assert [event.finish_reason for event in events if isinstance(event, TokenChunk)] == [None, None, "length"]
    assert events[-1].usage.prompt_tokens == 5
    assert events[-1].usage.completion_tokens == 3


def test_generate_returns_all_choices_of_all_prompts_in_order() -> None:
    with make_engine() as engine:
        completions = engine.generate(["hello", [1, 2, 3]], SamplingParams(n=2, max_tokens=2))
    assert [(c.index, c.text, c.finish_reason) for c in completions] == [(i, "ab", "length") for i in range(4)]


def test_usage_counts_the_cached_tokens_of_the_prompt() -> None:
    with make_engine() as engine:
        first, second = (list(engine.stream(request(prompt_len=11)))[-1] for _ in range(2))
        other = list(engine.stream(dataclasses.replace(request(prompt_len=11), cache_salt="another")))[-1]
    assert [event.usage.cached_tokens for event in (first, second, other)] == [0, 8, 0]


def test_choices_of_a_prompt_compute_it_once() -> None:
    runner = ScriptedRunner()
    with make_engine(runner) as engine:
        assert [c.text for c in engine.generate([[1] * 11], SamplingParams(n=3, max_tokens=2))] == ["ab"] * 3
    assert [[tokens for _, _, tokens in step] for step in runner.steps] == [[11], [1, 1, 1], [1, 1]]


def test_end_of_sequence_stops_without_its_text() -> None:
    engine = make_engine(ScriptedRunner(lambda s: EOS if s.num_generated == 2 else letter_id("x")))
    *_, last, finished = events_of(engine, request(max_tokens=9))
    assert isinstance(last, TokenChunk)
    assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == ("", [EOS], "stop", None)
    assert last.has_end_token
    assert finished.usage.completion_tokens == 3


def test_ignore_eos_goes_on_to_the_limit() -> None:
    events = events_of(make_engine(ScriptedRunner(lambda s: EOS)), request(max_tokens=4, ignore_eos=True))
    assert events[-1].usage.completion_tokens == 4


def test_a_stop_token_is_named_and_its_text_shown_only_on_request() -> None:
    for include, text in ((False, "ab"), (True, "abc")):
        asked = request(max_tokens=9, stop_token_ids=(letter_id("c"),), include_stop_str_in_output=include)
        events = events_of(make_engine(), asked)
        assert "".join(texts(events)) == text
        assert (events[-2].finish_reason, events[-2].stop_reason) == ("stop", letter_id("c"))
        assert events[-2].has_end_token is not include


def test_a_stop_string_never_leaks_and_wins_over_length_on_the_last_token() -> None:
    events = events_of(make_engine(), request(max_tokens=4, stop=("cd",)))
    assert texts(events) == ["a", "b", ""]
    assert (events[-2].finish_reason, events[-2].stop_reason) == ("stop", "cd")


def test_text_held_back_for_a_stop_string_is_sent_at_the_end() -> None:
    assert texts(events_of(make_engine(), request(max_tokens=3, stop=("cd",)))) == ["a", "b", "c"]


def test_min_tokens_lets_an_early_stop_string_pass() -> None:
    events = events_of(make_engine(), request(max_tokens=9, stop=("b", "e"), min_tokens=3))
    assert "".join(texts(events)) == "abcd"


def test_stop_strings_count_only_behind_the_text_after_which_they_are_asked_for() -> None:
    for after, expected in (("cd", "abcde"), ("b", "abcde"), ("a", "a"), ("xyz", "abcdefghi")):
        events = events_of(make_engine(), request(max_tokens=9, stop=("b", "f"), stop_after=after))
        assert "".join(texts(events)) == expected


def test_each_token_tells_how_much_text_it_has_added() -> None:
    chunks = events_of(make_engine(), request(max_tokens=9, stop=("cx", "ef"), text_lengths=True, stream_interval=0))
    assert [(chunk.text, chunk.text_lengths) for chunk in chunks if isinstance(chunk, TokenChunk)] == [
        ("abcd", [1, 1, 0, 2, 0, 0])
    ]
    streamed = events_of(make_engine(), request(max_tokens=9, stop=("cx", "ef"), text_lengths=True))
    lengths = [chunk.text_lengths for chunk in streamed if isinstance(chunk, TokenChunk)]
    assert lengths == [[1], [1], [0, 2], [0, 0]]


def test_max_tokens_0_computes_the_prompt_and_gives_nothing() -> None:
    events = events_of(make_engine(), request(max_tokens=0))
    assert [(event.text, event.finish_reason) for event in events if isinstance(event, TokenChunk)] == [("", "length")]
    assert events[-1].usage.completion_tokens == 0


def test_the_account_has_the_tokens_of_the_longest_choice() -> None:
    lengths = ScriptedRunner(lambda s: EOS if s.num_generated == 2 * s.index else letter_id("x"))
    *_, finished = events_of(make_engine(lengths), request(max_tokens=4, n=3))
    assert finished.account.longest_choice_tokens == 4


@pytest.mark.parametrize(
    ("asked", "options", "num_prompt", "num_tokens"),
    [
        ({}, {}, 5, 11),  # the rest of the context
        ({}, {"default_max_tokens": 3}, 5, 3),
        ({}, {"default_max_tokens": 99}, 5, 11),
        ({"max_new_tokens": 4, "max_length": 6}, {}, 5, 4),
        ({"max_new_tokens": 4, "max_length": 6}, {"default_max_tokens": 7}, 5, 7),
        ({"max_length": 7}, {}, 5, 2),
        ({"max_length": 5}, {}, 5, 11),  # the prompt leaves nothing of it
        ({"max_length": 99}, {}, 5, 11),
    ],
)
def test_an_answer_without_a_limit_has_that_of_the_operator_or_of_the_model(
    asked: dict[str, int], options: dict[str, int], num_prompt: int, num_tokens: int
) -> None:
    def completion_tokens(**params: int | None) -> int:
        engine = make_engine(max_model_len=16, default_params=asked, **options)
        return events_of(engine, request(prompt_len=num_prompt, **params))[-1].usage.completion_tokens

    assert completion_tokens(max_tokens=None) == num_tokens
    assert completion_tokens(max_tokens=9) == 9


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(1, ["a", "b", "c", "d", "e"]), (2, ["a", "bc", "de"]), (3, ["a", "bcd", "e"]), (0, ["abcde"])],
)
def test_stream_interval_is_the_number_of_tokens_in_a_chunk(interval: int, expected: list[str]) -> None:
    assert texts(events_of(make_engine(), request(max_tokens=5, stream_interval=interval))) == expected


def test_echo_and_prompt_logprobs_come_before_the_first_chunk_also_when_the_prompt_is_chunked() -> None:
    asked = Request(
        "r",
        (TextPrompt("abcdefghijklmnopqrstuvwxyz"),),
        SamplingParams(max_tokens=1, prompt_logprobs=0, n=2),
        echo=True,
    )
    done, *_ = events_of(make_engine(max_step_tokens=8), asked)
    assert isinstance(done, PromptDone)
    assert done.text == "abcdefghijklmnopqrstuvwxyz"
    assert done.logprobs is not None
    assert [row.token for row in done.logprobs] == list(done.text)
    assert [row.logprob for row in done.logprobs[1:]] == [-float(i) for i in range(1, 26)]


def test_every_sampled_token_has_logprobs_even_if_its_text_is_hidden() -> None:
    engine = make_engine(ScriptedRunner(lambda s: EOS if s.num_generated == 1 else letter_id("x")))
    events = events_of(engine, request(max_tokens=9, logprobs=1))
    rows = [row for event in events if isinstance(event, TokenChunk) for row in event.logprobs or []]
    assert [(row.token, row.logprob, len(row.top)) for row in rows] == [("x", -0.5, 1), ("<|im_end|>", -0.5, 1)]


def test_stamps_are_in_order_and_the_phases_add_up() -> None:
    *_, finished = events_of(make_engine(), request())
    times = finished.times.ended(lambda: finished.times.last_token)
    assert [phase.name for phase in times.phases()][-2:] == ["decode", "respond"]
    assert all(phase.duration_ns >= 0 for phase in times.phases())
    assert sum(phase.duration_ns for phase in times.phases()) == times.duration_ns


def test_one_step_is_one_hand_over_for_all_requests_of_a_consumer(overlap: bool) -> None:
    runner, inbox = ScriptedRunner(gated=True), Inbox()
    with make_engine(runner, tokenize_workers=0) as engine:
        engine.submit(request("first"), inbox)
        runner.started.get(timeout=TIMEOUT_SECONDS)  # so that the others enter the next step together
        for name in ("a", "b", "c"):
            engine.submit(request(name, prompt_len=2), inbox)
        runner.permit(100)
        inbox.wait_terminal("first", "a", "b", "c")
    next_step = 2 if overlap else 1  # the first one to be scheduled after they came
    in_next = [event.request_id for event in inbox.hand_overs[next_step] if isinstance(event, TokenChunk)]
    assert in_next == ["first", "a", "b", "c"]
    assert len(inbox.hand_overs) == len(runner.steps) == next_step + 3


# ---------------------------------------------------------------------------------------------- every way to end


def text_request(request_id: str, text: str) -> Request:
    return Request(request_id, (TextPrompt(text),), SamplingParams(max_tokens=3, temperature=0.0))


def test_a_blocked_tokenizer_delays_neither_submit_nor_the_others() -> None:
    tokenizer, inbox = BlockedTokenizer(), Inbox()
    with make_engine(tokenizer=tokenizer, tokenize_workers=2) as engine:  # type: ignore[arg-type]
        engine.submit(text_request("stuck", "blocked"), inbox)
        assert tokenizer.entered.wait(TIMEOUT_SECONDS)  # submit has returned, encode has not
        for i in range(20):
            engine.submit(text_request(f"free-{i}", "hello"), inbox)
        ended = inbox.wait_terminal(*(f"free-{i}" for i in range(20)))
        assert all(isinstance(event, Finished) for event in ended.values())
        assert "stuck" not in ended
        tokenizer.release.set()
        assert isinstance(inbox.wait_terminal("stuck")["stuck"], Finished)


def test_encode_is_called_once_per_text_prompt_and_never_for_token_ids() -> None:
    tokenizer = BlockedTokenizer()
    prompts = (TextPrompt("one"), TokenPrompt([1, 2]), ChatPrompt([{"role": "user", "content": "two"}]))
    with make_engine(tokenizer=tokenizer) as engine:  # type: ignore[arg-type]
        engine.generate(prompts, SamplingParams(max_tokens=2, n=3))
    assert tokenizer.encoded == list(prompts)


def test_a_request_can_be_aborted_while_it_is_tokenized() -> None:
    tokenizer, inbox = BlockedTokenizer(), Inbox()
    with make_engine(tokenizer=tokenizer) as engine:  # type: ignore[arg-type]
        engine.submit(text_request("r", "blocked"), inbox)
        assert tokenizer.entered.wait(TIMEOUT_SECONDS)
        engine.abort("r")
        aborted = inbox.wait_terminal("r")["r"]  # at once, though encode has not returned
        assert isinstance(aborted, Aborted)
        tokenizer.release.set()
        engine.submit(text_request("next", "hello"), inbox)
        assert isinstance(inbox.wait_terminal("next")["next"], Finished)
        assert (aborted.times.tokenize_started is None, aborted.times.tokenized) == (False, None)
        assert engine.num_waiting == 0


def test_an_abort_while_queued_prefilling_or_decoding_frees_all_blocks(overlap: bool) -> None:
    runner, inbox = ScriptedRunner(gated=True), Inbox()
    with make_engine(runner, max_running=2, max_step_tokens=8, tokenize_workers=0) as engine:
        engine.submit(request("decoding", prompt_len=4, max_tokens=50), inbox)
        runner.started.get(timeout=TIMEOUT_SECONDS)
        engine.submit(request("prefilling", prompt_len=40), inbox)
        engine.submit(request("queued", prompt_len=40), inbox)
        runner.permit(3)
        for _ in range(3):
            step = runner.started.get(timeout=TIMEOUT_SECONDS)
        assert {chunk.sequence.request_id for chunk in step.chunks} == {"decoding", "prefilling"}
        for name in ("decoding", "prefilling", "queued"):
            engine.abort(name)
        runner.permit(2 if overlap else 1)  # the steps that are under way; no other follows
        ended = inbox.wait_terminal("decoding", "prefilling", "queued")
        assert all(isinstance(event, Aborted) for event in ended.values())
        runner.permit(100)
        engine.submit(request("next", prompt_len=2), inbox)
        inbox.wait_terminal("next")
        assert (engine.snapshot().blocks_used, engine.snapshot().num_running, engine.num_waiting) == (0, 0, 0)
    assert {name for step in runner.steps[5 if overlap else 4 :] for name, _, _ in step} == {"next"}


def test_aborting_a_request_that_has_ended_or_never_was_does_nothing() -> None:
    with make_engine() as engine:
        engine.abort("never submitted")
        assert isinstance(list(engine.stream(request()))[-1], Finished)
        engine.abort("r")
        assert isinstance(list(engine.stream(request("again")))[-1], Finished)


def test_a_prompt_that_cannot_be_encoded_or_is_too_long_fails_alone() -> None:
    with make_engine(kv_blocks=8) as engine:
        (empty,) = engine.stream(text_request("empty", ""))
        assert isinstance(empty, Failed)
        assert isinstance(empty.error, InvalidRequest)
        (long,) = engine.stream(request("long", prompt_len=31, max_tokens=2))
        assert isinstance(long, Failed)
        assert isinstance(long.error, ContextLengthExceeded)
        assert isinstance(list(engine.stream(request("fits", prompt_len=30, max_tokens=2)))[-1], Finished)


class FailingRunner(ScriptedRunner):
    def run(self, step: Step) -> list[ChunkResult]:
        super().run(step)
        raise RuntimeError("the device is gone")


def test_a_grammar_that_cannot_be_obeyed_fails_its_request_before_anything_is_computed() -> None:
    runner = ScriptedRunner()
    with make_engine(runner) as engine:
        (failed,) = engine.stream(request(grammar=Grammar("regex", "(", "guided_regex")))
        assert list(engine.stream(request("other")))[-1].usage.completion_tokens == 3
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.param) == (400, "guided_regex")
    assert runner.steps[0][0][0] == "other"


def test_if_a_step_fails_all_requests_fail_and_new_ones_are_refused() -> None:
    runner, inbox = FailingRunner(gated=True), Inbox()
    engine = make_engine(runner)
    engine.start()
    for name in ("running", "waiting"):
        engine.submit(request(name), inbox)
    runner.permit()
    ended = inbox.wait_terminal("running", "waiting")
    assert all(isinstance(event, Failed) and event.error.status == 500 for event in ended.values())
    assert engine._loop.join(TIMEOUT_SECONDS)
    assert isinstance(engine.failure, RuntimeError)
    assert not engine.is_ready
    with pytest.raises(Unavailable):
        engine.submit(request("late"), inbox)
    engine.stop()


def test_a_request_that_is_posted_after_the_end_of_the_thread_fails() -> None:
    """The thread may end between the check in `submit` and the post."""
    engine, inbox = make_engine(), Inbox()
    engine.start()
    engine.stop()
    engine._loop.post(Submitted(request("late"), inbox, at_ns=5))
    assert isinstance(inbox.wait_terminal("late")["late"], Failed)


class OneBadSequence(ScriptedRunner):
    def run(self, step: Step) -> list[ChunkResult]:
        results = super().run(step)
        for chunk, result in zip(step.chunks, results, strict=True):
            if chunk.sequence.request_id == "bad":
                result.token_ids, result.error = [], "not a number"
        return results


def test_bad_logits_end_their_request_and_no_other() -> None:
    inbox = Inbox()
    with make_engine(OneBadSequence()) as engine:
        for name in ("good", "bad", "other"):
            engine.submit(request(name), inbox)
        ended = inbox.wait_terminal("good", "bad", "other")
    assert isinstance(ended["bad"], Failed)
    assert isinstance(ended["bad"].error, InternalError)
    assert isinstance(ended["good"], Finished)
    assert isinstance(ended["other"], Finished)


def test_an_exception_in_one_requests_output_ends_that_request_and_no_other() -> None:
    def token_of(sequence: Sequence) -> int:
        return "no id" if sequence.request_id == "bad" else letter_id("x")  # type: ignore[return-value]

    inbox = Inbox()
    with make_engine(ScriptedRunner(token_of)) as engine:
        for name in ("good", "bad"):
            engine.submit(request(name), inbox)
        ended = inbox.wait_terminal("good", "bad")
    assert isinstance(ended["bad"], Failed)
    assert isinstance(ended["good"], Finished)


def test_a_consumer_that_fails_loses_its_requests_and_no_other_does() -> None:
    inbox = Inbox()

    def gone(events: list[Event]) -> None:
        raise RuntimeError("the loop is closed")

    with make_engine() as engine:
        engine.submit(request("gone", max_tokens=50), gone)
        engine.submit(request("here", max_tokens=5), inbox)
        assert isinstance(inbox.wait_terminal("here")["here"], Finished)
        engine.submit(request("next", max_tokens=5), inbox)
        inbox.wait_terminal("next")
        assert engine.snapshot().blocks_used == 0


def test_too_many_waiting_requests_are_refused_at_once() -> None:
    runner, inbox = ScriptedRunner(gated=True), Inbox()
    with make_engine(runner, max_running=1, max_waiting=2) as engine:
        engine.submit(request("runs"), inbox)
        runner.started.get(timeout=TIMEOUT_SECONDS)
        engine.submit(request("waits"), inbox)
        engine.submit(request("waits too"), inbox)
        with pytest.raises(Overloaded, match="2 sequences are waiting already"):
            engine.submit(request("one more"), inbox)
        runner.permit(100)
        inbox.wait_terminal("runs", "waits", "waits too")
        engine.submit(request("later"), inbox)
        inbox.wait_terminal("later")


def test_each_choice_of_a_request_waits_but_a_request_of_any_size_is_taken_if_nothing_waits() -> None:
    runner, inbox = ScriptedRunner(gated=True), Inbox()
    with make_engine(runner, max_running=1, max_waiting=3) as engine:
        engine.submit(request("many", n=5), inbox)
        runner.started.get(timeout=TIMEOUT_SECONDS)
        assert engine.num_waiting == 4
        with pytest.raises(Overloaded, match="4 sequences are waiting already, this request has 1, and the limit is 3"):
            engine.submit(request("one more"), inbox)
        runner.permit(100)
        inbox.wait_terminal("many")
        assert engine.num_waiting == 0
        engine.submit(request("later"), inbox)
        inbox.wait_terminal("later")
        assert engine.num_waiting == 0


def test_a_client_that_fills_the_queue_leaves_the_others_their_share() -> None:
    runner, inbox = ScriptedRunner(gated=True), Inbox()
    with make_engine(runner, max_running=1, max_waiting=4) as engine:
        engine.submit(dataclasses.replace(request("greedy", n=9), client="greedy"), inbox)
        runner.started.get(timeout=TIMEOUT_SECONDS)
        engine.submit(dataclasses.replace(request("polite", n=2), client="polite"), inbox)
        for client in ("greedy", "polite"):
            with pytest.raises(Overloaded, match="10 sequences are waiting already"):
                engine.submit(dataclasses.replace(request("more"), client=client), inbox)
        runner.permit(100)
        inbox.wait_terminal("greedy", "polite")
        assert engine.num_waiting == 0


def test_aborted_and_failed_choices_wait_no_longer() -> None:
    runner, inbox = ScriptedRunner(gated=True), Inbox()
    with make_engine(runner, max_running=1, max_waiting=100) as engine:
        engine.submit(request("runs", n=3), inbox)
        runner.started.get(timeout=TIMEOUT_SECONDS)
        engine.submit(request("waits", n=4), inbox)
        engine.submit(request("bad", n=2, logit_bias={10**6: 1.0}), inbox)
        engine.abort("waits")
        engine.abort("runs")
        runner.permit(100)
        inbox.wait_terminal("waits", "runs", "bad")
        assert engine.num_waiting == 0


def test_bodies_in_the_tokenizer_are_bounded_but_never_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_BODY_BYTES", 100)
    tokenizer, inbox = BlockedTokenizer(), Inbox()
    with make_engine(tokenizer=tokenizer, tokenize_workers=1) as engine:  # type: ignore[arg-type]
        engine.submit(dataclasses.replace(text_request("first", "blocked"), num_bytes=500), inbox)
        assert tokenizer.entered.wait(TIMEOUT_SECONDS)
        with pytest.raises(Overloaded, match="too many bytes") as caught:
            engine.submit(dataclasses.replace(text_request("second", "hello"), num_bytes=1), inbox)
        with pytest.raises(Overloaded, match="too many bytes"):
            engine.run_in_turns((_ for _ in ()), client="", num_bytes=1)
        tokenizer.release.set()
        inbox.wait_terminal("first")
        engine.submit(dataclasses.replace(text_request("third", "hello"), num_bytes=100), inbox)
        inbox.wait_terminal("third")
    assert caught.value.retry_after_seconds is not None


def test_too_many_waiting_prompt_tokens_are_refused_but_never_the_first() -> None:
    runner, inbox = ScriptedRunner(gated=True), Inbox()
    with make_engine(runner, max_running=1, max_waiting_tokens=20, tokenize_workers=0) as engine:
        engine.submit(request("runs"), inbox)
        runner.started.get(timeout=TIMEOUT_SECONDS)
        engine.submit(request("long", prompt_len=30), inbox)
        engine.submit(request("one more", prompt_len=2), inbox)
        runner.permit(100)
        ended = inbox.wait_terminal("runs", "long", "one more")
    assert isinstance(ended["one more"], Failed)
    assert ended["one more"].error.status == 429
    assert ended["one more"].error.retry_after_seconds == 1
    assert isinstance(ended["long"], Finished)


def test_a_request_that_waits_too_long_gets_503_and_one_that_takes_too_long_408() -> None:
    runner, inbox, clock = ScriptedRunner(gated=True), Inbox(), Clock()
    limits = {"queue_timeout_seconds": 5, "request_timeout_seconds": 60}
    with make_engine(runner, clock_ns=clock, max_running=1, tokenize_workers=0, **limits) as engine:
        engine.submit(request("runs", max_tokens=50), inbox)
        runner.started.get(timeout=TIMEOUT_SECONDS)
        engine.submit(request("waits"), inbox)
        clock.move(6)
        runner.permit(1)
        waited = inbox.wait_terminal("waits")["waits"]
        clock.move(60)
        runner.permit(1)
        ran = inbox.wait_terminal("runs")["runs"]
        engine.submit(request("next", max_tokens=1), inbox)
        runner.permit(10)
        assert isinstance(inbox.wait_terminal("next")["next"], Finished)
    assert isinstance(waited, Failed)
    assert isinstance(ran, Failed)
    assert (waited.error.status, ran.error.status) == (503, 408)
    assert ran.usage.completion_tokens > 0


def test_a_draining_engine_refuses_new_requests_and_finishes_open_ones() -> None:
    runner, inbox = ScriptedRunner(gated=True), Inbox()
    with make_engine(runner) as engine:
        engine.submit(request(), inbox)
        engine.drain()
        with pytest.raises(Unavailable, match="shutting down") as refused:
            engine.submit(request("other"), inbox)
        assert refused.value.retry_after_seconds == 5
        runner.permit(100)
        assert isinstance(inbox.wait_terminal("r")["r"], Finished)


def test_stop_with_a_drain_timeout_lets_requests_finish() -> None:
    runner, inbox = ScriptedRunner(gated=True), Inbox()
    engine = make_engine(runner)
    engine.start()
    engine.submit(request(), inbox)
    runner.started.get(timeout=TIMEOUT_SECONDS)
    stopper = threading.Thread(target=engine.stop, args=(TIMEOUT_SECONDS,))
    stopper.start()
    runner.permit(100)
    assert isinstance(inbox.wait_terminal("r")["r"], Finished)
    stopper.join(TIMEOUT_SECONDS)
    assert not stopper.is_alive()
    with pytest.raises(Unavailable):
        engine.submit(request("late"), inbox)


def test_stop_without_a_drain_timeout_fails_them() -> None:
    inbox = Inbox()
    runner = ScriptedRunner(gated=True)
    engine = make_engine(runner)
    engine.start()
    engine.submit(request(max_tokens=200), inbox)
    runner.started.get(timeout=TIMEOUT_SECONDS)
    engine._loop.post(Stop(drain=False))
    runner.permit(1)
    ended = inbox.wait_terminal("r")["r"]
    assert isinstance(ended, Failed)
    assert ended.error.status == 503
    engine.stop()


def test_closing_the_event_iterator_early_aborts_the_request() -> None:
    with make_engine() as engine:
        events = engine.stream(request(max_tokens=200))
        next(events)
        events.close()  # type: ignore[attr-defined]
        inbox = Inbox()
        engine.submit(request("next"), inbox)
        inbox.wait_terminal("next")
        assert engine.snapshot().blocks_used == 0


def test_answers_under_preemption_are_the_same() -> None:
    inbox, big = Inbox(), make_engine(kv_blocks=6, max_model_len=24, max_step_tokens=16)
    requests = [request(f"{i}", prompt_len=4, max_tokens=16) for i in range(6)]
    with big as engine:
        for each in requests:
            engine.submit(each, inbox)
        ended = inbox.wait_terminal(*map(str, range(6)))
        assert engine.snapshot().num_preemptions > 0
    assert all(isinstance(event, Finished) for event in ended.values())
    accounts = [event.account for event in ended.values()]
    assert all((account.num_preemptions > 0) == (account.stalled_ns > 0) for account in accounts)
    assert sum(account.num_preemptions for account in accounts) == engine.snapshot().num_preemptions
    for i in range(6):
        chunks = [
            event for events in inbox.hand_overs for event in events
            if isinstance(event, TokenChunk) and event.request_id == str(i)
        ]  # fmt: skip
        assert "".join(chunk.text for chunk in chunks) == "abcdefghijklmnop"
        assert chunks[-1].finish_reason is FinishReason.LENGTH
