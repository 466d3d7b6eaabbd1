"""Tests /v1/completions: the request that reaches the engine, and the answer, whole and streamed."""

from collections.abc import Callable
from typing import Any

import pytest

from oaiserve import __version__
from oaiserve.engine.request import FinishReason, GapPrompt, SamplingParams, TextPrompt, TokenPrompt
from oaiserve.engine.text.fill import FillTokens
from tests.routes.asking import BODIES, CHAT, COMPLETIONS, RESPONSES, answered, stream_of
from tests.routes.doubles import candidates, says
from tests.serving import Serve, Served


def test_the_answer_has_the_documented_shape(served: Served) -> None:
    answer = served.complete().json()
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    tokens = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert answer == {
        "object": "text_completion",
        "model": "org/demo",
        "system_fingerprint": f"oaiserve-{__version__}",
        "choices": [
            {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            **tokens,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_the_defaults_are_openais_for_parameters_that_are_left_out_or_null(served: Served) -> None:
    names = ("max_tokens", "n", "stop", "logprobs", "seed", "logit_bias", "stream", "stream_options", "echo", "suffix")
    for body in ({}, dict.fromkeys((*names, "tools"))):
        served.complete(**body)
        assert served.engine.submitted.get().params == SamplingParams(max_tokens=16)


def test_every_sampling_parameter_reaches_the_engine(served: Served) -> None:
    body: dict[str, Any] = {"n": 2, "max_tokens": 30, "min_tokens": 3, "seed": 7, "logprobs": 3, "prompt_logprobs": 2}
    body |= {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1}
    body |= {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.2}
    body |= {"include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False}
    lists: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [9], "bad_words": ["c", " d"]}
    lists |= {"allowed_token_ids": [5, 6]}
    served.complete(**body, **lists, logit_bias={"5": -100})
    assert served.engine.submitted.get().params == SamplingParams(
        text_lengths=True,
        **body,
        **{name: tuple(values) for name, values in lists.items()},
        logit_bias={5: -100},
    )


def test_ids_that_are_sent_again_count_once(served: Served) -> None:
    served.complete(allowed_token_ids=[6, 5.0, 6] * 1000, stop_token_ids=[9] * 1000)
    params = served.engine.submitted.get().params
    assert (params.allowed_token_ids, params.stop_token_ids) == ((6, 5), (9,))


def test_an_integer_may_be_written_as_a_float(served: Served) -> None:
    served.complete(max_tokens=8.0, n=2.0, seed=-1, top_k=-1)
    assert served.engine.submitted.get().params == SamplingParams(max_tokens=8, n=2)


@pytest.mark.parametrize("ask", [Served.complete, Served.chat])
def test_max_completion_tokens_is_an_alias_that_wins(served: Served, ask: Callable[..., object]) -> None:
    ask(served, max_tokens=8, max_completion_tokens=9)
    assert served.engine.submitted.get().params.max_tokens == 9


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (COMPLETIONS, "max_tokens"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (RESPONSES, "max_output_tokens"),
    ],
)
def test_a_limit_of_minus_one_is_none(served: Served, path: str, name: str) -> None:
    """Open WebUI and clients of llama.cpp send it."""
    answered(served.post(path, **BODIES[path], **{name: -1}))
    assert served.engine.submitted.get().params.max_tokens is None


@pytest.mark.parametrize(
    "options",
    [
        *({"best_of": 1}, {"n": 2, "best_of": 1}, {"n": 3, "best_of": 3}),
        *({"bad_words": []}, {"suffix": ""}, {"tools": []}, {"x": 1}),
    ],
)
def test_parameters_that_change_nothing_are_accepted(served: Served, options: dict[str, Any]) -> None:
    assert served.complete(**options, user="me", response_format={"type": "text"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"prompt": "Hi"}, (TextPrompt("Hi"),)),
        ({"prompt": ["Hi", "Ho"]}, (TextPrompt("Hi"), TextPrompt("Ho"))),
        ({"prompt": [5, 6]}, (TokenPrompt([5, 6]),)),
        ({"prompt": [[5], [6, 7]]}, (TokenPrompt([5]), TokenPrompt([6, 7]))),
        ({"add_special_tokens": False}, (TextPrompt("Hi", add_special_tokens=False),)),
    ],
)
def test_prompts_come_in_four_forms_and_without_special_tokens(served: Served, body: Any, prompts: Any) -> None:
    served.complete(**body)
    assert served.engine.submitted.get().prompts == prompts


def test_choices_are_ordered_by_prompt_and_then_n(served: Served) -> None:
    choices = served.complete(prompt=["Hi", "Ho"], n=2, echo=True).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == ["HiHello world"] * 2 + ["HoHello world"] * 2


def test_best_of_returns_the_likeliest_candidates_of_each_prompt_best_first(served: Served) -> None:
    served.engine.script = candidates([-1.0, -2.0], [-1.0], [-0.5, -0.5, -3.0], [-1.0, -1.0])
    answer = served.complete(prompt=["Hi", "Ho"], n=2, best_of=4, echo=True).json()
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in answer["choices"]] == [
        (0, "Hi1", None),
        (1, "Hi33", None),
        (2, "Ho5", None),
        (3, "Ho77", None),
    ]
    assert answer["usage"]["completion_tokens"] == 16  # tokens of all candidates
    params = served.engine.submitted.get().params
    assert (params.n, params.logprobs, params.prompt_logprobs) == (4, 0, None)
    record = served.telemetry.next_record()
    assert record.answer_reasons == tuple(choice["finish_reason"] for choice in answer["choices"])
    assert len(record.finish_reasons) == 8


def test_best_of_shows_logprobs_if_the_client_asked_for_them(served: Served) -> None:
    served.engine.script = candidates([-2.0], [-1.0])
    (choice,) = served.complete(best_of=2, logprobs=1).json()["choices"]
    assert (choice["index"], choice["logprobs"]["token_logprobs"]) == (0, [-1.0])
    assert choice["logprobs"]["top_logprobs"] == [{"x": -0.1, "1": -1.0}]
    assert served.telemetry.next_record().params == {"best_of": 2, "logprobs": 1}


def test_best_of_without_tokens_returns_n_choices(served: Served) -> None:
    served.engine.script = candidates([], [], [])
    answer = served.complete(n=2, best_of=3, max_tokens=0).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, ""), (1, "")]


def test_a_stream_ends_with_a_finish_chunk_of_its_own(served: Served) -> None:
    served.engine.script = says("a", "", "b", finish=FinishReason.LENGTH)
    choices = [chunk["choices"][0] for chunk in stream_of(served)]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("ab", None), ("", "length")]


def test_the_chunks_of_a_stream_share_id_and_created(served: Served) -> None:
    chunks = stream_of(served)
    ((_, _, kind, _),) = {(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks}
    assert kind == "text_completion"
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("text", ['"quoted"\n', "naïve 🎉", "a\u2028b\x85\u2029\x1c", "\x00\x1f", "<|end|>", "a\\b"])
def test_a_streamed_text_is_the_whole_text(served: Served, text: str) -> None:
    served.engine.script = says(text, text)
    assert "".join(chunk["choices"][0]["text"] for chunk in stream_of(served)) == text * 2
    assert served.complete().json()["choices"][0]["text"] == text * 2


def test_usage_comes_last_and_only_when_asked(served: Served) -> None:
    *chunks, last = stream_of(served, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5


def test_a_streamed_echo_comes_first(served: Served) -> None:
    choices = [chunk["choices"][0] for chunk in stream_of(served, prompt=["Hi", "Ho"], echo=True)[:3]]
    pieces = [(choice["index"], choice["text"]) for choice in choices]
    assert pieces == [(0, "Hi"), (1, "Ho"), (0, "Hello world")]


def test_tokens_that_are_ready_together_leave_in_one_event(served: Served) -> None:
    served.engine.script = says("a", "b", "c")
    chunks = stream_of(served, n=2, logprobs=1, return_token_ids=True)
    choices = [c["choices"][0] for c in chunks if c["choices"][0]["text"]]
    pieces = [(choice["index"], choice["text"], choice["token_ids"]) for choice in choices]
    assert pieces == [(index, "abc", [10, 11, 12]) for index in (0, 1)]
    assert choices[0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choices[0]["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize(("asked", "interval"), [({}, 5), ({"stream_interval": 2}, 2)])
def test_the_stream_interval_of_the_request_wins_over_the_servers(
    serve: Serve, asked: dict[str, int], interval: int
) -> None:
    served = serve(stream_interval=5)
    served.complete(stream=True, **asked)
    served.complete(**asked)
    assert [served.engine.submitted.get().stream_interval for _ in range(2)] == [interval, 0]


@pytest.mark.parametrize(
    ("number", "top"), [(0, {"": -1.5}), (1, {"!": -0.25, "": -1.5}), (3, {"!": -0.25, "": -1.5, "?": -9999.0})]
)
def test_logprobs_are_four_lists_with_the_sampled_token_among_the_best(
    served: Served, number: int, top: dict[str, float]
) -> None:
    """The double's alternatives have one character more, and of minus infinity comes -9999."""
    served.engine.script = says("a", "b")
    assert served.complete(logprobs=number).json()["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.5, -1.5],
        "text_offset": [0, 1],
        "top_logprobs": [{text + end: value for end, value in top.items()} for text in "ab"],
    }


def test_echoed_logprobs_begin_with_null(served: Served) -> None:
    served.engine.script = says("b")
    logprobs = served.complete(logprobs=1, echo=True).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["", "", "Hi", "b"]
    assert logprobs["token_logprobs"] == [None, -1.5, -1.5, -1.5]
    assert logprobs["text_offset"] == [0, 0, 0, 2]
    assert logprobs["top_logprobs"][0] is None


def test_streamed_logprobs_add_up_to_the_whole_ones(served: Served) -> None:
    body = {"logprobs": 2, "echo": True}
    whole = served.complete(**body).json()["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in stream_of(served, **body)]
    assert {name: [value for part in parts if part for value in part[name]] for name in whole} == whole


def test_a_streamed_echo_with_logprobs_has_no_line_end_within_its_prompt(served: Served) -> None:
    first, *_ = stream_of(served, prompt="a\x85b", echo=True, logprobs=1)
    assert first["choices"][0]["logprobs"]["tokens"] == ["", "", "a\x85b"]


def test_token_ids_can_be_returned(served: Served) -> None:
    choice = served.complete(return_token_ids=True).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [10, 11])
    first, *rest = [chunk["choices"][0] for chunk in stream_of(served, return_token_ids=True)]
    assert first["prompt_token_ids"] == [1, 2, 3]
    assert [token_id for choice in rest for token_id in choice.get("token_ids", [])] == [10, 11]


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_prompt_logprobs_are_by_token_id_with_ranks_below_the_best_ones_too(served: Served, num_top: int) -> None:
    first, second, _ = served.complete(prompt_logprobs=num_top).json()["choices"][0]["prompt_logprobs"]
    assert first is None
    best = {"3": {"logprob": -0.25, "rank": 1, "decoded_token": " a!"}}
    assert second == (best if num_top else {}) | {"2": {"logprob": -1.5, "rank": 2, "decoded_token": " a"}}


def test_the_answer_has_the_stop_reason(served: Served) -> None:
    served.engine.script = says("a", stop_reason="END")
    assert served.complete().json()["choices"][0]["stop_reason"] == "END"
    assert stream_of(served)[-1]["choices"][0]["stop_reason"] == "END"


def test_a_suffix_makes_a_gap_and_control_tokens_end_the_answer(served: Served) -> None:
    served.engine.tokenizer.fill = FillTokens((7, 8, 9), ("<a>", "<b>", "<c>"), suffix_first=False)
    choice = served.complete(prompt=["Hi", "Ho"], suffix="!", echo=True, stop_token_ids=[5]).json()["choices"][1]
    submitted = served.engine.submitted.get()
    assert submitted.prompts == (GapPrompt("Hi", "!"), GapPrompt("Ho", "!"))
    assert submitted.params.stop_token_ids == (5, 7, 8, 9)
    assert choice["text"] == "HoHello world"  # without the suffix
    served.complete(prompt=[5, 6], suffix="!", ignore_eos=True)
    submitted = served.engine.submitted.get()
    assert (submitted.prompts, submitted.params.stop_token_ids) == ((GapPrompt([5, 6], "!"),), ())
