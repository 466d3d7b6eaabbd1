"""Strict tools on the three routes that have them: which grammar an answer gets, and which calls are read."""

import json
from typing import Any

import pytest

from oaiserve.engine.request import Grammar
from tests.routes.asking import CHAT, MESSAGES, REQUIRED, RESPONSES, ROUTES, tool
from tests.routes.doubles import says
from tests.routes.test_foreign_tools import asked, names_called
from tests.serving import Serve, Served

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
CALL = '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'
SWAPPED = '<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>'
AUTO: dict[str, Any] = {CHAT: "auto", RESPONSES: "auto", MESSAGES: {"type": "auto"}}
NONE: dict[str, Any] = {CHAT: "none", RESPONSES: "none", MESSAGES: {"type": "none"}}


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve(template="{{ tools }}{{ messages }}<tool_call>", script=says(CALL))


def grammar_of(served: Served, route: str, *tools: dict[str, Any], **body: Any) -> Grammar | None:
    return asked(served, route, *tools, **body)[2].params.grammar


@pytest.mark.parametrize("route", ROUTES)
def test_only_calls_of_strict_tools_have_a_grammar(served: Served, route: str) -> None:
    tools = [tool(route, "f", SCHEMA, strict=True), tool(route, "g", SCHEMA), tool(route, "h", SCHEMA, strict=False)]
    grammar = grammar_of(served, route, *tools)
    assert grammar is not None
    assert (list(json.loads(grammar.text)["schemas"]), bool(grammar.leads), grammar.param) == (["f"], True, "tools")
    assert grammar_of(served, route, *tools, tool_choice=AUTO[route]) == grammar
    assert grammar_of(served, route, *tools, tool_choice=NONE[route]) is None
    assert grammar_of(served, route, *tools[1:]) is None
    forced = grammar_of(served, route, *tools, tool_choice=REQUIRED[route])
    assert forced is not None
    assert forced.leads == ()


@pytest.mark.parametrize("route", ROUTES)
def test_call_out_of_the_grammars_sight_is_not_read(served: Served, route: str) -> None:
    strict = tool(route, "f", SCHEMA, strict=True)
    free = tool(route, "f", SCHEMA)
    for text, expected in ((CALL, ["f"]), (SWAPPED, [])):
        served.engine.script = says(text)
        assert names_called(route, asked(served, route, strict)[0]) == expected
        assert names_called(route, asked(served, route, free)[0]) == ["f"]


def test_json_answer_may_be_a_call_that_obeys(served: Served) -> None:
    tools = [tool(CHAT, "f", SCHEMA, strict=True), tool(CHAT, "g", SCHEMA)]
    grammar = grammar_of(served, CHAT, *tools, response_format={"type": "json_object"})
    assert grammar is not None
    schemas = json.loads(grammar.text)["schemas"]
    assert (schemas["f"]["required"], schemas["g"]) == (["n"], {"type": "object"})


def test_strict_tool_is_not_called_in_text_by_another_grammar(served: Served) -> None:
    body = {"structured_outputs": {"regex": ".*"}}
    answer, _, request = asked(served, CHAT, tool(CHAT, "f", SCHEMA, strict=True), **body)
    assert answer["choices"][0]["message"]["content"] == CALL
    assert request.params.grammar is not None
    assert request.params.grammar.kind == "regex"


@pytest.mark.plugin("responses")
def test_response_repeats_what_the_client_said_of_strictness(served: Served) -> None:
    tools = [tool(RESPONSES, "f", SCHEMA, strict=True), tool(RESPONSES, "g", SCHEMA)]
    assert [each["strict"] for each in asked(served, RESPONSES, *tools)[0]["tools"]] == [True, None]
