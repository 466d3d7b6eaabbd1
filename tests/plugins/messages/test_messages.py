"""Tests /v1/messages and its count of tokens: prompts that are those of chat, answers, streams, and errors."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from oaiserve.engine.request import ChatPrompt, FinishReason, Request
from oaiserve.errors import APIError, ContextLengthExceeded, InternalError, Overloaded, Unavailable
from oaiserve.facts.record import Outcome, ToolCallOutcome
from tests.routes import asking
from tests.routes.asking import (
    CALL,
    CHATML,
    HI,
    HYBRID,
    MESSAGES,
    PARAMETERS,
    PIECES,
    THOUGHT,
    ZONE,
    answered,
    chatted,
    refused,
)
from tests.routes.doubles import fails, says
from tests.serving import Serve, Served

COUNT = f"{MESSAGES}/count_tokens"
TIME = {"name": "get_time", "description": "The time.", "input_schema": PARAMETERS}
STOP = {"name": "stop", "type": "custom", "input_schema": {"type": "object", "properties": {}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
TOOLS = [TIME, STOP]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "get_time", "description": "The time.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
USE = {"type": "tool_use", "name": "get_time", "input": {"zone": "utc"}}
BROKEN = '<tool_call>\n{"name": "get_time", "arguments": {"zone": utc}}\n</tool_call>'
# Of the prompt's three tokens, two are in the prefix cache.
USAGE = {"input_tokens": 1, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 0, "output_tokens": 2}
CUT = '<tool_call>\n{"name": "get_time", "arguments": {"zo'


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def tool(name: str) -> dict[str, str]:
    return {"type": "tool", "name": name}


def ask(served: Served, **body: Any) -> dict[str, Any]:
    return answered(served.post(MESSAGES, **{"model": "org/demo", "messages": HI, "max_tokens": 64, **body}))


def streamed(served: Served, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, except pings."""
    response = served.post(MESSAGES, **{"model": "org/demo", "messages": HI, "max_tokens": 64, "stream": True, **body})
    assert response.status_code == 200, response.text
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    named = [block.split("\n") for block in blocks]
    events = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name for name, _ in named] == [f"event: {event['type']}" for event in events]
    return [event for event in events if event["type"] != "ping"]


def gathered(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of a stream, and check that the blocks come one after the other."""
    message = events[0]["message"]
    blocks = []
    is_open = False
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            blocks.append(event["content_block"])
        assert event["index"] == len(blocks) - 1
        is_open = event["type"] != "content_block_stop"
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            block = blocks[-1]
            kind = delta.pop("type").removesuffix("_delta")
            assert kind in ("input_json", "signature", block["type"])
            if kind == "input_json":
                block["input"] = json.loads(delta["partial_json"])
            else:
                block[kind] += delta[kind]
    assert not is_open
    return {**message, "content": blocks, **events[-2]["delta"], "usage": events[-2]["usage"]}


def submitted(served: Served, **body: Any) -> tuple[Request, ChatPrompt]:
    ask(served, **body)
    return asking.submitted(served)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    assert message["id"].startswith("msg_")
    blocks = [{**block} for block in message["content"]]
    ids = [block.pop("id") for block in blocks if block["type"] == "tool_use"]
    assert all(each.startswith("toolu_") for each in ids)
    assert len(ids) == len(set(ids))
    return {**message, "id": "msg", "content": blocks}


# The answer.


def test_a_whole_answer_has_the_documented_shape(served: Served) -> None:
    assert without_ids(ask(served)) == {
        "id": "msg",
        "type": "message",
        "diagnostics": None,
        "role": "assistant",
        "model": "org/demo",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
    }
    record = served.telemetry.next_record()
    assert (record.operation, record.http_route, record.outcome) == ("messages", MESSAGES, Outcome.FINISHED)


def test_a_stream_has_exactly_these_events(serve: Serve) -> None:
    served = serve(template=HYBRID, script=says("<think>", "Hm", "</think>", "Well. ", *PIECES))
    events = streamed(served, tools=TOOLS, stream_options={"include_timings": True})
    assert [events[0]["message"][name] for name in ("content", "stop_reason")] == [[], None]
    assert [events[0]["message"]["usage"][f"{name}input_tokens"] for name in ("", "cache_read_")] == [1, 2]
    assert events[-2].pop("timings").keys() > {"cached_tokens"}
    usage = {**USAGE, "output_tokens": 10, "output_tokens_details": {"thinking_tokens": 3}}

    def of_block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
        place = {"type": "content_block_delta", "index": index}
        return [
            {"type": "content_block_start", "index": index, "content_block": start},
            *({**place, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": index},
        ]

    signed = {"type": "signature_delta", "signature": ""}
    call = {**USE, "id": events[8]["content_block"]["id"], "input": {}}
    assert events[1:] == [
        *of_block(0, thought(""), {"type": "thinking_delta", "thinking": "Hm"}, signed),
        *of_block(1, said(""), {"type": "text_delta", "text": "Well. "}),
        *of_block(2, call, {"type": "input_json_delta", "partial_json": ZONE}),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize(
    ("text", "blocks", "reason"),
    [
        ("", [], "end_turn"),
        ("Hello there", [said("Hello there")], "end_turn"),
        (f"<think>\nI think.</think>\n\nYes {CALL}\n{CALL}", [thought("I think."), said("Yes "), USE, USE], "tool_use"),
        (f"So: {BROKEN} end", [said(f"So: {BROKEN} end")], "end_turn"),
        ('Yes.\n```json\n{"name": "get_time", "arguments": {"zone": "utc"}}\n```', [said("Yes.\n"), USE], "tool_use"),
        (f"{CALL} {BROKEN}", [USE, said(f" {BROKEN}")], "tool_use"),
        (f"So: {CUT}", [said(f"So: {CUT}")], "max_tokens"),  # the answer was cut within a call
        ("<think>I th", [thought("I th")], "max_tokens"),
    ],
)
def test_a_stream_gathers_to_the_whole_answer_wherever_it_is_cut_in_pieces(
    serve: Serve, text: str, blocks: list[dict[str, Any]], reason: str
) -> None:
    served = serve(template=HYBRID)
    finish = FinishReason.LENGTH if reason == "max_tokens" else FinishReason.STOP
    for pieces in (list(text) or [""], *([text[:at], text[at:]] for at in range(0, len(text), 3))):
        served.engine.script = says(*pieces, finish=finish)
        body = {"tools": TOOLS, "max_tokens": len(pieces)}
        whole = without_ids(ask(served, **body))
        assert (whole["content"], whole["stop_reason"]) == (blocks, reason)
        assert without_ids(gathered(streamed(served, **body))) == whole
        calls = [served.telemetry.next_record().tool_calls.get(ToolCallOutcome.CALLED, 0) for _ in range(2)]
        assert calls == [blocks.count(USE)] * 2


@pytest.mark.parametrize(
    ("script", "max_tokens", "expected"),
    [
        (says("a", "b", finish=FinishReason.LENGTH), 2, ("max_tokens", None)),
        (says("a", "b", finish=FinishReason.LENGTH), 3, ("model_context_window_exceeded", None)),
        (says("a", stop_reason="END"), 9, ("stop_sequence", "END")),
        (says("a", stop_reason=7), 9, ("end_turn", None)),
        (says(CALL, stop_reason="END"), 9, ("tool_use", None)),
    ],
)
def test_the_reason_why_it_stops(serve: Serve, script: Any, max_tokens: int, expected: tuple[str, str | None]) -> None:
    served = serve(template=HYBRID, script=script)
    body = {"max_tokens": max_tokens, "tools": TOOLS}
    for answer in (ask(served, **body), gathered(streamed(served, **body))):
        assert (answer["stop_reason"], answer["stop_sequence"]) == expected


def test_reasoning_is_left_out_where_it_is_not_to_be_shown(serve: Serve) -> None:
    served = serve(template=HYBRID, script=says(*THOUGHT))
    answer = ask(served, thinking={"type": "adaptive", "display": "omitted"})
    assert answer["content"] == [said("Yes.")]
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": 7}


# The prompt.


def test_a_request_is_that_of_chat(serve: Serve) -> None:
    served = serve(template=HYBRID)
    common = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3}
    turns = [
        {"role": "user", "content": [{**said("Hi"), "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{**thought("Hm."), "signature": "x"}, said("Wait."), {**USE, "id": "1"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "12:00"}]},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone":"utc"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Wait.", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "12:00"},
    ]
    ours, our_prompt = submitted(
        served, **common, system="Be brief.", messages=turns, tools=TOOLS, stop_sequences=["END"], service_tier="auto"
    )
    chats, prompt = chatted(served, **common, messages=messages, tools=CHAT_TOOLS, stop=["END"])
    assert (our_prompt, ours.params) == (prompt, chats.params)


def test_results_come_before_the_text_beside_them_and_turns_in_a_row_are_one(served: Served) -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [said("no")], "is_error": True},
        {"type": "tool_result", "tool_use_id": "2"},
    ]
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {**USE, "id": "1"}]},
        {"role": "assistant", "content": [{**USE, "id": "2", "name": "stop", "input": {}}]},
        {"role": "user", "content": [said("And?"), *results]},
        {"role": "system", "content": "Now be brief."},
    ]
    _, prompt = submitted(served, messages=turns, tools=TOOLS)
    one, other, *rest = prompt.messages
    assert one["content"] == [said("a"), said("b")]
    assert [call["id"] for call in other["tool_calls"]] == ["1", "2"]
    assert rest == [
        {"role": "tool", "content": "Error: no", "tool_call_id": "1"},
        {"role": "tool", "content": "", "tool_call_id": "2"},
        {"role": "user", "content": "And?"},
        {"role": "system", "content": "Now be brief."},
    ]
    assert prompt.add_generation_prompt


def test_a_last_turn_of_the_assistant_is_continued(served: Served) -> None:
    _, prompt = submitted(served, messages=[*HI, {"role": "assistant", "content": "It "}])
    assert prompt.messages[-1]["content"] == "It "
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


def test_a_count_is_that_of_the_prompt_and_waits_its_turn(served: Served) -> None:
    body = {"system": "Be brief.", "messages": HI, "model": "org/demo", "tools": TOOLS, "max_tokens": 3}
    response = served.post(COUNT, **body)
    assert response.json() == {"input_tokens": len(served.engine.tokenizer.encode(submitted(served, **body)[1]))}
    assert not served.engine.turns.empty()
    refused(served.post(COUNT, messages=HI, model="other"), "model", "does not exist", status=404)
    refused(
        served.post(COUNT, model="org/demo", messages=[{"role": "user", "content": "x" * 300_000}]),
        "messages",
        "at most 262144",
    )


# Tools and reasoning.


@pytest.mark.parametrize(
    ("choice", "chats"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"parallel_tool_calls": False}),
        ({"type": "any"}, {"tool_choice": "required"}),
        (tool("stop"), {"tool_choice": {"type": "function", "function": {"name": "stop"}}}),
        ({"type": "none"}, {"tool_choice": "none"}),
    ],
)
def test_a_choice_is_that_of_chat(serve: Serve, choice: dict[str, Any], chats: dict[str, Any]) -> None:
    served = serve(template=HYBRID, script=says(CALL))
    ours, our_prompt = submitted(served, tools=[SEARCH, *TOOLS], tool_choice=choice)
    others, prompt = chatted(served, tools=CHAT_TOOLS, **chats)
    assert (ours.params.grammar, our_prompt.tools) == (others.params.grammar, prompt.tools)
    assert our_prompt.template_kwargs == prompt.template_kwargs


def test_a_forced_call_is_always_told_as_one(serve: Serve) -> None:
    served = serve(template=CHATML, script=says(CALL))
    answer = ask(served, tools=TOOLS, tool_choice=tool("get_time"))
    assert (without_ids(answer)["content"], answer["stop_reason"]) == ([USE], "tool_use")
    served.engine.script = says(CUT, finish=FinishReason.LENGTH)
    answer = ask(served, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=1)
    assert (answer["content"], answer["stop_reason"]) == ([said(CUT)], "max_tokens")


@pytest.mark.parametrize(
    ("template", "thinking", "kwargs", "budget"),
    [
        (HYBRID, {"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}, 1024),
        (HYBRID, {"type": "disabled"}, {"enable_thinking": False}, None),
        (HYBRID, {"type": "adaptive"}, {"reasoning_effort": "low"}, 1024),
        (HYBRID, None, {"reasoning_effort": "low"}, 1024),
        (asking.OPEN, {"type": "disabled"}, {}, 0),  # there is no switch
    ],
)
def test_thinking_is_the_switch_of_the_template(
    serve: Serve, template: str, thinking: dict[str, Any] | None, kwargs: dict[str, Any], budget: int | None
) -> None:
    effort = {"output_config": {"effort": "low"}} if "reasoning_effort" in kwargs else {}
    request, prompt = submitted(serve(template=template), thinking=thinking, max_tokens=2000, **effort)
    assert prompt.template_kwargs == kwargs
    assert request.params.reasoning.budget == budget


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_a_format_is_a_grammar(served: Served, name: str) -> None:
    output_format = {"type": "json_schema", "schema": PARAMETERS}
    request, _ = submitted(served, **{name: output_format if name == "output_format" else {"format": output_format}})
    assert (request.params.grammar.kind, json.loads(request.params.grammar.text)) == ("json_schema", PARAMETERS)


# Errors.


IMAGE = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": [IMAGE]}, "messages", "the model 'org/demo' reads text alone, no images"),
        ({"messages": []}, "messages", "at least one turn"),
        ({"model": None}, "model", "must be a string"),
        ({"thinking": {"type": "enabled"}}, "thinking", "'thinking.budget_tokens': is required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking", "must be >= 1024, got 1023"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking", "must be < max_tokens (8), got 2000"),
        ({"compaction": {"type": "summarize"}}, "compaction", "is not available"),
        ({"tools": [{"input_schema": {}}]}, "tools", "'tools[0].name': is required"),
        ({"max_tokens": None}, "max_tokens", "must be an integer"),
        ({"n": 2}, "n", "one answer"),
        ({"output_config": {"effort": "enormous"}}, "output_config", "'output_config.effort': must be 'high', "),
        ({"stop": "x"}, "stop", "use 'stop_sequences'"),
        ({"stop_sequences": [""]}, "stop_sequences", "must not be empty"),
        ({"tools": [{"name": "x"}]}, "tools", "'tools[0].input_schema': is required"),
        (
            {"tools": [SEARCH, {**TIME, "input_schema": {"type": "string"}, "strict": True}]},
            "tools",
            "input_schema.type",
        ),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice", "of the type 'web_search_20250305'"),
        ({"tools": [SEARCH, TIME], "tool_choice": tool("web_search")}, "tool_choice", "only Anthropic"),
        ({"tools": TOOLS, "tool_choice": tool("x")}, "tool_choice", "no tool with the name 'x'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "only allowed with 'tools'"),
    ],
)
def test_what_is_refused(served: Served, body: dict[str, Any], param: str, words: str) -> None:
    refused(served.post(MESSAGES, **{"model": "org/demo", "messages": HI, "max_tokens": 8, **body}), param, words)


def test_budget_of_a_turn_with_several_answers_may_be_more_than_max_tokens(serve: Serve) -> None:
    served = serve(template=HYBRID)
    body = {"model": "org/demo", "messages": HI, "max_tokens": 8}
    thinking = {"type": "enabled", "budget_tokens": 2000}
    headers = {"anthropic-beta": "other,interleaved-thinking-2025-05-14"}
    answered(served.http.post(MESSAGES, headers=headers, json={**body, "thinking": thinking}))
    assert asking.submitted(served)[0].params.reasoning.budget == 2000


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_threads_are_refused_so_that_sdks_send_the_whole_conversation(served: Served, thread: dict[str, str]) -> None:
    body = {"model": "org/demo", "messages": HI, "thread": thread}
    for response in (served.post(COUNT, **body), served.post(MESSAGES, **body, max_tokens=8, stream=True)):
        check_form(response, 400, "invalid_request_error")
        assert response.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert ask(served, thread=None)["content"]


def check_form(response: httpx.Response, status: int, kind: str) -> None:
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), body
    assert body["request_id"] == response.headers["x-request-id"] == response.headers["request-id"]
    assert body["error"]["message"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Overloaded("full", retry_after_seconds=1), "rate_limit_error"),
        (Unavailable("gone"), "overloaded_error"),
        (InternalError("bug"), "api_error"),
        (ContextLengthExceeded(8, 9, param="messages"), "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_form(served: Served, error: APIError, kind: str) -> None:
    served.engine.script = fails(error)
    response = served.post(MESSAGES, model="org/demo", messages=HI, max_tokens=8)
    check_form(response, error.status, kind)
    assert response.json()["error"]["message"].startswith("prompt is too long: ") == (kind == "invalid_request_error")
    served.engine.script = fails(error, "a")
    *_, last = streamed(served)
    assert (last["type"], last["error"]["type"]) == ("error", kind)
    served.engine.submit_error = error
    check_form(served.post(COUNT, model="org/demo", messages=HI), error.status, kind)


def test_errors_from_outside_the_routes_have_it_too(serve: Serve) -> None:
    served = serve(api_key=("one",), body_limit=1000)
    headers = {"x-api-key": "one", "anthropic-version": "2023-06-01", "anthropic-beta": "any"}
    for path in (MESSAGES, COUNT):
        check_form(served.post(path), 401, "authentication_error")
        check_form(served.http.post(path, headers={"x-api-key": "two"}), 401, "authentication_error")
        check_form(served.http.post(path, headers=headers | {"origin": "http://evil.example"}), 403, "permission_error")
        check_form(served.http.get(path, headers=headers), 405, "invalid_request_error")
        check_form(served.http.post(f"{path}/x", headers=headers), 404, "not_found_error")
        check_form(served.http.post(path, headers=headers, content=b" " * 1001), 413, "request_too_large")
        check_form(served.http.post(path, headers=headers, content=b"{"), 400, "invalid_request_error")
    answer = served.http.post(MESSAGES, headers=headers, json={"model": "org/demo", "messages": HI, "max_tokens": 8})
    assert answer.json()["content"][0]["text"] == "Hello world"
