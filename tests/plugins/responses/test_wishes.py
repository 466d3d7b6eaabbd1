"""Wishes of /v1/responses that change what the server does, or are refused: nothing is ignored in silence."""

from typing import Any

import pytest

from oaiserve.engine.request import ChatPrompt, FinishReason
from oaiserve.routes.adaptations import HEADER
from tests.plugins.responses.asking import STOP, TIME, WITH_CALLS, ask, streamed
from tests.routes.asking import CALL, RESPONSES, refused, submitted
from tests.routes.doubles import says
from tests.serving import Serve, Served

QUESTION = {"role": "user", "content": "What time is it?"}
ADDED = {"type": "additional_tools", "role": "developer", "tools": [TIME]}
FOUND = {
    "type": "tool_search_output",
    "call_id": "call_1",
    "execution": "client",
    "status": "completed",
    "tools": [TIME],
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}


def names_shown(prompt: ChatPrompt) -> list[str]:
    return [tool["function"]["name"] for tool in prompt.tools]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prewarmed_prompt_is_computed_and_has_no_output(served: Served, stream: bool) -> None:
    served.engine.script = says("", finish=FinishReason.LENGTH)
    body = {"prompt_cache_options": {"prewarm": True}, "max_output_tokens": 20}
    answer = streamed(served, **body)[-1]["response"] if stream else ask(served, **body)
    assert (answer["status"], answer["output"], answer["incomplete_details"]) == ("completed", [], None)
    assert answer["max_output_tokens"] == 20
    request, _ = submitted(served)
    assert request.params.max_tokens == 0


@pytest.mark.parametrize("item", [ADDED, FOUND], ids=lambda item: item["type"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_time"}], ids=["required", "named"])
def test_tools_that_arrive_in_the_input_can_be_called(serve: Serve, item: dict[str, Any], choice: Any) -> None:
    served = serve(**WITH_CALLS, script=says(CALL))
    answer = ask(served, input=[item, QUESTION], tool_choice=choice)
    assert [(one["type"], one["name"]) for one in answer["output"]] == [("function_call", "get_time")]


def test_tools_that_arrived_stay_in_the_responses_that_continue(serve: Serve) -> None:
    served = serve(template="{{ messages }}{{ tools }}<tool_call></think>", script=says("Well."))
    response = served.post(RESPONSES, input=[ADDED, QUESTION], tools=[STOP])
    assert "its tools are shown with the others" in response.headers[HEADER]
    served.engine.submitted.get()
    ask(served, previous_response_id=response.json()["id"])
    assert names_shown(submitted(served)[1]) == ["get_time"]


def test_a_tool_that_is_there_already_stays_as_it_is(serve: Serve) -> None:
    served = serve(template="{{ messages }}{{ tools }}<tool_call></think>")
    ask(served, input=[ADDED, FOUND, QUESTION], tools=[TIME])
    _, prompt = submitted(served)
    assert names_shown(prompt) == ["get_time"]
    assert "These tools can be called now: get_time" in str(prompt.messages)


def test_settings_that_change_within_the_input_are_refused(served: Served) -> None:
    update = {"type": "configuration_update", "text": {"format": FORMAT}}
    refused(served.post(RESPONSES, input=[update, QUESTION]), "input", "input[0]")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"background_options": {"continuation_id": "report"}}, "background_options.continuation_id"),
        ({"context_management": [{"type": "compaction", "compact_threshold": 1000}]}, "context_management"),
        ({"moderation": {"policy": {"input": {"mode": "score"}}}}, "moderation"),
        ({"prompt_cache_options": {"ttl": "12h"}}, "prompt_cache_options.ttl"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"tools": [{**TIME, "allowed_callers": ["programmatic"]}]}, "tools[].allowed_callers"),
    ],
)
def test_a_wish_that_is_left_out_is_told(served: Served, body: dict[str, Any], told: str) -> None:
    response = served.post(RESPONSES, input="Hi", **body)
    assert response.status_code == 200, response.text
    assert f"{told}: is left out" in response.headers[HEADER]


def test_moderation_that_blocks_is_refused(served: Served) -> None:
    body = {"input": "Hi", "moderation": {"policy": {"input": {"mode": "block"}}}}
    refused(served.post(RESPONSES, **body), "moderation.policy.input.mode", "Nothing here moderates")


@pytest.mark.plugin("batches")
def test_a_text_file_is_read_by_its_id(served: Served) -> None:
    upload = {"file": ("notes.txt", b"The code is 4711."), "purpose": (None, "user_data")}
    file_id = served.http.post("/v1/files", files=upload).json()["id"]
    content = [{"type": "input_file", "file_id": file_id}, {"type": "input_text", "text": "What is the code?"}]
    ask(served, input=[{"role": "user", "content": content}])
    _, prompt = submitted(served)
    assert "The code is 4711." in str(prompt.messages)


def test_a_file_that_does_not_exist_is_named(served: Served) -> None:
    turn = {"role": "user", "content": [{"type": "input_file", "file_id": "file-nothing"}]}
    refused(served.post(RESPONSES, input=[turn]), "input", "there is no file 'file-nothing'")
    response = served.post(RESPONSES, input=[turn, {"role": "assistant", "content": "Yes."}, QUESTION])
    assert response.status_code == 200, response.text
    assert "input[0].content[0]: input_file is left out" in response.headers[HEADER]
