"""Tests answers that transformers' parser reads, by a response template that the checkpoint or a file declares."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oaiserve.engine.text.response_template import (
    MOST_OF_SEARCHED_CALL,
    BadResponseTemplate,
    read_response_template,
    response_form,
)
from oaiserve.errors import StartupError
from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.dialects.declared import family_of_template
from oaiserve.routes.dialects.dialect import dialect_of
from oaiserve.routes.dialects.hermes import HERMES
from oaiserve.routes.dialects.segments import Content, Segment, joined
from tests.nesting import TOO_DEEP
from tests.routes.dialects.reading import TOOLS, read, segments_of
from tests.routes.doubles import FakeTemplate, says
from tests.serving import Serve

TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open_pattern": r"<\|think(?:ing)?\|>", "close": "<|/think|>"},
        "tool_calls": {
            "open_pattern": r"<\|call\|>(?P<name>\w+)\n",
            "close": "<|/call|>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</>"},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|end|>"},
    },
}
JSON_CALLS = {
    "open": ["<call>", "<tool>"],
    "close": "</call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
CALL = "<|call|>add\n<a>1</><text>two\nlines</><|/call|>"
ARGUMENTS = {"a": 1, "text": "two\nlines"}


def reader(template: dict[str, Any] = TEMPLATE, *, only_one: bool = False) -> AnswerReader:
    family = family_of_template(response_form(template))
    return AnswerReader(None, family.parser(TOOLS, only_one=only_one))


def with_calls(**field: Any) -> dict[str, Any]:
    return {"start_anchor": "a", "fields": {"tool_calls": {**JSON_CALLS, **field}}}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_text_reasoning_and_calls_are_the_same_in_pieces_of_any_size(size: int) -> None:
    text = f"<|thinking|>One and\none.<|/think|>I add a<b.\n{CALL}\n{CALL}\n Done.<|end|>"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]

    result = read(segments_of(reader(), pieces))

    assert (result.reasoning, result.content) == ("One and\none.", "I add a<b.\n\n Done.")
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == [("add", ARGUMENTS)] * 2


def test_text_streams_and_a_call_comes_at_its_end() -> None:
    parser = reader()

    assert parser.push("Half a sen") == [Content("Half a sen")]
    assert parser.push("tence <") == [Content("tence ")]
    assert parser.push(CALL[1:-1]) == []
    assert read(parser.push(CALL[-1:])).calls == [("add", json.dumps(ARGUMENTS))]


@pytest.mark.parametrize(
    "broken",
    [
        "<call>{'a': 1}</call>",
        '<call>{"name": "add"}</call>',
        "<tool>[1, 2]</call>",
        '<call>{"name": "no", "arguments": {}}</call>',
        '<call>{"name": "add", "arguments": {"a": NaN}}</call>',
        r'<call>{"name": "add", "arguments": {"a": "\ud800"}}</call>',
        f"<call>{'[' * 20000}</call>",
        f"<call>{'a' * 70000}</call>",
    ],
)
def test_a_broken_call_stays_text_and_the_next_is_read(broken: str) -> None:
    good = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
    parser = reader(with_calls())

    result = read(segments_of(parser, ["So: ", broken, good, "end"]))

    assert result.content == f"So: {broken}end"
    assert result.calls == [("add", '{"a": 1}')]
    assert parser.calls is not None
    assert parser.calls.num_unparsed == 1


def test_a_cut_call_is_text_and_one_without_its_last_tag_is_read() -> None:
    unclosed = CALL.removesuffix("<|/call|>")
    assert read(segments_of(reader(), [f"I add.{unclosed}"], is_cut=True)).content == f"I add.{unclosed}"
    assert read(segments_of(reader(), [unclosed])).calls == [("add", json.dumps(ARGUMENTS))]
    assert read(segments_of(reader(), ["a<|cal"])).content == "a<|cal"
    assert read(segments_of(reader(), ["<|think|>a<|/th"], is_cut=True)).reasoning == "a<|/th"


def test_a_call_without_an_end_is_bounded_and_becomes_text() -> None:
    text = "<|call|>add\n" + "<a>" * MOST_OF_SEARCHED_CALL
    parser = reader()
    segments: list[Segment] = parser.push(text)
    assert sum(len(segment.text) for segment in joined(segments) if isinstance(segment, Content)) > len(text) - 100


def test_the_first_call_is_the_last_where_only_one_is_allowed() -> None:
    result = read(segments_of(reader(only_one=True), [CALL, CALL, " Well?"]))
    assert (len(result.calls), result.content) == (1, "")


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"open_pattern": "(a+)+b"}, "is not supported from"),
        ({"open_pattern": "<.*.*.*>"}, "could take very long"),
        ({"open_pattern": "<" + "a?" * 30 + ">"}, "could take very long"),
        ({"open_pattern": r"(\w)\1"}, "is not supported from"),
        ({"open_pattern": "(?:a|a)(?:a|a)(?:a|a)(?:a|a)(?:a|a)(?:a|a)(?:a|a)b"}, "could take very long"),
        ({"open_pattern": "<(?:a|aa)(?:a|aa)(?:a|aa).*?x"}, "could take very long"),
        ({"open_pattern": "x*"}, "matches the empty text"),
        ({"open_pattern": "x" * 501}, "has 501 characters"),
        ({"open_pattern": "(?P<n>a"}, "cannot read it"),
        ({"open_pattern": "[z-a]*b"}, "cannot read it"),
        ({"content": "xml-inline", "content_args": {"tag_pattern": r"<(?P<key>\w+\s*\w+)>"}}, "could take very long"),
        ({"content_args": [{"tag_pattern": "x"}] * 17}, "17 expressions"),
        ({"content": "html"}, "unknown content parser"),
        ({"open": "x" * 20000}, "longer than"),
    ],
)
def test_hostile_templates_are_refused_at_the_start(field: dict[str, Any], words: str, tmp_path: Path) -> None:
    calls = {**JSON_CALLS, **field}
    if "open_pattern" in field:
        del calls["open"]
    file = tmp_path / "template.json"
    file.write_text(json.dumps({"start_anchor": "a", "fields": {"tool_calls": calls}}))
    with pytest.raises(StartupError, match=f"--response-template is '{file}', which cannot be used.* {words}"):
        read_response_template(file)


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON"), ("[]", "must be an object"), ("{}", "no field")])
def test_files_that_hold_no_template_are_refused(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "template.json"
    with pytest.raises(StartupError, match="cannot be read"):
        read_response_template(file)
    file.write_text(content)
    with pytest.raises(StartupError, match=words):
        read_response_template(file)


def test_the_declaration_is_read_where_no_dialect_fits(caplog: pytest.LogCaptureFixture) -> None:
    def calls_of(source: str, declared: dict[str, Any], parser: str = "auto", file: Any = None) -> Any:
        template = FakeTemplate(source)
        template.response_template = declared
        return dialect_of(parser, "auto", template, {}, lambda: [[owl]], file).calls  # type: ignore[arg-type]

    owl = replace(HERMES, name="owl", signs=("<owl>",))
    assert calls_of("", TEMPLATE).name == "response_template"
    assert calls_of("", TEMPLATE, "hermes") is HERMES
    assert calls_of("", TEMPLATE, "none") is None
    assert calls_of("<owl>", TEMPLATE) is owl
    assert calls_of("<owl>", {}, file=TEMPLATE).name == "response_template"
    with caplog.at_level(logging.WARNING):
        assert calls_of("", with_calls(close=None, close_pattern="(a+)+")) is HERMES
    assert "response template is not used" in caplog.text


def test_special_tokens_of_the_template_stay_visible() -> None:
    template = FakeTemplate("")
    template.response_template = TEMPLATE
    chosen = dialect_of("auto", "auto", template, {"<|call|>": 1, "<|end|>": 2, "<|pad|>": 3})  # type: ignore[arg-type]
    assert chosen.visible_ids(calls=True, reasoning=False) == {1, 2}


def test_transformers_is_not_imported_without_a_template() -> None:
    code = "import sys, oaiserve.routes.dialects.dialect; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.getbasetemp() / "response_template.json"
    path.write_text(json.dumps(TEMPLATE))
    return path


def tool(**options: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "parameters": TOOLS["add"], **options}}


def test_clients_get_calls_whole_and_streamed(serve: Serve, file: Path) -> None:
    script = says("I add.", *CALL, "<|end|>")
    served = serve(template="", script=script, response_template=file)

    choice = served.chat(tools=[tool()]).json()["choices"][0]
    sdk: Any = served.sdk()
    asked = [{"role": "user", "content": "Hi"}]
    chunks = list(sdk.chat.completions.create(model="org/demo", messages=asked, tools=[tool()], stream=True))

    (call,) = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I add.", "tool_calls")
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    streamed = [each.function for delta in deltas for each in delta.tool_calls or ()]
    assert "".join(each.name or "" for each in streamed) == "add"
    assert json.loads("".join(each.arguments or "" for each in streamed)) == ARGUMENTS


def test_required_and_strict_calls_are_refused(serve: Serve, file: Path) -> None:
    served = serve(template="", script=says("I add."), response_template=file)

    for body, param in (({"tool_choice": "required"}, "tool_choice"), ({"tools": [tool(strict=True)]}, "tools")):
        answer = served.chat(**{"tools": [tool()], **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert "response template" in answer.json()["error"]["message"]


def test_a_template_without_calls_is_no_form() -> None:
    with pytest.raises(BadResponseTemplate):
        response_form({"fields": {"content": {}}})


def test_deep_templates_are_read_or_refused() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    deeper = deep
    for _ in range(TOO_DEEP):
        deeper = [deeper]

    assert response_form(with_calls(content_args={"x": deep})).template is not None
    with pytest.raises(BadResponseTemplate, match="nested too deeply|cannot read it"):
        response_form(with_calls(content_args={"x": deeper}))
