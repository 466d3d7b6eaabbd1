"""The engine as its callers see it, with a scripted runner: events, texts, usage, stamps."""

import dataclasses
from typing import Any

import pytest

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import (
    Event,
    Finished,
    PromptDone,
    Reasoning,
    Request,
    SamplingParams,
    TextPrompt,
    TokenChunk,
)
from oaiserve.engine.sequences.sequence import Sequence
from tests.engine.doubles import EOS, ScriptedRunner, letter_id, make_engine, request, stepping

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
    assert (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens) == (5, 3)


def test_generate_returns_all_choices_of_all_prompts_in_order() -> None:
    with make_engine() as engine:
        completions = engine.generate(["hello", [1, 2, 3]], SamplingParams(n=2, max_tokens=2))
    assert [(c.index, c.text, c.finish_reason) for c in completions] == [(i, "ab", "length") for i in range(4)]


def test_usage_counts_the_cached_tokens_of_the_prompt_and_its_first_event_has_them() -> None:
    with make_engine() as engine:
        runs = [list(engine.stream(request(prompt_len=11))) for _ in range(2)]
        runs.append(list(engine.stream(dataclasses.replace(request(prompt_len=11), cache_salt="another"))))
    assert [events[-1].usage.cached_tokens for events in runs] == [0, 8, 0]
    assert [events[0].cached_tokens for events in runs] == [0, 8, 0]


def test_end_of_sequence_stops_without_its_text() -> None:
    engine = make_engine(ScriptedRunner(lambda s: EOS if s.num_generated == 2 else letter_id("x")))
    *_, last, finished = events_of(engine, request(max_tokens=9))
    assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == ("", [EOS], "stop", None)
    assert last.has_end_token
    assert finished.usage.completion_tokens == 3
    events = events_of(make_engine(ScriptedRunner(lambda s: EOS)), request(max_tokens=4, ignore_eos=True))
    assert events[-1].usage.completion_tokens == 4


def test_a_stop_token_is_named_and_its_text_shown_only_on_request() -> None:
    for include, text in ((False, "ab"), (True, "abc")):
        one_request = request(max_tokens=9, stop_token_ids=(letter_id("c"),), include_stop_str_in_output=include)
        events = events_of(make_engine(), one_request)
        assert "".join(texts(events)) == text
        assert (events[-2].finish_reason, events[-2].stop_reason) == ("stop", letter_id("c"))
        assert events[-2].has_end_token is not include


def test_all_choices_share_the_edits_of_their_request() -> None:
    """Made for each choice, a bias for every token of a vocabulary would take a second from all other requests."""
    edits: set[int] = set()

    def script(sequence: Sequence) -> int:
        edits.add(id(sequence.edits))
        return letter_id("a")

    params = SamplingParams(n=3, max_tokens=2, logit_bias={5: 1.0}, allowed_token_ids=(5, letter_id("a")))
    with make_engine(ScriptedRunner(script)) as engine:
        engine.generate(["hello", [1, 2, 3]], params)
    assert len(edits) == 1


@pytest.mark.parametrize(
    ("asked", "expected", "reason"),
    [
        ({"max_tokens": 4, "stop": ("cd",)}, ["a", "b", ""], "stop"),  # it wins over the length on the last token
        ({"max_tokens": 3, "stop": ("cd",)}, ["a", "b", "c"], "length"),  # held back, and sent at the end
        ({"max_tokens": 9, "stop": ("b", "e"), "min_tokens": 3}, [*"abcd", ""], "stop"),
        *(
            ({"max_tokens": 9, "stop": ("b", "f"), "reasoning": Reasoning(after)}, text, reason)
            for after, text, reason in (
                ("cd", [*"abcde", ""], "stop"),
                ("b", [*"abcde", ""], "stop"),
                ("a", ["a", ""], "stop"),
                ("xyz", [*"abcdefghi"], "length"),
            )
        ),
    ],
)
def test_a_stop_string_never_leaks(asked: dict[str, Any], expected: list[str], reason: str) -> None:
    events = events_of(make_engine(), request(**asked))
    assert texts(events) == expected
    assert (events[-2].finish_reason, events[-2].stop_reason in asked["stop"]) == (reason, reason == "stop")


def test_each_token_has_the_length_of_its_text_up_to_a_stop_string() -> None:
    chunks = events_of(make_engine(), request(max_tokens=9, stop=("cx", "ef"), text_lengths=True, stream_interval=0))
    assert [(chunk.text, chunk.text_lengths) for chunk in chunks if isinstance(chunk, TokenChunk)] == [
        ("abcd", [1, 1, 1, 1, 0, 0])
    ]
    streamed = events_of(make_engine(), request(max_tokens=9, stop=("cx", "ef"), text_lengths=True))
    lengths = [chunk.text_lengths for chunk in streamed if isinstance(chunk, TokenChunk)]
    assert lengths == [[1], [1], [1, 1], [0, 0]]


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


def test_prompt_logprobs_come_before_the_first_chunk_also_when_the_prompt_is_chunked() -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, n=2)
    one_request = Request("r", (TextPrompt("abcdefghijklmnopqrstuvwxyz"),), params)
    done, *_ = events_of(make_engine(max_step_tokens=8), one_request)
    _, texts, values = zip(*done.logprobs.tokens(), strict=True)
    assert b"".join(texts) == b"abcdefghijklmnopqrstuvwxyz"
    assert list(values[1:]) == [-float(i) for i in range(1, 26)]


def test_every_sampled_token_has_logprobs_even_if_its_text_is_hidden() -> None:
    engine = make_engine(ScriptedRunner(lambda s: EOS if s.num_generated == 1 else letter_id("x")))
    events = events_of(engine, request(max_tokens=9, logprobs=1))
    chunks = [event for event in events if isinstance(event, TokenChunk)]
    rows = [entries for chunk in chunks if chunk.logprobs for entries in chunk.logprobs.entries()]
    assert [row[0][1:] for row in rows] == [(b"x", -0.5), (b"<|im_end|>", -0.5)]
    assert all(len(row) == 2 for row in rows)


def test_one_step_is_one_hand_over_for_all_requests_of_a_consumer(overlap: bool) -> None:
    others = [request(name, prompt_len=2) for name in "abc"]
    with stepping(request("first"), *others, tokenize_workers=0) as (_, runner, inbox):
        runner.permit(100)
        inbox.wait_terminal("first", "a", "b", "c")
    next_step = 2 if overlap else 1  # the first one to be scheduled after they came
    in_next = [event.request_id for event in inbox.hand_overs[next_step] if isinstance(event, TokenChunk)]
    assert in_next == ["first", "a", "b", "c"]
    assert len(inbox.hand_overs) == len(runner.steps) == next_step + 3
