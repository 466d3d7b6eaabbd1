"""Tests the texts that a structural tag allows, by the format's kind, and the features that are refused by name."""

import json
from typing import Any

import pytest

from oaiserve.engine.request import Grammar
from oaiserve.engine.turn_workers import at_once
from oaiserve.errors import InvalidRequest
from oaiserve.routes.bodies import CompletionBody
from oaiserve.routes.constraints import grammar
from oaiserve.routes.protocol import parse
from tests.engine.grammars.plain import EOS, ids, make_grammars

Fields = dict[str, Any]


def form(kind: str, **fields: Any) -> Fields:
    return {"type": kind, **fields}


def text(value: str) -> Fields:
    return form("const_string", value=value)


def tag(begin: str, content: Fields, end: Any) -> Fields:
    return form("tag", begin=begin, content=content, end=end)


ANY = form("any_text")
NUMBER = form("json_schema", json_schema={"type": "integer"}, style="json", any_order=False)
CALLS = [tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", form("regex", pattern="x+"), "</f>")]
TRIGGERED = form("triggered_tags", triggers=["<f="], tags=CALLS)
OLD = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"enum": ["x", "y"]}, "end": "</f>"},
        {"begin": "[", "schema": {"type": "boolean"}, "end": ""},
    ],
    "triggers": ["<f=", "["],
}


def asked(**fields: Any) -> Any:
    return grammar(at_once(parse(CompletionBody, json.dumps({"prompt": "Hi", **fields}).encode())))


def constraint(**tag: Any) -> Grammar:
    return asked(response_format={"type": "structural_tag", **tag})


class Allowed:
    """Which texts a constraint allows: as the beginning of an answer, and as a whole one."""

    def __init__(self, constraint: Grammar) -> None:
        self._compiled = make_grammars().compile(constraint)

    def begins(self, text: str, *then: int) -> bool:
        token_ids = [*ids(text), *then]
        return self._compiled.matcher().num_possible(token_ids) == len(token_ids)

    def is_whole(self, text: str) -> bool:
        return self.begins(text, EOS)


@pytest.mark.parametrize(
    ("format", "whole", "wrong"),
    [
        (text("a b"), ["a b"], ["", "a", "a bc"]),
        (NUMBER, ["12"], ["x", "1.5"]),
        (form("grammar", grammar='root ::= "yes" | "no" root'), ["yes", "nonoyes"], ["no", "yesyes"]),
        (form("regex", pattern="[a-c]+"), ["abc"], ["", "d"]),
        (ANY, ["", "a\nb"], []),
        (form("any_text", excludes=["bad", "a/b"]), ["ba d", "a/"], ["a bad", "a/b"]),
        (form("sequence", elements=[text("n="), NUMBER, text("!")]), ["n=5!"], ["n=!", "n=5"]),
        (tag("", form("sequence", elements=[text("n="), ANY]), "END"), ["n=a bEND", "n=END"], ["n=a", "n=aENDb"]),
        (tag("<", form("or", elements=[NUMBER, ANY]), ">"), ["<a>", "<1>"], ["<a", "1>"]),
        (form("or", elements=[text("a"), tag("<", ANY, ">")]), ["a", "<b>"], ["b", "<b", "a<b>"]),
        (form("or", elements=[text("a"), form("sequence", elements=[text("b"), ANY])]), ["a", "bcd"], ["ac"]),
        (form("optional", content=text("a")), ["", "a"], ["aa"]),
        (form("plus", content=text("a")), ["a", "aa"], [""]),
        (form("star", content=tag("<", ANY, ">")), ["", "<a><>"], ["<a", "a"]),
        (form("repeat", content=text("a"), min=1, max=2), ["a", "aa"], ["", "aaa"]),
        (form("repeat", content=text("a"), min=2, max=-1), ["aa", "aaaa"], ["a"]),
        (tag("<a>", ANY, ["</a>", "</b>"]), ["<a></a>", "<a><b></b>"], ["<a>", "<a></a> "]),
        (tag("", NUMBER, ""), ["7"], [""]),
        (TRIGGERED, ["", "see <f=a>1</f>, <f=b>xx</f> so", "<f"], ["<f=c", "<f=a>x", "<f=b>x</"]),
        (TRIGGERED | {"at_least_one": True}, ["<f=a>1</f>", "<f=b>x</f> so <f=a>2</f>"], ["", "a<f=a>1</f>"]),
        (TRIGGERED | {"stop_after_first": True}, ["", "a <f=a>1</f>", "a"], ["<f=a>1</f> ", "<f=c"]),
        (TRIGGERED | {"at_least_one": True, "stop_after_first": True}, ["<f=a>1</f>"], ["", "<f=a>1</f><f=a>1</f>"]),
        (TRIGGERED | {"excludes": ["no"]}, ["n <f=a>1</f> o"], ["a no", "<f=a>1</f>no"]),
        (tag("<c>", TRIGGERED, "</c>"), ["<c>a<f=a>1</f>b</c>", "<c></c>"], ["<c>a", "<c></c>a", "<c><f=c"]),
        (form("tags_with_separator", tags=CALLS, separator=", "), ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>x</f>"], ["a"]),
        (form("tags_with_separator", tags=CALLS, separator="", at_least_one=True), ["<f=a>1</f><f=b>x</f>"], [""]),
        (form("tags_with_separator", tags=CALLS, separator=",", stop_after_first=True), ["", "<f=a>1</f>"],
         ["<f=a>1</f>,<f=a>1</f>"]),
        (form("sequence", elements=[tag("<think>", ANY, "</think>"), TRIGGERED]), ["<think>a</think> b<f=a>1</f>"],
         ["a", "<think>a"]),
        (form("triggered_tags", triggers=["<"], tags=[tag("<o>", TRIGGERED, "</o>")]), ["a<o>b<f=a>1</f></o>c"],
         ["<f=a>1</f>"]),
    ],
)  # fmt: skip
def test_each_format_allows_what_it_is_of(format: Fields, whole: list[str], wrong: list[str]) -> None:
    allowed = Allowed(constraint(format=format))
    assert [one for one in whole if not allowed.is_whole(one)] == []
    assert [one for one in wrong if allowed.is_whole(one)] == []


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("Hi <f", True),
        ("Hi <f=a>", True),
        ('\n<f=a>12</f> and <f=b>"x"</f>, [true] [', True),
        ("<f=c", False),
        ("<f=a>x", False),
        ("<f=a>12<f", False),
        ('[true] <f=b>"z', False),
    ],
)
def test_each_trigger_of_the_older_form_begins_a_structure(text: str, is_allowed: bool) -> None:
    assert Allowed(constraint(**OLD)).begins(text) == is_allowed


def test_the_form_of_structured_outputs_is_the_same_as_json_or_as_an_object() -> None:
    tag_of_body = {"type": "structural_tag", "format": TRIGGERED}
    for value in (tag_of_body, json.dumps(tag_of_body)):
        result = asked(structured_outputs={"structural_tag": value})
        assert (result.kind, result.text) == ("structural_tag", constraint(format=TRIGGERED).text)


def nested(depth: int) -> Fields:
    return ANY if depth == 0 else tag("<", nested(depth - 1), ">")


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        ({}, "'response_format': must have 'format', or 'structures' and 'triggers'"),
        ({"format": ANY, **OLD}, "must have 'format', or"),
        ({"structures": OLD["structures"]}, "must have 'format', or"),
        ({**OLD, "triggers": ["<g="]}, "the tag '<f=a>', which must begin with a trigger"),
        ({**OLD, "triggers": [""]}, "the tag '<f=a>', which must begin with a trigger"),
        ({"format": form("token", token=5)}, "'response_format.format.type': must be 'any_text', 'const_string'"),
        ({"format": form("sequence", elements=[form("any_tokens")])}, "format.elements[0].type': must be"),
        ({"format": tag("<", form("dispatch", rules=[]), ">")}, "got 'dispatch'"),
        ({"format": {**tag("", ANY, ""), "begin": form("token", token=5)}}, "format.begin': must be a string"),
        ({"format": NUMBER | {"style": "qwen_xml"}}, "format.style': must be 'json', got 'qwen_xml'"),
        ({"format": NUMBER | {"any_order": True}}, "format.any_order': invalid enum value True"),
        ({"format": ANY | {"max_tokens": 5}}, "format.max_tokens': is not supported"),
        ({"format": form("const_string")}, "of the type 'const_string' without the field"),
        ({"format": form("or", elements=[])}, "'or' without the field"),
        ({"format": form("sequence", elements=[ANY, NUMBER])}, "'any_text' where nothing shows its end"),
        ({"format": form("star", content=TRIGGERED)}, "'triggered_tags' where nothing shows its end"),
        ({"format": form("repeat", content=NUMBER, min=2, max=1)}, "counts may be up to 10000"),
        ({"format": nested(31)}, "more than 500 formats, or 30 within each other"),
        ({"format": form("or", elements=[ANY] * 500)}, "more than 500 formats"),
        ({"format": text("a" * 2**18)}, "more than 262144 characters"),
        ({"format": form("json_schema", json_schema={"not": {}})}, "in the schema 1 of the structural tag"),
        ({"format": form("grammar", grammar='a ::= "b"')}, "no rule 'root'"),
        ({"format": form("regex", pattern="(")}, "the regex has a '(' without"),
    ],
)  # fmt: skip
def test_what_cannot_be_obeyed_is_refused_by_its_name(tag: Fields, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Allowed(constraint(**tag))
    assert refused.value.param == "response_format"
    assert says in refused.value.message


def test_the_largest_tags_are_compiled_in_a_moment() -> None:
    deep = nested(30)
    many = form("triggered_tags", triggers=["<"], tags=[tag(f"<{n}>", NUMBER, f"</{n}>") for n in range(249)])
    within = tag("<f=a>", NUMBER, "</f>")
    for _ in range(13):  # each comes twice in the grammar, so they are rules
        within = tag("<f=a>", form("triggered_tags", triggers=["<f="], tags=[within]), "</f>")
    for format in (deep, many, within):
        assert Allowed(constraint(format=format)).begins("<")
