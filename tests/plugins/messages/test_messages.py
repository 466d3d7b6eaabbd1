"""Tests the requests of /v1/messages and its count of tokens: prompts that are those of chat, and errors."""

import json
from typing import Any

import httpx
import pytest

from oaiserve.engine.request import ChatPrompt, Request
from oaiserve.errors import APIError, ContextLengthExceeded, InternalError, Overloaded, Unavailable
from tests.plugins.messages.asking import COUNT, TIME, TOOLS, USE, ask, said, streamed, thought, tool
from tests.routes import asking
from tests.routes.asking import CALL, HI, HYBRID, MESSAGES, PARAMETERS, answered, chatted, refused
from tests.routes.doubles import fails, says
from tests.serving import Serve, Served

SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "get_time", "description": "The time.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


def submitted(served: Served, **body: Any) -> tuple[Request, ChatPrompt]:
    ask(served, **body)
    return asking.submitted(served)


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
