"""Tests /v1/responses: its exact events, its items, what it refuses, and what of it is the same as in chat."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from oaiserve.engine.request import ChatPrompt, FinishReason, Request
from oaiserve.errors import ContextLengthExceeded, InternalError
from oaiserve.record import Outcome
from tests.routes.conftest import Serve, Served
from tests.routes.doubles import fails, says, starts
from tests.routes.test_reasoning import HYBRID, OPEN, THOUGHT
from tests.routes.test_tools import CALL, CHATML, PARAMETERS, PIECES, ZONE

RESPONSES = "/v1/responses"
WITH_CALLS = {"template": CHATML}
TIME = {"type": "function", "name": "get_time", "description": "The time.", "parameters": PARAMETERS, "strict": True}
STOP = {"type": "function", "name": "stop"}
TOOLS = [TIME, STOP]
CHAT_TOOLS = [{"type": tool.pop("type"), "function": tool} for tool in map(dict, TOOLS)]
LOGPROBS = ["message.output_text.logprobs"]


def ask(served: Served, **body: Any) -> dict[str, Any]:
    response = served.post(RESPONSES, **{"input": "Hi", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, and check what holds for each of them."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1].pop("sequence_number") == number
    return events


def streamed(served: Served, **body: Any) -> list[dict[str, Any]]:
    return events_of(served.post(RESPONSES, **{"input": "Hi", "stream": True, **body}))


def submitted(served: Served, **body: Any) -> tuple[Request, ChatPrompt]:
    ask(served, **body)
    return last_request(served)


def last_request(served: Served) -> tuple[Request, ChatPrompt]:
    request = served.engine.submitted.get()
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    return request, prompt


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
TOLD = {
    "background": False,
    "error": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "model": "org/demo",
    "object": "response",
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
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
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**MESSAGE, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **place, "part": {**TEXT, "text": ""}},
        {"type": "response.output_text.delta", **place, "delta": deltas[0]["delta"], "logprobs": []},
        {"type": "response.output_text.done", **place, "text": "Hello", "logprobs": []},
        {"type": "response.content_part.done", **place, "part": {**TEXT, "text": "Hello"}},
        {"type": "response.output_item.done", "output_index": 0, "item": done},
        {"type": "response.completed", "response": whole(done)},
    ]
    assert {event["response"]["id"] for event in events if "response" in event} == {events[0]["response"]["id"]}
    assert {event["item_id"] for event in events if "item_id" in event} == {events[2]["item"]["id"]}


def test_a_streamed_call_has_exactly_these_events(serve: Serve) -> None:
    served = serve(**WITH_CALLS)
    served.engine.script = says("Well. ", *PIECES)
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
    assert [event for event in of_call if event not in arguments] == [
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": {**call, "status": "in_progress", "arguments": ""},
        },
        {
            "type": "response.function_call_arguments.done",
            "item_id": "fc",
            "output_index": 1,
            "name": "get_time",
            "arguments": ZONE,
        },
        {"type": "response.output_item.done", "output_index": 1, "item": done},
        {"type": "response.completed", "response": events[-1]["response"]},
    ]
    assert events[-1]["response"]["output"] == [message, done]


def test_streamed_reasoning_has_exactly_these_events(serve: Serve) -> None:
    served = serve(template=HYBRID)
    served.engine.script = says(*THOUGHT)
    events = without_ids(streamed(served))
    place = {"item_id": "rs", "output_index": 0, "content_index": 0}
    item = {"id": "rs", "type": "reasoning", "summary": []}
    thought = {"type": "reasoning_text", "text": "I think."}
    deltas = [event for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "I think."
    of_reasoning = [event for event in events[2:] if event not in deltas][:5]
    assert of_reasoning == [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**item, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **place, "part": {"type": "reasoning_text", "text": ""}},
        {"type": "response.reasoning_text.done", **place, "text": "I think."},
        {"type": "response.content_part.done", **place, "part": thought},
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": {**item, "status": "completed", "content": [thought]},
        },
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
    served = serve(**options)
    served.engine.script = says(*texts, finish=finish)
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


def test_logprobs_are_those_of_the_text(serve: Serve) -> None:
    served = serve(template=OPEN)
    served.engine.script = says(*THOUGHT[1:])
    (_, message) = ask(served, include=LOGPROBS, top_logprobs=1)["output"]
    (part,) = message["content"]
    assert [entry["token"] for entry in part["logprobs"]][-2:] == ["Yes", "."]
    assert "I" not in [entry["token"] for entry in part["logprobs"]]
    assert len(part["logprobs"][0]["top_logprobs"]) == 1
    events = streamed(served, include=LOGPROBS, top_logprobs=1)
    deltas = [entry for event in events for entry in event.get("logprobs", []) if event["type"].endswith("text.delta")]
    assert deltas == part["logprobs"]


def test_an_answer_that_is_cut_is_incomplete(served: Served) -> None:
    served.engine.script = says("Hel", finish=FinishReason.LENGTH)
    answer = ask(served, max_output_tokens=1)
    assert (answer["status"], answer["completed_at"]) == ("incomplete", None)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["max_output_tokens"] == 1
    events = streamed(served, max_output_tokens=1)
    assert [event["type"] for event in events[-2:]] == ["response.output_item.done", "response.incomplete"]


def test_a_call_that_is_cut_has_what_had_come(serve: Serve) -> None:
    served = serve(**WITH_CALLS)
    served.engine.script = says(*PIECES[:3], finish=FinishReason.LENGTH)
    (item,) = ask(served, tools=TOOLS, tool_choice="required")["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    assert ZONE.startswith(item["arguments"])


def test_a_forced_call_gives_no_message(serve: Serve) -> None:
    served = serve(**WITH_CALLS)
    for texts in (PIECES, ("<tool",)):
        served.engine.script = says(*texts, finish=FinishReason.LENGTH)
        output = ask(served, tools=TOOLS, tool_choice="required")["output"]
        assert "message" not in [item["type"] for item in output]


def test_a_call_of_no_tool_stays_text(serve: Serve) -> None:
    served = serve(**WITH_CALLS)
    served.engine.script = says('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')
    (item,) = ask(served, tools=TOOLS)["output"]
    assert item["content"][0]["text"].startswith("<tool_call>")


def test_parameters_are_told_back_as_they_took_effect(served: Served) -> None:
    served.engine.default_params = {"temperature": 0.25, "top_p": 0.5}
    told = {
        "instructions": "Be brief.",
        "max_output_tokens": 7,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": None},
        "store": False,
        "temperature": 0.25,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "description": None, "strict": None}},
        "tool_choice": "none",
        "tools": [TIME, {**STOP, "description": None, "parameters": None, "strict": None}],
        "top_p": 0.75,
        "truncation": "disabled",
        "user": "me",
    }
    asked = {key: value for key, value in told.items() if key != "temperature"}
    as_sent = {
        "tools": TOOLS,
        "truncation": "auto",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    }
    answer = ask(served, **asked | as_sent)
    assert {key: answer[key] for key in told} == told


# The prompt.


def test_instructions_come_first(served: Served) -> None:
    _, prompt = submitted(served, instructions="Be brief.")
    assert prompt.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert prompt.add_generation_prompt


ITEMS_AND_MESSAGES: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"}]),
    (
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Obey."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        ],
        [
            {"role": "developer", "content": "Obey."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    ),
    (
        [
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_time", "arguments": ZONE},
            {"type": "function_call", "call_id": "c2", "name": "stop", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
            {"role": "user", "content": "And?"},
        ],
        [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "Well.",
                "reasoning": "Hm.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": ZONE}},
                    {"id": "c2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
            {"role": "tool", "tool_call_id": "c2", "content": "done"},
            {"role": "user", "content": "And?"},
        ],
    ),
]


@pytest.mark.parametrize("template", [None, HYBRID, CHATML], ids=["plain", "with-tools", "without-tools"])
@pytest.mark.parametrize(("items", "messages"), ITEMS_AND_MESSAGES, ids=["text", "parts", "calls"])
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no-tools", "tools"])
def test_the_prompt_and_the_parameters_are_those_of_the_same_talk_over_chat(
    serve: Serve,
    template: str | None,
    items: list[dict[str, Any]],
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
) -> None:
    served = serve() if template is None else serve(template=template)
    request, prompt = submitted(served, input=items, tools=tools, temperature=0, max_output_tokens=9)
    chat_tools = {"tools": CHAT_TOOLS} if tools else {}
    assert served.chat(messages=messages, temperature=0, max_tokens=9, **chat_tools).status_code == 200
    of_chat, chat_prompt = last_request(served)
    assert (prompt.param, chat_prompt.param) == ("input", "messages")
    assert {key: getattr(prompt, key) for key in ("messages", "tools", "template_kwargs", "opening")} == {
        key: getattr(chat_prompt, key) for key in ("messages", "tools", "template_kwargs", "opening")
    }
    assert request.params == of_chat.params


@pytest.mark.parametrize(
    ("body", "of_chat"),
    [
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS, "strict": True}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"response_format": {"type": "text"}}),
        ({"tools": TOOLS, "tool_choice": "required"}, {"tools": CHAT_TOOLS, "tool_choice": "required"}),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "stop"}},
            {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "stop"}}},
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "stop"}],
                },
            },
            {
                "tools": CHAT_TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "stop"}}]},
                },
            },
        ),
        (
            {"tools": TOOLS, "parallel_tool_calls": False, "tool_choice": "required"},
            {"tools": CHAT_TOOLS, "parallel_tool_calls": False, "tool_choice": "required"},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"seed": 5, "top_k": 3, "stop": ["x"], "min_p": 0.1}, {"seed": 5, "top_k": 3, "stop": ["x"], "min_p": 0.1}),
        (
            {"include": LOGPROBS, "top_logprobs": 4},
            {"logprobs": True, "top_logprobs": 4},
        ),
    ],
)
def test_what_is_asked_in_other_words_than_in_chat_is_the_same(
    serve: Serve, body: dict[str, Any], of_chat: dict[str, Any]
) -> None:
    served = serve(template=HYBRID)
    request, prompt = submitted(served, **body)
    assert served.chat(**of_chat).status_code == 200
    chat_request, chat_prompt = last_request(served)
    if request.params.grammar is not None and "text" in body:
        assert request.params.grammar.param == "text.format"
        assert chat_request.params.grammar is not None
        assert request.params.grammar.text == chat_request.params.grammar.text
    else:
        assert request.params.grammar == chat_request.params.grammar
        assert request.params.logprobs == chat_request.params.logprobs
        assert request.params.stop_after == chat_request.params.stop_after
    assert (prompt.template_kwargs, prompt.opening) == (chat_prompt.template_kwargs, chat_prompt.opening)


# What is refused.


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", **fields}]}


def items(*given: Any) -> dict[str, Any]:
    return {"input": list(given)}


def chosen(choice: Any) -> dict[str, Any]:
    return {"tools": TOOLS, "tool_choice": choice}


def test_a_format_of_the_text_leaves_a_forced_call_as_it_is(serve: Serve) -> None:
    served = serve(**WITH_CALLS)
    forced = {"tools": TOOLS, "tool_choice": {"type": "function", "name": "stop"}}
    alone, _ = submitted(served, **forced)
    beside, _ = submitted(served, **forced, text={"format": {"type": "json_object"}})
    assert alone.params.grammar is not None
    assert beside.params.grammar == alone.params.grammar


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": None}, "input", "must be a string or a list"),
        ({"input": 3}, "input", "must be"),
        ({"input": []}, "input", "at least one item"),
        ({"input": ["Hi"]}, "input", "an object"),
        (items({"role": "critic", "content": "x"}), "input", "'system' or 'user', got 'critic'"),
        (items({"role": "user"}), "input", "'input[0].content'"),
        (items({"type": "web_search_call", "id": "ws_1"}), "input", "'input[0].type'"),
        (items({"role": "user", "content": [{"type": "input_image"}]}), "input", "got 'input_image'"),
        (items({"role": "user", "content": [{"type": "input_text"}]}), "input", "'input[0].content[0].text'"),
        (items({"role": "user", "content": ["x"]}), "input", "must be an object"),
        (items({"type": "function_call", "name": "f", "arguments": "{}"}), "input", "'input[0].call_id'"),
        (items({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}), "input", "arguments"),
        (items({"type": "function_call_output", "call_id": "c", "output": "x"}), "input", "no call 'c'"),
        (items({"type": "function_call_output", "call_id": "c", "output": 1}), "input", "'input[0].output'"),
        (items({"type": "reasoning", "summary": "x"}), "input", "'input[0].summary'"),
        (items({"type": "item_reference", "id": "msg_1_0"}), "input", "no item 'msg_1_0'"),
        (items({"type": "item_reference"}), "input", "'input[0].id'"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"max_tokens": 5}, "max_tokens", "'max_output_tokens'"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "'max_output_tokens'"),
        ({"response_format": {"type": "text"}}, "response_format", "'text.format'"),
        ({"n": 2}, "n", "must be 1"),
        ({"return_token_ids": True}, "return_token_ids", "no place"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "no place"),
        ({"temperature": 3}, "temperature", "<= 2"),
        ({"top_logprobs": 2}, "top_logprobs", "'include'"),
        ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs", "<= 20"),
        ({"include": ["everything"]}, "include", "'everything'"),
        ({"truncation": "middle"}, "truncation", "'middle'"),
        ({"background": True}, "background", "while the client waits"),
        ({"conversation": "conv_1"}, "conversation", "'previous_response_id'"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "'instructions'"),
        ({"metadata": []}, "metadata", "an object"),
        ({"metadata": {"a": 1}}, "metadata", "a string"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16"),
        ({"metadata": {"k" * 65: "x"}}, "metadata", "64 characters"),
        ({"metadata": {"k": "x" * 513}}, "metadata", "512 characters"),
        ({"reasoning": {"effort": 1}}, "reasoning", "must be a string"),
        ({"text": {"format": "json"}}, "text", "an object"),
        ({"text": {"format": {"type": "xml"}}}, "text", "'xml'"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text", "'text.format.schema'"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text", "'text.format.name'"),
        (
            {"text": {"format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}}},
            "text",
            "'text.format.json_schema'",
        ),
        ({"text": {"style": "x"}}, "text", "'text.style'"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "only one constraint",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "must be 'function', got 'web_search'"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools", "got 'custom'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "'tools[0].name'"),
        ({"tools": [{"type": "function"}]}, "tools", "'tools[0].name'"),
        (tool(name="a b"), "tools", "'tools[0].name'"),
        (tool(parameters=[]), "tools", "'tools[0].parameters'"),
        ({"tools": [STOP, STOP]}, "tools", "two have the name 'stop'"),
        ({"tool_choice": "required"}, "tool_choice", "only allowed with 'tools'"),
        (chosen("any"), "tool_choice", "got 'any'"),
        (chosen({"type": "function", "name": "g"}), "tool_choice", "no tool with the name 'g'"),
        (chosen({"type": "function", "function": {"name": "stop"}}), "tool_choice", "'tool_choice.name'"),
        (chosen({"type": "web_search"}), "tool_choice", "'tool_choice.type'"),
        (chosen({"type": "allowed_tools", "mode": "never", "tools": [STOP]}), "tool_choice", "'tool_choice.mode'"),
        (chosen({"type": "allowed_tools", "mode": "auto", "tools": []}), "tool_choice", "at least one tool"),
    ],
)
def test_what_is_wrong_is_named_before_the_answer_begins(
    served: Served, body: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        response = served.post(RESPONSES, **{"input": "Hi", **body}, stream=stream)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
        assert served.telemetry.next_record().outcome == Outcome.REJECTED


@pytest.mark.parametrize(
    "body",
    [
        {"background": False, "truncation": "auto", "service_tier": "auto", "safety_identifier": "x"},
        {"prompt_cache_key": "k", "max_tool_calls": 2, "n": 1, "stream_options": None, "tool_choice": "auto"},
        {"include": ["reasoning.encrypted_content"], "conversation": None, "prompt": None},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
)
def test_what_changes_nothing_is_accepted(served: Served, body: dict[str, Any]) -> None:
    assert served.post(RESPONSES, **{"input": "Hi", **body}).status_code == 200


def test_another_model_is_not_found(served: Served) -> None:
    response = served.post(RESPONSES, input="Hi", model="gpt-9")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_calls_cannot_be_forced_where_none_are_read(serve: Serve) -> None:
    served = serve(template=CHATML, tool_call_parser="none")
    response = served.post(RESPONSES, input="Hi", tools=TOOLS, tool_choice="required")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


# Errors and accounts.


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_is_an_http_error(served: Served, stream: bool) -> None:
    served.engine.script = fails(ContextLengthExceeded(8, 9, None, param="input"))
    response = served.post(RESPONSES, input="Hi", stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "your input resulted in 9 tokens" in error["message"]


def test_an_error_in_a_stream_is_its_last_event(served: Served) -> None:
    served.engine.script = fails(InternalError("The step failed."), "Hel")
    events = streamed(served)
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["error"]["message"] == "The step failed."
    (item,) = last["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hel")
    assert served.http.get(f"{RESPONSES}/{last['response']['id']}").status_code == 404
    assert served.telemetry.next_record().outcome == Outcome.FAILED


def test_a_client_that_leaves_stores_nothing(served: Served) -> None:
    served.engine.script = starts("Hel")
    with served.http.stream("POST", RESPONSES, json={"input": "Hi", "stream": True}) as response:
        lines = response.iter_lines()
        first = next(lines)
        response_id = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
    assert first == "event: response.created"
    served.engine.aborted.get(timeout=5)
    assert served.telemetry.next_record().outcome == Outcome.CANCELLED
    assert served.http.get(f"{RESPONSES}/{response_id}").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_accounted_for_like_every_other_request(serve: Serve, stream: bool) -> None:
    served = serve(**WITH_CALLS)
    served.engine.script = says(CALL)
    response = served.post(RESPONSES, input="Hi", tools=TOOLS, stream=stream, max_output_tokens=9)
    record = served.telemetry.next_record()
    assert (record.operation, record.http_route, record.outcome) == ("responses", RESPONSES, Outcome.FINISHED)
    assert record.response_id is not None
    assert record.response_id in response.text
    assert record.conversation_id == record.response_id
    assert record.finish_reasons == ("stop",)
    assert record.params == {"max_tokens": 9}
    assert dict(record.tool_calls) == {"called": 1}
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (3, 2, 1)
    assert served.telemetry.records.empty()


def test_the_end_of_a_stream_has_the_timings_if_they_are_asked_for(served: Served) -> None:
    events = streamed(served, stream_options={"include_timings": True})
    assert set(events[-1]["timings"]["phases_ns"]) >= {"receive", "queue", "decode"}
