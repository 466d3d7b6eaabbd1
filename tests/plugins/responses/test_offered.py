"""Tests the tools of /v1/responses besides plain functions: namespaces, custom tools, and those that OpenAI hosts."""

import json
from base64 import b64encode
from typing import Any

import pytest

from oaiserve.engine.request import ChatPrompt, Request
from oaiserve.facts.record import ToolCallOutcome
from tests.plugins.responses.asking import STOP, WITH_CALLS, ask, streamed
from tests.routes.asking import HYBRID, THOUGHT, submitted
from tests.routes.doubles import says
from tests.serving import Serve, Served

AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "Start one.", "strict": False, "parameters": {}},
        {"type": "function", "name": "stop"},
    ],
}
LARK = 'start: "*** Begin" /[a-z]+/'
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
HELD = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}
SEARCH = {"type": "web_search", "external_web_access": False}
# As a coding agent sends them, in its order.
OF_AN_AGENT = [STOP, AGENTS, SEARCH, HELD]


def last_request(served: Served) -> tuple[Request, ChatPrompt]:
    while served.engine.submitted.qsize() > 1:
        served.engine.submitted.get()
    return submitted(served)


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve(template=HYBRID)


def test_the_model_knows_joined_names_and_inputs_and_none_of_the_hosted_tools(served: Served) -> None:
    answer = ask(served, tools=OF_AN_AGENT)
    _, prompt = last_request(served)
    shown = [(tool["function"]["name"], tool["function"].get("description")) for tool in prompt.tools]
    assert shown == [
        ("stop", None),
        ("agents__spawn", "Other agents.\nStart one."),
        ("agents__stop", None),
        ("apply_patch", f"Edit files.\nThe input follows this Lark grammar:\n{LARK}"),
    ]
    assert answer["ignored_tools"] == ["web_search"]
    assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace", "custom"]
    assert served.telemetry.next_record().tool_calls == {ToolCallOutcome.LEFT_OUT: 1}
    assert "ignored_tools" not in ask(served, tools=[STOP])


def test_hosted_tools_alone_are_like_no_tools(served: Served) -> None:
    assert ask(served, tools=[SEARCH])["ignored_tools"] == ["web_search"]
    assert list(last_request(served)[1].tools) == []


def test_a_call_in_a_namespace_has_its_own_name_in_the_answer_and_the_joined_one_in_the_prompt(served: Served) -> None:
    served.engine.script = says(call_of("agents__spawn", task="x"))
    (call,) = ask(served, tools=OF_AN_AGENT)["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents", "spawn")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "started"}
    ask(served, tools=OF_AN_AGENT, input=[{"role": "user", "content": "Hi"}, call, output])
    _, prompt = last_request(served)
    assert prompt.messages[1]["tool_calls"][0]["function"]["name"] == "agents__spawn"


def test_a_custom_call_is_streamed_as_its_input_and_read_back(served: Served) -> None:
    patch = '*** Begin "x"\n\\ é'
    served.engine.script = says(*call_of("apply_patch", input=patch))
    events = streamed(served, tools=OF_AN_AGENT)
    call = events[-1]["response"]["output"][0]
    assert {key: call[key] for key in ("type", "name", "input", "status")} == {
        "type": "custom_tool_call",
        "name": "apply_patch",
        "input": patch,
        "status": "completed",
    }
    place = {"item_id": call["id"], "output_index": 0}
    assert [event for event in events if "item_id" in event] == [
        {"type": "response.custom_tool_call_input.delta", **place, "delta": patch},
        {"type": "response.custom_tool_call_input.done", **place, "input": patch},
    ]
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    ask(served, tools=OF_AN_AGENT, input=[{"role": "user", "content": "Hi"}, call, output])
    _, prompt = last_request(served)
    function = prompt.messages[1]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("apply_patch", {"input": patch})
    assert prompt.messages[2] == {"role": "tool", "content": "done", "tool_call_id": call["call_id"]}


@pytest.mark.parametrize("arguments", [{}, {"input": 3}, {"path": "x"}])
def test_a_custom_call_without_an_input_has_the_arguments_instead(served: Served, arguments: dict[str, Any]) -> None:
    served.engine.script = says(call_of("apply_patch", **arguments))
    assert ask(served, tools=[PATCH])["output"][0]["input"] == json.dumps(arguments)


@pytest.mark.parametrize(
    "choice",
    [{"type": "custom", "name": "apply_patch"}, {"type": "allowed_tools", "mode": "required", "tools": [HELD]}],
)
@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_forced_custom_call_with_a_grammar_is_held_to_it(served: Served, choice: dict[str, Any], syntax: str) -> None:
    served.engine.script = says("So.</think>\n", "*** Begin", ' "ab"', "\n")
    tool = {**PATCH, "format": {"type": "grammar", "syntax": syntax, "definition": LARK}}
    events = streamed(served, tools=[STOP, tool], tool_choice=choice)
    grammar = last_request(served)[0].params.grammar
    assert (grammar.kind, grammar.text) == (syntax, LARK)
    _, call = events[-1]["response"]["output"]
    assert (call["type"], call["input"], call["status"]) == ("custom_tool_call", '*** Begin "ab"\n', "completed")


def test_a_custom_tool_of_any_text_is_forced_like_a_function(serve: Serve) -> None:
    served = serve(**WITH_CALLS)
    ask(served, tools=[PATCH], tool_choice="required")
    assert last_request(served)[0].params.grammar.kind == "lark_with_schemas"


def test_reasoning_comes_back_by_its_encoded_form(served: Served) -> None:
    served.engine.script = says(*THOUGHT)
    thought, message = ask(served, include=["reasoning.encrypted_content"])["output"]
    assert thought["encrypted_content"] == "oaiserve:" + b64encode(b"I think.").decode()
    del thought["content"]
    ask(served, input=[{"role": "user", "content": "Hi"}, thought, message])
    assert last_request(served)[1].messages[1]["reasoning"] == "I think."
    served.engine.script = says(*THOUGHT)
    assert "encrypted_content" not in ask(served)["output"][0]
