"""Tests which dialect of calls and reasoning a server chooses: by flags, by what is declared, by the chat template."""

import doctest
import json
from dataclasses import replace
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from oaiserve.config import OptionError
from oaiserve.engine.text.template_abilities import Abilities
from oaiserve.routes import dialects
from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.chat.template_gaps import prompt_with_tools
from oaiserve.routes.dialects.dialect import Dialect, dialect_of
from oaiserve.routes.dialects.families import FAMILIES, check_name
from oaiserve.routes.dialects.families.hermes import HERMES
from oaiserve.routes.dialects.families.llama import LLAMA
from oaiserve.routes.dialects.families.pythonic import LFM2
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


def dialect(
    source: str, declared: dict[str, Any] | None = None, calls: str = "auto", reasoning: str = "auto"
) -> Dialect:
    template = FakeTemplate(source)
    template.response_template = declared or {}
    return dialect_of(calls, reasoning, template, {"[THINK]": 7, "<|call|>": 8, "<|/call|>": 9})


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
    assert dialect('<|start_header_id|>{"parameters": ', {"fields": {"tool_calls": field}}).calls is LLAMA
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
    chosen = Dialect(LFM2, abilities=Abilities(calls=False))
    prompt = prompt_with_tools([asking, result], tools, chosen)
    written = 'I add.\n<|tool_call_start|>[add(text="x", a=None)]<|tool_call_end|>'
    assert prompt.messages == [{"role": "assistant", "content": written}, result]
    assert prompt.tools == tools


def test_call_in_the_description_of_the_dialects_is_read_as_it_says() -> None:
    results = doctest.testmod(dialects)
    assert (results.attempted >= 6, results.failed) == (True, 0)


@pytest.mark.parametrize("name", ["auto", "none", *sorted({family.name for family in FAMILIES})])
def test_each_dialect_can_be_chosen_by_its_name(name: str) -> None:
    check_name(name)


def test_the_dialect_of_a_plugin_can_be_chosen_by_its_name() -> None:
    owl = replace(HERMES, name="owl", signs=("<owl>",))
    check_name("owl", [owl])
    assert dialect_of("owl", "none", FakeTemplate(""), {}, [owl]).calls is owl
    with pytest.raises(OptionError, match="must be one of auto, none, .*, owl"):
        check_name("crow", [owl])


def test_unknown_dialect_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="--tool-call-parser is 'hermis', but must be one of auto, none, apertus, .*"):
        check_name("hermis")
