"""Tests /v1/responses: its exact events, its items, what it tells back, and its errors."""

import json
from typing import Any

import pytest

from oaiserve.engine.request import FinishReason
from oaiserve.errors import InternalError
from oaiserve.facts.record import Outcome
from tests.plugins.responses.asking import LOGPROBS, STOP, TIME, TOOLS, WITH_CALLS, ask, streamed
from tests.routes.asking import CALL, HYBRID, OPEN, PIECES, RESPONSES, THOUGHT, ZONE
from tests.routes.doubles import fails, says, starts
from tests.serving import Serve, Served


def without_ids(value: Any) -> Any:
    """Return a value with the ids and times replaced by what kind they are of."""
    if isinstance(value, dict):
        return {key: without_ids(each) for key, each in value.items() if key not in ("created_at", "completed_at")}
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, str) and value.partition("_")[0] in ("resp", "msg", "fc", "rs", "call"):
        return value.partition("_")[0]
    return value


MESSAGE = {"id": "msg", "type": "message", "status": "completed", "role": "assistant"}
TEXT = {"type": "output_text", "annotations": [], "logprobs": []}
NOT_GIVEN = (
    *("error", "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "user"),
    *("safety_identifier", "prompt_cache_key"),
)
TOLD = dict.fromkeys(NOT_GIVEN) | {
    "background": False,
    "frequency_penalty": 0.0,
    "metadata": {},
    "model": "org/demo",
    "object": "response",
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
}
USAGE = {
    "input_tokens": 3,
    "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 5,
}


def whole(*output: dict[str, Any], status: str = "completed", **more: Any) -> dict[str, Any]:
    usage = None if status == "in_progress" else USAGE
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    answer = {"id": "resp", "status": status, "output": list(output), "usage": usage, "incomplete_details": details}
    return {**TOLD, **answer, **more}


def an_event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", **fields}


# The answer.


def test_a_whole_answer_has_the_documented_shape(served: Served) -> None:
    answer = ask(served)
    assert answer["created_at"] <= answer["completed_at"]
    assert without_ids(answer) == whole({**MESSAGE, "content": [{**TEXT, "text": "Hello world"}]})
    assert answer["output"][0]["id"].split("_")[1] == answer["id"].removeprefix("resp_")


def test_a_stream_has_exactly_these_events(served: Served) -> None:
    served.engine.script = says("Hel", "lo")
    events = streamed(served)
    begun = whole(status="in_progress")
    place = {"item_id": "msg", "output_index": 0, "content_index": 0}
    done = {**MESSAGE, "content": [{**TEXT, "text": "Hello"}]}
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "Hello"
    assert without_ids([event for event in events if event not in deltas[1:]]) == [
        an_event("created", response=begun),
        an_event("in_progress", response=begun),
        an_event("output_item.added", output_index=0, item={**MESSAGE, "status": "in_progress", "content": []}),
        an_event("content_part.added", **place, part={**TEXT, "text": ""}),
        an_event("output_text.delta", **place, delta=deltas[0]["delta"], logprobs=[]),
        an_event("output_text.done", **place, text="Hello", logprobs=[]),
        an_event("content_part.done", **place, part={**TEXT, "text": "Hello"}),
        an_event("output_item.done", output_index=0, item=done),
        an_event("completed", response=whole(done)),
    ]
    assert {event["response"]["id"] for event in events if "response" in event} == {events[0]["response"]["id"]}
    assert {event["item_id"] for event in events if "item_id" in event} == {events[2]["item"]["id"]}


def test_a_streamed_call_has_exactly_these_events(serve: Serve) -> None:
    served = serve(**WITH_CALLS, script=says("Well. ", *PIECES))
    events = without_ids(streamed(served, tools=TOOLS))
    call = {"id": "fc", "type": "function_call", "call_id": "call", "name": "get_time"}
    message = {**MESSAGE, "content": [{**TEXT, "text": "Well. "}]}
    done = {**call, "status": "completed", "arguments": ZONE}
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    end_of_text = ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds[kinds.index("output_text.done") :][:3] == end_of_text
    of_call = events[kinds.index("output_item.done") + 1 :]
    arguments = [event for event in of_call if event["type"] == "response.function_call_arguments.delta"]
    assert all(event["delta"] and event["output_index"] == 1 for event in arguments)
    assert "".join(event["delta"] for event in arguments) == ZONE
    place = {"item_id": "fc", "output_index": 1}
    assert [event for event in of_call if event not in arguments] == [
        an_event("output_item.added", output_index=1, item={**call, "status": "in_progress", "arguments": ""}),
        an_event("function_call_arguments.done", **place, name="get_time", arguments=ZONE),
        an_event("output_item.done", output_index=1, item=done),
        an_event("completed", response=events[-1]["response"]),
    ]
    assert events[-1]["response"]["output"] == [message, done]


def test_streamed_reasoning_has_exactly_these_events(serve: Serve) -> None:
    served = serve(template=HYBRID, script=says(*THOUGHT))
    events = without_ids(streamed(served))
    place = {"item_id": "rs", "output_index": 0, "content_index": 0}
    item = {"id": "rs", "type": "reasoning", "summary": []}
    thought = {"type": "reasoning_text", "text": "I think."}
    deltas = [event for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "I think."
    assert [event for event in events[2:] if event not in deltas][:5] == [
        an_event("output_item.added", output_index=0, item={**item, "status": "in_progress", "content": []}),
        an_event("content_part.added", **place, part={"type": "reasoning_text", "text": ""}),
        an_event("reasoning_text.done", **place, text="I think."),
        an_event("content_part.done", **place, part=thought),
        an_event("output_item.done", output_index=0, item={**item, "status": "completed", "content": [thought]}),
    ]
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message"]
    assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": 7}


@pytest.mark.parametrize(
    ("options", "texts", "body"),
    [
        ({}, ("Hello", " world"), {}),
        ({}, ("Hello", " world"), {"include": LOGPROBS, "top_logprobs": 2}),
        (WITH_CALLS, ("Well. ", *PIECES), {"tools": TOOLS}),
        (WITH_CALLS, ("Well. ", *PIECES), {"tools": TOOLS, "include": LOGPROBS}),
        (WITH_CALLS, (*PIECES, *PIECES), {"tools": TOOLS}),
        (WITH_CALLS, PIECES, {"tools": TOOLS, "tool_choice": "required"}),
        ({}, ("",), {}),
        ({"template": OPEN}, THOUGHT[1:], {}),
        ({"template": OPEN}, THOUGHT, {"include": LOGPROBS, "top_logprobs": 1}),
        ({"template": OPEN}, ("I", " think"), {}),
    ],
)
@pytest.mark.parametrize("finish", FinishReason)
def test_the_end_of_a_stream_is_the_whole_answer_and_what_is_stored(
    serve: Serve, options: dict[str, Any], texts: tuple[str, ...], body: dict[str, Any], finish: FinishReason
) -> None:
    served = serve(**options, script=says(*texts, finish=finish))
    events = streamed(served, **body)
    last = events[-1]
    assert last["type"] == ("response.completed" if finish == FinishReason.STOP else "response.incomplete")
    assert without_ids(last["response"]) == without_ids(ask(served, **body))
    stored = served.http.get(f"{RESPONSES}/{last['response']['id']}").json()
    for item in last["response"]["output"]:
        for part in item.get("content", []):
            part["logprobs"] = [] if "logprobs" in part else None
    for item in stored["output"]:
        for part in item.get("content", []):
            part.setdefault("logprobs", None)
    assert stored == last["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert without_ids([item["id"] for item in done]) == without_ids([item["id"] for item in stored["output"]])


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_time"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_time"}],
        },
    ],
)
def test_a_response_repeats_the_choice_of_tools_as_the_client_sent_it(serve: Serve, choice: Any) -> None:
    served = serve(**WITH_CALLS, script=says(*PIECES))
    assert ask(served, tools=TOOLS, tool_choice=choice)["tool_choice"] == choice


def test_logprobs_are_those_of_the_text(serve: Serve) -> None:
    served = serve(template=OPEN, script=says(*THOUGHT[1:]))
    (_, message) = ask(served, include=LOGPROBS, top_logprobs=1)["output"]
    (part,) = message["content"]
    tokens = [entry["token"] for entry in part["logprobs"]]
    assert (tokens[-2:], "I" in tokens, len(part["logprobs"][0]["top_logprobs"])) == (["Yes", "."], False, 1)
    events = streamed(served, include=LOGPROBS, top_logprobs=1)
    deltas = [entry for event in events for entry in event.get("logprobs", []) if event["type"].endswith("text.delta")]
    assert deltas == part["logprobs"]


def test_an_answer_that_is_cut_is_incomplete(served: Served) -> None:
    served.engine.script = says("Hel", finish=FinishReason.LENGTH)
    answer = ask(served, max_output_tokens=1)
    cut = {**MESSAGE, "status": "incomplete", "content": [{**TEXT, "text": "Hel"}]}
    usage = {**USAGE, "output_tokens": 1, "total_tokens": 4}
    assert without_ids(answer) == whole(cut, status="incomplete", max_output_tokens=1, usage=usage)
    assert answer["completed_at"] is None
    events = streamed(served, max_output_tokens=1)
    assert [event["type"] for event in events[-2:]] == ["response.output_item.done", "response.incomplete"]


@pytest.mark.parametrize(
    ("texts", "found"),
    [(PIECES, [("completed", ZONE)]), (PIECES[:3], [("incomplete", '{"zo')]), (("<tool",), [])],
)
def test_a_forced_call_that_is_cut_has_what_had_come_and_gives_no_message(
    serve: Serve, texts: tuple[str, ...], found: list[tuple[str, str]]
) -> None:
    served = serve(**WITH_CALLS, script=says(*texts, finish=FinishReason.LENGTH))
    output = ask(served, tools=TOOLS, tool_choice="required")["output"]
    assert [(item["status"], item["arguments"]) for item in output] == found


def test_a_call_of_no_tool_stays_text(serve: Serve) -> None:
    other = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
    (item,) = ask(serve(**WITH_CALLS, script=says(other)), tools=TOOLS)["output"]
    assert item["content"][0]["text"] == other


def test_answers_report_the_effective_parameters(serve: Serve) -> None:
    served = serve(default_params="temperature=0.25,top_p=0.5")
    effective = {
        "frequency_penalty": 0.5,
        "instructions": "Be brief.",
        "max_output_tokens": 7,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "presence_penalty": -0.5,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": None},
        "safety_identifier": "s",
        "service_tier": "default",
        "store": False,
        "temperature": 0.25,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "description": None, "strict": False}},
        "tool_choice": "none",
        "tools": [TIME, {**STOP, "description": None, "parameters": None, "strict": None}],
        "top_p": 0.75,
        "truncation": "auto",
        "user": "me",
    }
    sent = {key: value for key, value in effective.items() if key != "temperature"}
    as_sent = {
        "tools": TOOLS,
        "reasoning": {"effort": "low", "summary": "auto"},
        "service_tier": "flex",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    }
    answer = ask(served, **sent | as_sent)
    assert {key: answer[key] for key in effective} == effective


# Errors and accounts.


def test_an_error_in_a_stream_is_its_last_event(served: Served) -> None:
    served.engine.script = fails(InternalError("The step failed."), "Hel")
    last = streamed(served)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    error = last["response"]["error"]
    assert (error["code"], error["message"]) == ("server_error", "The step failed.")
    (item,) = last["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hel")
    assert served.http.get(f"{RESPONSES}/{last['response']['id']}").status_code == 404
    assert served.telemetry.next_record().outcome == Outcome.FAILED


def test_a_client_that_leaves_stores_nothing(served: Served) -> None:
    served.engine.script = starts("Hel")
    with served.http.stream("POST", RESPONSES, json={"input": "Hi", "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: response.created"
        response_id = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
    served.engine.aborted.get()
    assert served.telemetry.next_record().outcome == Outcome.CANCELLED
    assert served.http.get(f"{RESPONSES}/{response_id}").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_accounted_for_like_every_other_request(serve: Serve, stream: bool) -> None:
    served = serve(**WITH_CALLS, script=says(CALL))
    response = served.post(RESPONSES, input="Hi", tools=TOOLS, stream=stream, max_output_tokens=9)
    record = served.telemetry.next_record()
    assert (record.operation, record.http_route, record.outcome) == ("responses", RESPONSES, Outcome.FINISHED)
    assert f'"id":"{record.response_id}"' in response.text
    assert record.conversation_id == record.response_id
    assert (record.answer_reasons, record.params) == (("tool_calls",), {"max_tokens": 9})
    assert dict(record.tool_calls) == {"called": 1}
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (3, 2, 1)
    assert served.telemetry.records.empty()


def test_the_end_of_a_stream_has_the_timings_if_they_are_asked_for(served: Served) -> None:
    events = streamed(served, stream_options={"include_timings": True})
    assert set(events[-1]["timings"]["phases_ns"]) >= {"receive", "queue", "decode"}
