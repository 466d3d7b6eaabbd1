"""Tests which dialect of calls and reasoning a server chooses: by flags, by what is declared, by the chat template."""

import doctest
import json
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from transformers.utils.chat_parsing import parse_response

from oaiserve.config import OptionError
from oaiserve.engine.text.template_abilities import Abilities
from oaiserve.routes import dialects
from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.chat.template_gaps import prompt_with_tools
from oaiserve.routes.dialects.dialect import Dialect, check_name, dialect_of
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.hermes import HERMES
from oaiserve.routes.dialects.reasoning import ThinkingParser
from tests.routes.dialects.reading import TOOLS, read, segments_of
from tests.routes.doubles import FakeTemplate

DECLARED: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "[THINK]", "close": "[/THINK]"},
        "tool_calls": {
            "open": "<|call|>",
            "close": "<|/call|>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|end|>"},
    },
}


OWL = replace(HERMES, name="owl", signs=("<owl>",), rank=0)


def dialect(
    source: str, declared: dict[str, Any] | None = None, calls: str = "auto", reasoning: str = "auto"
) -> Dialect:
    template = FakeTemplate(source)
    template.response_template = declared or {}
    return dialect_of(calls, reasoning, template, {"[THINK]": 7, "<|call|>": 8, "<|/call|>": 9}, lambda: [[OWL]])


def test_declared_marks_are_read_as_transformers_reads_them() -> None:
    chosen = dialect("", DECLARED)
    assert chosen.calls is not None
    assert chosen.reasoning is not None
    call = {"name": "add", "arguments": {"a": 1}}
    text = f"[THINK]One and one.[/THINK]I add.<|call|>{json.dumps(call)}<|/call|><|call|>{json.dumps(call)}<|/call|>"
    parser = AnswerReader(ThinkingParser(chosen.reasoning.of_request({})), chosen.calls.parser(TOOLS))
    result = read(segments_of(parser, text))
    message = parse_response(text, DECLARED, prefix="")
    assert (result.reasoning, result.content) == (message["thinking"], message["content"])
    assert [{"name": name, "arguments": json.loads(arguments)} for name, arguments in result.calls] == [
        call["function"] for call in message["tool_calls"]
    ]
    assert chosen.visible_ids(calls=True, reasoning=True) == {7, 8, 9}
    assert chosen.visible_ids(calls=True, reasoning=False) == {8, 9}


@pytest.mark.parametrize(
    "change",
    [
        {"content": "xml-inline"},
        {"content_args": {"unquoted_keys": True}},
        {"close": ["<|/call|>", "<|end|>"]},
        {"open": None, "open_pattern": "<.call.>"},
    ],
)
def test_what_cannot_be_passed_on_as_it_comes_is_left_to_the_chat_template(change: dict[str, Any]) -> None:
    field = {**DECLARED["fields"]["tool_calls"], **change}
    assert dialect("<owl>", {"fields": {"tool_calls": field}}).calls is OWL
    assert dialect("", {"fields": []}).calls is HERMES


def test_flags_come_before_what_is_declared() -> None:
    chosen = dialect("", DECLARED, calls="hermes", reasoning="none")
    assert (chosen.calls, chosen.reasoning) == (HERMES, None)
    chosen = dialect("", DECLARED, calls="none", reasoning="qwen3")
    assert chosen.calls is None
    assert chosen.reasoning is not None
    assert chosen.reasoning.tags == ("<think>", "</think>")


def test_calls_of_a_history_are_text_where_only_they_have_no_place_in_the_template() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"text": "x", "a": null}'}}
    asking = {"role": "assistant", "content": "I add.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "2"}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    lark = replace(HERMES, name="lark", in_text=lambda calls: "; ".join(map(" ".join, calls)))
    chosen = Dialect(lark, abilities=Abilities(calls=False))
    prompt = prompt_with_tools([asking, result], tools, chosen)
    written = 'I add.\nadd {"text": "x", "a": null}'
    assert prompt.messages == [{"role": "assistant", "content": written}, result]
    assert prompt.tools == tools


def test_call_in_the_description_of_the_dialects_is_read_as_it_says() -> None:
    results = doctest.testmod(dialects)
    assert (results.attempted >= 6, results.failed) == (True, 0)


def test_the_dialect_of_a_plugin_can_be_chosen_by_its_name() -> None:
    check_name("owl", [[OWL]])
    assert dialect("", calls="owl").calls is OWL
    with pytest.raises(OptionError, match="--tool-call-parser is 'crow', but must be one of auto, none, hermes, owl."):
        check_name("crow", [[OWL]])


def test_dialects_of_plugins_that_were_loaded_later_come_first_unless_their_rank_is_higher() -> None:
    def chosen(name: str, rank: int = 0) -> CallFamily | None:
        later = replace(OWL, rank=rank)
        calls = dialect_of(name, "none", FakeTemplate("<owl>" if name == "auto" else ""), {}, lambda: [[OWL], [later]])
        return calls.calls

    assert chosen("auto") is not OWL
    assert chosen("owl") is not OWL
    assert chosen("auto", rank=1) is OWL


def test_dialects_are_asked_for_only_where_calls_are_read() -> None:
    def families() -> NoReturn:
        raise AssertionError("no calls are read")

    for calls, template in (("none", FakeTemplate("")), ("auto", None)):
        assert dialect_of(calls, "auto", template, {}, families).calls is None
