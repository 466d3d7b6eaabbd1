"""Tests of what a body's constraint on its answer becomes, whatever the name that the client knows it by."""

import json
from typing import Any

import pytest

from oaiserve.engine.grammars.grammar import GrammarViolation
from oaiserve.engine.request import Grammar
from oaiserve.errors import InvalidRequest
from oaiserve.http.fair_turns import at_once
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.chat.constraints import grammar
from oaiserve.routes.intake.body_types import ChatBody, CompletionBody
from oaiserve.routes.intake.decode import parse
from tests.engine.grammars.plain import make_grammars, pushed

GRAMMARS = make_grammars()

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ä", 1.5, None]}}}
SCHEMA_TEXT = json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":"))
GBNF = 'root ::= "a" | b\nb ::= [0-9]+'
LARK = 'start: "a" | "::="'


def constraint(**fields: Any) -> Grammar | None:
    body = json.dumps({"prompt": "Hi", **fields}).encode()
    return grammar(at_once(parse(CompletionBody, body)), Adaptations().note)


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a-B_1", "schema": SCHEMA, **fields}}


def one(param: str, kind: str, text: str, value: Any, **how: bool) -> Any:
    grammar = Grammar(kind, text, param, **how)  # type: ignore[arg-type]
    return pytest.param({param: value}, grammar, id=f"{param}-{kind}")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        one("response_format", "json_object", "", {"type": "json_object"}),
        one("response_format", "json_object", "", {"type": "json_object", "value": None, "schema": None}),
        one("response_format", "json_schema", SCHEMA_TEXT, {"type": "json_object", "schema": SCHEMA}),
        one("response_format", "json_schema", SCHEMA_TEXT, {"type": "json_object", "value": SCHEMA}),
        one("response_format", "json_schema", SCHEMA_TEXT, {"type": "json", "value": SCHEMA_TEXT}),
        one("response_format", "json_schema", SCHEMA_TEXT, {"type": "json_schema", "value": {"schema": SCHEMA}}),
        one("response_format", "regex", "a+", {"type": "regex", "value": "a+"}),
        one("response_format", "json_schema", SCHEMA_TEXT, {**named(), "value": None}),
        one("response_format", "json_schema", SCHEMA_TEXT, named(strict=True)),
        one("response_format", "json_schema", SCHEMA_TEXT, named(strict=False, description="An."), is_lenient=True),
        one("structured_outputs", "json_schema", SCHEMA_TEXT, {"json": SCHEMA}),
        one("structured_outputs", "json_schema", "{ }", {"json": "{ }", "disable_any_whitespace": False}),
        one("structured_outputs", "json_schema", "{", {"json": "{", "disable_any_whitespace": True}, in_one_line=True),
        one("structured_outputs", "regex", "a+", {"regex": "a+", "choice": None, "structural_tag": None}),
        one("structured_outputs", "choice", '["ä","b"]', {"choice": ["ä", "b"]}),
        one("structured_outputs", "gbnf", GBNF, {"grammar": GBNF}),
        one("structured_outputs", "lark", LARK, {"grammar": LARK, "json_object": False}),
        one("structured_outputs", "json_object", "", {"json_object": True}),
        one("grammar", "gbnf", GBNF, GBNF),
        one("json_schema", "json_schema", SCHEMA_TEXT, SCHEMA),
    ],
)
def test_each_name_of_a_constraint_gives_its_grammar(fields: dict[str, Any], expected: Grammar) -> None:
    assert constraint(**fields) == expected


@pytest.mark.parametrize("form", [{"json_object": True}, {"json": {"type": "object"}}, {"json": '{"type": "object"}'}])
def test_disable_any_whitespace_keeps_json_in_one_line(form: dict[str, Any]) -> None:
    laid_out = constraint(structured_outputs=form)
    in_one_line = constraint(structured_outputs={**form, "disable_any_whitespace": True})
    assert laid_out is not None
    assert in_one_line is not None
    assert pushed(GRAMMARS.compile(laid_out).matcher(), '{\n  "a": [1,2]\n}').is_complete
    assert pushed(GRAMMARS.compile(in_one_line).matcher(), '{"a": [1, 2]}').is_complete
    with pytest.raises(GrammarViolation):
        pushed(GRAMMARS.compile(in_one_line).matcher(), "{\n")


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text", "value": None}}, {"response_format": None}, {"grammar": ""}]
)
def test_no_constraint(fields: dict[str, Any]) -> None:
    assert constraint(**fields) is None


def test_chat_takes_the_same_constraints() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "response_format": named()}).encode()
    assert grammar(at_once(parse(ChatBody, body)), Adaptations().note) == constraint(response_format=named())


@pytest.mark.parametrize(
    ("param", "value", "says"),
    [
        ("response_format", {}, "Missing required parameter: 'response_format.type'"),
        ("response_format", {"type": "json_schema"}, "Missing required parameter: 'response_format.json_schema'"),
        ("response_format", {"type": "regex"}, "Missing required parameter: 'response_format.value'"),
        ("response_format", {"type": "json_object", "schema": {}, "value": SCHEMA}, "got two in 'response_format'"),
        ("response_format", {"type": "json_schema", "schema": {}, "name": "x"}, "'response_format."),
        ("response_format", {"type": "json_object", "strict": True}, "'response_format.strict': is not supported"),
        ("response_format", named(name=None), "'response_format.json_schema.name': must be a string, got null"),
        ("response_format", named(name="a b"), "got 'a b'"),
        ("response_format", named(name="a" * 65), "must have 1 to 64"),
        ("response_format", named(schema=None), "'response_format.json_schema.schema': must be an object, got null"),
        ("response_format", named(schema=[]), "must be an object, got a list"),
        ("response_format", named(strict="yes"), "must be true or false, got a string"),
        ("response_format", named(type="object"), "'response_format.json_schema.type': is not supported"),
        ("response_format", [], "must be an object, got a list"),
        ("structured_outputs", {}, "must have one of json, regex, choice, grammar, json_object, got"),
        ("structured_outputs", {"json": {}, "regex": "a"}, "got json, regex"),
        ("structured_outputs", {"json": 1}, "'structured_outputs.json': must be a string or an object"),
        ("structured_outputs", {"choice": []}, "must be a list of strings that is not empty, got []"),
        ("structured_outputs", {"choice": ["a", 1]}, "must be a string, got an integer"),
        ("structured_outputs", {"regex": ["a"]}, "must be a string"),
        ("structured_outputs", {"json_object": "yes"}, "must be true"),
        ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern': is not"),
        ("structured_outputs", {"json": {}, "disable_additional_properties": True}, "disable_additional_properties"),
        ("response_format", {"type": "structural_tag"}, "got 'structural_tag'. Use a JSON Schema, or a Lark grammar"),
        ("structured_outputs", {"structural_tag": "{}"}, "is not supported. Use a JSON Schema, or a Lark grammar with"),
        ("structured_outputs", {"regex": "a", "other": 1}, "'structured_outputs.other': is not supported"),
        ("guided_choice", ["a"], "Use 'structured_outputs.choice' instead"),
        ("regex", "a+", "Use 'structured_outputs.regex' instead"),
        ("ebnf", GBNF, "Use 'structured_outputs.grammar' instead"),
        ("json_schema", "{}", "must be an object, got a string"),
    ],
)
def test_what_is_no_constraint_is_refused_by_its_name(param: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        constraint(**{param: value})
    assert refused.value.param == param
    assert says in refused.value.message


def test_a_schema_that_is_not_strict_is_obeyed_as_far_as_possible() -> None:
    notes = Adaptations()
    schema = {"type": "object", "properties": {"a": {"type": "integer", "not": {"multipleOf": 2}}}, "required": ["a"]}
    body = json.dumps({"prompt": "Hi", "response_format": named(strict=False, schema=schema)}).encode()
    lenient = grammar(at_once(parse(CompletionBody, body)), notes.note)
    assert lenient is not None
    assert notes.notes == ("response_format: 'not' is not enforced",)
    assert pushed(GRAMMARS.compile(lenient).matcher(), '{"a": 1, "b": 2}').may_end
    with pytest.raises(GrammarViolation):
        pushed(GRAMMARS.compile(lenient).matcher(), '{"b')
    both = {"prompt": "Hi", "response_format": named(strict=False, schema=schema), "json_schema": schema}
    strict_one = grammar(at_once(parse(CompletionBody, json.dumps(both).encode())), notes.note)
    assert strict_one is not None
    assert not strict_one.is_lenient
    for strict in (True, None):
        demanded = constraint(response_format=named(strict=strict, schema=schema))
        assert demanded is not None
        with pytest.raises(InvalidRequest, match="the keyword 'not' at"):
            GRAMMARS.compile(demanded)


def test_one_constraint_may_come_by_two_names_with_the_name_of_a_backend() -> None:
    fields = {"structured_outputs": {"grammar": LARK}, "grammar": LARK, "guided_decoding_backend": "guidance"}
    assert constraint(**fields) == Grammar("lark", LARK, "structured_outputs")


def test_json_stays_in_one_line_if_one_of_two_names_demands_it() -> None:
    structured = {"json": SCHEMA, "disable_any_whitespace": True}
    both = constraint(response_format={"type": "json_object", "schema": SCHEMA}, structured_outputs=structured)
    assert both is not None
    assert both.param == "response_format"
    assert both.in_one_line


def test_two_constraints_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="got 'response_format' and 'structured_outputs'") as refused:
        constraint(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert refused.value.param == "structured_outputs"
