"""Tools that clients pass on for others: what is odd about them is read leniently, and named in a header."""

import json
import re
from typing import Any

import pytest

from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.request import Grammar, Request
from oaiserve.routes.adaptations import HEADER
from oaiserve.routes.chat.constraints import MOST_REMEMBERED, not_obeyed
from oaiserve.routes.dialects.hermes import HERMES
from tests.engine.text.tokenizers_for_tests import byte_level
from tests.routes.asking import BODIES, CHAT, REQUIRED, RESPONSES, ROUTES, answered, submitted, tool
from tests.routes.doubles import says
from tests.serving import Serve, Served


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve(template="{{ tools }}{{ messages }}<tool_call>")


def asked(served: Served, route: str, *tools: dict[str, Any], **body: Any) -> tuple[Any, str, Request]:
    """Return the answer, the header of adaptations, and the request that reached the engine."""
    response = served.post(route, **{**BODIES[route], "tools": list(tools), **body})
    return answered(response), response.headers.get(HEADER, ""), submitted(served)[0]


def shown(request: Request) -> list[dict[str, Any]]:
    return [each["function"] for each in request.prompts[0].tools]  # type: ignore[union-attr]


def names_called(route: str, answer: Any) -> list[str]:
    if route == CHAT:
        calls = answer["choices"][0]["message"].get("tool_calls", [])
        return [call["function"]["name"] for call in calls]
    parts = answer["output"] if route == RESPONSES else answer["content"]
    return [part["name"] for part in parts if part["type"] in ("function_call", "tool_use")]


@pytest.mark.parametrize("route", ROUTES)
def test_long_names_and_many_tools_are_taken_as_they_are(served: Served, route: str) -> None:
    names = ["1st", "-x", "x" * 128, *(f"mcp__{'server_' * 16}{number}" for number in range(1000))]
    _, header, request = asked(served, route, *(tool(route, name, {"type": "object"}) for name in names))
    assert [each["name"] for each in shown(request)] == names
    assert header == ""


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["fs/read file", "github:issues.list", "größe", "a b", "a\nb"])
def test_name_with_odd_characters_has_others_for_the_model_only(served: Served, route: str, name: str) -> None:
    tools = [tool(route, each, {"type": "object"}) for each in ("a_b", name, name.replace("/", ":"))]
    _, header, request = asked(served, route, *tools)
    _, known, *_ = [each["name"] for each in shown(request)]
    assert re.fullmatch("[A-Za-z0-9_.-]+", known)
    assert len({each["name"] for each in shown(request)}) == len({name, name.replace("/", ":"), "a_b"})
    assert "shown to the model in other characters" in header
    assert name not in header
    served.engine.script = says(f'<tool_call>{{"name": "{known}", "arguments": {{}}}}</tool_call>')
    answer, _, _ = asked(served, route, *tools)
    assert names_called(route, answer) == [name]


def test_history_has_the_names_that_the_model_knows(served: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "fs/read", "arguments": "{}"}}
    messages = [
        *BODIES[CHAT]["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "fs/read", "content": "x"},
    ]
    _, _, request = asked(served, CHAT, tool(CHAT, "fs/read"), messages=messages)
    _, calling, result = request.prompts[0].messages  # type: ignore[union-attr]
    assert calling["tool_calls"][0]["function"]["name"] == result["name"] == shown(request)[0]["name"] == "fs_read"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("parameters", "as_shown", "note"),
    [
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}, ""),
        ({"type": "string"}, {"type": "object"}, "type: read as 'object'"),
        ({"type": ["object", "null"]}, {"type": "object"}, ""),
        ({"properties": None}, {"type": "object", "properties": {}}, "properties: left out, as it is no object"),
        (
            {"properties": {"a": "string", "b": True}},
            {"type": "object", "properties": {"a": {}, "b": True}},
            "properties: what is no schema is read as any value",
        ),
        ({"required": "a"}, {"type": "object"}, "required: left out, as it is no list of names"),
    ],
)
def test_odd_schema_is_shown_as_one_of_an_object(
    served: Served, route: str, parameters: Any, as_shown: Any, note: str
) -> None:
    _, header, request = asked(served, route, tool(route, "f", parameters))
    assert shown(request)[0]["parameters"] == as_shown
    assert header.endswith(note) if note else header == ""


@pytest.mark.parametrize("route", ROUTES)
def test_second_tool_of_a_name_is_left_out(served: Served, route: str) -> None:
    first = tool(route, "f", {"type": "object"})
    other = tool(route, "f", {"properties": {}})
    _, header, request = asked(served, route, first, first, other)
    assert (len(shown(request)), header) == (
        1,
        f"tools[2]{'.function' if route == CHAT else ''}: left out, as an earlier tool has its name",
    )


ODD = {
    "type": "object",
    "properties": {
        "when": {"type": "string", "format": "duration-ish"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "contains": {"const": "x"}},
        "slug": {"type": "string", "pattern": "^a(?!x)$"},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["kind"],
    "not": {"required": ["nothing"]},
    "if": {"required": ["when"]},
    "then": {"required": ["tags"]},
}


@pytest.mark.parametrize("route", ROUTES)
def test_forced_call_obeys_what_can_be_obeyed_unless_the_tool_is_strict(served: Served, route: str) -> None:
    tools = [tool(route, "plain", {"properties": {"kind": {"enum": ["a"]}}}), tool(route, "odd", ODD)]
    _, header, request = asked(served, route, *tools, tool_choice=REQUIRED[route])
    assert request.params.grammar is not None
    assert json.loads(request.params.grammar.text)["lenient"] == ["plain", "odd"]
    for keyword in ("not", "if", "format", "uniqueItems", "contains", "pattern"):
        assert f"'{keyword}' is not enforced" in header
    _, header, request = asked(
        served, route, tools[0], tool(route, "odd", ODD, strict=True), tool_choice=REQUIRED[route]
    )
    assert request.params.grammar is not None
    assert json.loads(request.params.grammar.text)["lenient"] == ["plain"]
    assert header == ""
    assert asked(served, route, *tools)[1] == "", "nothing is enforced where nothing is forced"


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        ({}, ""),
        ({"additionalProperties": False}, "tools[0].function.parameters: 'required' is not enforced"),
        ({"properties": {"stale": False}}, "tools[0].function.parameters: 'required' is not enforced"),
    ],
)
def test_tool_that_requires_a_property_it_lacks_may_be_forced(served: Served, more: Any, noted: str) -> None:
    odd = tool(CHAT, "odd", {"properties": {"kind": {"enum": ["a"]}}, "required": ["kind", "stale"], **more})
    _, header, request = asked(served, CHAT, odd, tool_choice="required")
    assert header == noted
    assert request.params.grammar is not None
    schemas = json.loads(request.params.grammar.text)["schemas"]
    grammar = Grammar("lark_with_schemas", HERMES.grammar(schemas, only_one=True, special_ids={}), "tools")
    backend = byte_level()
    ends = frozenset([backend.token_to_id("<|im_end|>")])
    Grammars(backend, vocab_size=backend.get_vocab_size(), eos_token_ids=ends).compile(grammar)


@pytest.mark.plugin("dialects")
def test_all_of_many_tools_may_be_called_in_the_form_of_the_dialect() -> None:
    from oaiserve.plugins.dialects.xml import QWEN_CODER

    schemas = {f"tool_{number}": {"type": "object", "properties": {"a": {"type": "string"}}} for number in range(1000)}
    grammar = json.loads(QWEN_CODER.grammar(schemas, only_one=True, special_ids={}))
    assert grammar["lark"].count("<function=tool_") == 1000
    assert '"name' not in grammar["lark"], "one form of each is enough: llguidance has a limit"


@pytest.mark.plugin("responses")
def test_notes_name_the_tool_by_its_place_in_the_request(served: Served) -> None:
    odd = {"type": "function", "name": "f", "parameters": {"type": "string"}}
    namespace = {"type": "namespace", "name": "n", "tools": [tool(RESPONSES, "g"), odd]}
    tools = [{"type": "web_search"}, tool(RESPONSES, "ok"), namespace, {**odd, "name": "h"}]
    _, header, _ = asked(served, RESPONSES, *tools)
    places = ("tools[2].tools[1]", "tools[3]")
    read = [f"{place}.parameters.type: read as 'object'" for place in places]
    assert header == "; ".join(["tools[0]: a tool that runs elsewhere is left out", *read])


@pytest.mark.parametrize(("length", "is_kept"), [(10, True), (MOST_REMEMBERED, False)])
def test_long_schemas_are_not_remembered(served: Served, length: int, is_kept: bool) -> None:
    before = not_obeyed.cache_info().misses
    schema = {"type": "object", "not": {"const": length}, "description": "a" * length}
    _, header, _ = asked(served, CHAT, tool(CHAT, "odd", schema), tool_choice="required")
    assert "'not' is not enforced" in header
    assert not_obeyed.cache_info().misses - before == is_kept
