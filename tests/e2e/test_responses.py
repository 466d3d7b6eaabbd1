"""Tests /v1/responses with the official OpenAI SDK and the demo model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import openai
from openai.types.responses import Response
from pydantic import BaseModel

from tests.e2e.conftest import API_KEY, serve_process

QUESTION = "What is the capital of France?"
ASKED: dict[str, Any] = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 64}
WEATHER: dict[str, Any] = {**ASKED, "input": "What is the weather in Paris?"}
FORCED = {"type": "function", "name": "GetWeather"}


class GetWeather(BaseModel):
    """Report the weather in a city."""

    city: str
    unit: Literal["celsius", "fahrenheit"]


TOOLS: list[Any] = [openai.pydantic_function_tool(GetWeather)["function"] | {"type": "function"}]


def checked(response: Response) -> Response:
    """Return a response that is in the form of the SDK's own types, of which a plain parse is not strict."""
    Response.model_validate(response.model_dump(), strict=False)
    return response


def test_a_response_is_that_of_the_same_talk_over_chat(sdk: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    answer = checked(sdk.responses.create(**ASKED, instructions="Be brief."))
    chat = sdk.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=64)
    assert "Paris" in answer.output_text
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    usage = chat.usage
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)


def test_the_stream_helper_assembles_the_whole_answer(sdk: openai.OpenAI) -> None:
    whole = sdk.responses.create(**ASKED)
    with sdk.responses.stream(**ASKED) as stream:
        events = list(stream)
        final = checked(stream.get_final_response())
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == final.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert sdk.responses.retrieve(final.id).output_text == whole.output_text


def test_a_call_is_made_streamed_and_answered(sdk: openai.OpenAI) -> None:
    first = checked(sdk.responses.create(**WEATHER, tools=TOOLS, tool_choice=FORCED))
    (call,) = first.output
    assert GetWeather(**json.loads(call.arguments)).unit in ("celsius", "fahrenheit")
    with sdk.responses.stream(**WEATHER, tools=TOOLS, tool_choice=FORCED) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert len(deltas) > 1
    assert "".join(deltas) == streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    second = sdk.responses.create(**ASKED | {"input": [result]}, tools=TOOLS, previous_response_id=first.id)
    history = [{"role": "user", "content": WEATHER["input"]}, *first.output, result]
    sent_again = sdk.responses.create(**ASKED | {"input": history}, tools=TOOLS, store=False)
    assert second.output_text == sent_again.output_text
    assert second.usage.input_tokens == sent_again.usage.input_tokens


def test_a_talk_that_goes_on_is_found_in_the_prefix_cache(sdk: openai.OpenAI) -> None:
    asked = ASKED | {
        "input": "Tell me a story of a lighthouse, its keeper and the sea, please.",
        "max_output_tokens": 48,
    }
    first = sdk.responses.create(**asked)
    second = sdk.responses.create(**asked | {"input": "And then?"}, previous_response_id=first.id)
    third = sdk.responses.create(**asked | {"input": "And then?"}, previous_response_id=second.id)
    for before, after in ((first, second), (second, third)):
        # All of the talk so far, the last answer included, but for the block in which it ends.
        so_far = before.usage.input_tokens + before.usage.output_tokens
        assert after.usage.input_tokens_details.cached_tokens >= so_far - 2 * 16 > before.usage.input_tokens


def test_a_server_that_is_killed_loses_no_response_that_was_answered(small_model: Path, tmp_path: Path) -> None:
    flags = ("--served-model-name", "demo", "--api-key", API_KEY, "--kv-blocks", "200")
    flags += ("--response-store", str(tmp_path / "responses.db"))
    with serve_process(str(small_model), tmp_path / "first.log", *flags) as server:
        answer = server.sdk().responses.create(**ASKED)
        server.process.kill()
    with serve_process(str(small_model), tmp_path / "second.log", *flags) as server:
        assert server.sdk().responses.retrieve(answer.id).model_dump() == answer.model_dump()
        assert server.sdk().responses.create(**ASKED, previous_response_id=answer.id).status
