"""Tests /v1/chat/completions: the prompt that reaches the engine, and the answer, whole and streamed."""

import json
from typing import Any

import msgspec
import pytest

from oaiserve.engine.request import SamplingParams, Usage
from oaiserve.routes.answer.common_shape import usage_object
from tests.routes.asking import CHAT, HI, answered, chatted, refused, stream_of
from tests.routes.doubles import says
from tests.serving import Serve, Served


def test_the_answer_has_the_documented_shape(served: Served) -> None:
    answer = served.chat().json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": "Hello world", "refusal": None}
    of_choice = {"index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert answer["choices"] == [{"message": message, **of_choice}]
    assert answer["usage"]["total_tokens"] == 5


def test_without_max_tokens_an_answer_may_fill_the_context(served: Served) -> None:
    served.chat()
    assert served.engine.submitted.get().params == SamplingParams()


def test_messages_keep_the_fields_that_a_template_can_use(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}], "name": "Ada"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "c1"},
    ]
    messages[0]["unknown"] = {"of": ["a template"]}
    messages[1]["content"][0] |= {"source_lang_code": "de", "target_lang_code": "en"}
    _, prompt = chatted(served, messages=[messages[0] | {"refusal": None}, *messages[1:]])
    assert prompt.messages == messages
    assert prompt.add_generation_prompt
    assert not prompt.add_special_tokens


def test_a_refusal_in_the_history_becomes_text(served: Served) -> None:
    refused = {"content": [{"type": "refusal", "refusal": "No."}]}, {"content": None, "refusal": "No."}
    _, prompt = chatted(served, messages=[{"role": "assistant", **each} for each in refused])
    assert [message["content"] for message in prompt.messages] == [[{"type": "text", "text": "No."}], "No."]


def test_continue_final_message_adds_no_generation_prompt(served: Served) -> None:
    _, prompt = chatted(served, messages=[{"role": "assistant", "content": "He"}], continue_final_message=True)
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


def test_chat_template_kwargs_reach_the_template(served: Served) -> None:
    _, prompt = chatted(served, messages=HI, chat_template_kwargs={"enable_thinking": False})
    assert prompt.template_kwargs == {"enable_thinking": False}


def test_chat_template_kwargs_may_have_tools_and_the_parameters_of_the_template(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    _, prompt = chatted(served, messages=HI, chat_template_kwargs={"tools": tools, "add_generation_prompt": False})
    assert (prompt.template_kwargs, prompt.add_generation_prompt) == ({"tools": tools}, False)
    both = served.chat(chat_template_kwargs={"continue_final_message": True}, continue_final_message=False)
    refused(both, "chat_template_kwargs", "contradicts")
    response = served.chat(tools=tools, chat_template_kwargs={"tools": []})
    assert "tools are left out" in response.headers["x-oaiserve-adapted"]


def test_a_stream_begins_with_the_role_of_each_choice_in_order(served: Served) -> None:
    choices = [chunk["choices"][0] for chunk in stream_of(served, CHAT, n=3)]
    role = {"role": "assistant", "content": ""}
    assert [(choice["index"], choice["delta"]) for choice in choices[:3]] == [(0, role), (1, role), (2, role)]
    assert all("role" not in choice["delta"] for choice in choices[3:])


def test_a_stream_ends_each_choice_with_an_empty_delta_and_has_no_chunk_without_text(served: Served) -> None:
    for texts, contents in ((("a", "", "b"), ("", "ab", None)), (("",), ("", None))):
        served.engine.script = says(*texts)
        choices = [chunk["choices"][0] for chunk in stream_of(served, CHAT)]
        assert tuple(choice["delta"].get("content") for choice in choices) == contents
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(contents) - 1) + ["stop"]


def test_usage_can_be_in_every_chunk(served: Served) -> None:
    chunks = stream_of(served, CHAT, stream_options={"include_usage": True, "continuous_usage_stats": True})
    usages = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
    assert usages == [(3, 0), (3, 2), (3, 2), (3, 2)]
    assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks} == {2}


def test_usage_tells_the_tokens_of_images_and_sounds_if_there_are_any() -> None:
    details = usage_object(Usage(90, 4, 1, image_tokens=77, audio_tokens=5)).prompt_tokens_details
    assert json.loads(msgspec.json.encode(details)) == {"cached_tokens": 4, "image_tokens": 77, "audio_tokens": 5}
    assert msgspec.json.encode(usage_object(Usage(90, 4, 1)).prompt_tokens_details) == b'{"cached_tokens":4}'


def test_chunks_have_the_documented_shape(served: Served) -> None:
    _, chunk, *_ = stream_of(served, CHAT)
    assert chunk["object"] == "chat.completion.chunk"
    choice = {"index": 0, "delta": {"content": "Hello world"}, "logprobs": None, "finish_reason": None}
    assert chunk["choices"] == [choice]


def test_logprobs_show_the_true_bytes_and_the_best_alternatives(served: Served) -> None:
    served.engine.script = says("é")
    logprobs = served.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]
    best = [{"token": "é!", "logprob": -0.25, "bytes": [195, 169, 33]}]
    entry = {"token": "é", "logprob": -1.5, "bytes": [195, 169]}
    assert logprobs == {"refusal": None, "content": [{**entry, "top_logprobs": best}]}
    logprobs = served.chat(logprobs=True).json()["choices"][0]["logprobs"]
    assert logprobs["content"] == [{**entry, "top_logprobs": []}]


@pytest.mark.parametrize("template", [None, "<think>"])
def test_the_token_that_ends_an_answer_has_no_entry_in_its_logprobs(serve: Serve, template: str | None) -> None:
    served = serve(template=template, script=says("Hello", "", has_end_token=True))
    body = {"logprobs": True, "return_token_ids": True}
    (choice,) = served.chat(**body).json()["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["Hello"]
    assert choice["token_ids"] == [10, 11]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in stream_of(served, CHAT, **body)]
    assert [entry["token"] for part in streamed if part for entry in part["content"]] == ["Hello"]


def test_token_ids_and_prompt_logprobs_of_the_prompt_are_beside_the_choices(served: Served) -> None:
    answer = served.chat(return_token_ids=True, prompt_logprobs=0).json()
    assert answer["prompt_token_ids"] == [1, 2, 3]
    assert answer["prompt_logprobs"][:2] == [None, {"2": {"logprob": -1.5, "rank": 2, "decoded_token": " a"}}]
    assert answer["choices"][0]["token_ids"] == [10, 11]
    assert stream_of(served, CHAT, return_token_ids=True)[0]["prompt_token_ids"] == [1, 2, 3]


@pytest.mark.parametrize(("stop", "read"), [("", ()), ([""], ()), (["a", ""], ("a",))])
def test_an_empty_stop_string_is_left_out_and_named_in_a_header(
    served: Served, stop: str | list[str], read: tuple[str, ...]
) -> None:
    response = served.chat(stop=stop)
    assert response.headers["x-oaiserve-adapted"] == "stop: an empty string is left out"
    assert served.engine.submitted.get_nowait().params.stop == read


@pytest.mark.parametrize("stream", [False, True])
def test_misspelled_parameter_is_named_in_a_header_and_in_the_record(served: Served, stream: bool) -> None:
    note = "temperature: an unknown parameter with a similar name is ignored"
    assert served.chat(temperatur=0, stream=stream).headers["x-oaiserve-adapted"] == note
    assert served.telemetry.next_record().adapted == (note,)


@pytest.mark.parametrize("options", [{"tools": []}, {"tool_choice": "none"}, {"modalities": ["text"]}, {"store": True}])
def test_parameters_that_change_nothing_are_accepted(served: Served, options: dict[str, Any]) -> None:
    assert served.chat(**options, parallel_tool_calls=True, reasoning_effort="low").status_code == 200


def test_the_usage_counts_drafts_if_the_client_sends_a_prediction(served: Served) -> None:
    predicted, plain = (
        answered(served.chat(**more))["usage"]["completion_tokens_details"]
        for more in ({"prediction": {"type": "content", "content": "Hello"}}, {})
    )
    assert predicted == {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert plain == {"reasoning_tokens": 0}
