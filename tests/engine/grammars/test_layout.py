"""Tests of how JSON is laid out: blanks, line breaks, and openings that models join with what follows."""

from threading import Thread, current_thread
from typing import Any
from unittest.mock import Mock

import llguidance
import numpy as np
import pytest
from tokenizers import AddedToken

from oaiserve.engine.grammars import grammar as grammar_module
from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.request import Grammar, GrammarKind
from tests.engine.grammars.plain import (
    GRAMMARS,
    VOCAB_SIZE,
    allowed,
    allowed_ids,
    compiled,
    ids,
    is_refused,
    make_grammars,
    mask_of,
    pushed,
)
from tests.engine.text.tokenizers_for_tests import byte_level


def test_json_has_one_blank_after_each_separator_and_no_other_white_space() -> None:
    schema = '{"properties": {"b": {}, "a": {}}, "required": ["a", "b"], "type": "object"}'
    assert pushed(compiled("json_schema", schema).matcher(), '{"b": [1, 2], "a": {"x y": " "}}').is_complete
    for wrong in ('{"b":1', '{"b":  1', '{ "b"', '{"b": [1,2', '{"b": 1,"a"', '{"b": [ 1', '{"b": 1,\n'):
        assert is_refused(wrong, compiled("json_schema", schema).matcher()), wrong
    assert is_refused('{"a": 1', compiled("json_schema", schema).matcher())  # not the order of the schema


def test_a_model_that_begins_a_line_after_the_first_bracket_may_begin_others() -> None:
    schema = '{"properties": {"b": {}, "a": {}}, "required": ["a", "b"], "type": "object"}'
    for answer in (
        '{\n  "b": [\n    1,\n    2\n  ],\n  "a": {}\n}',
        '{\n\t"b": [1, 2], "a": {"x": 1}}',
        '{"b": [1, 2], "a": {"x": 1}}',
    ):
        assert pushed(compiled("json_schema", schema).matcher(), answer).is_complete, answer
    for wrong in ("{\n\n", '{\n"b":1', '{\n"b": 1,"a"', "\n{", "{\n" + 41 * " "):
        assert is_refused(wrong, compiled("json_schema", schema).matcher()), wrong
    one_line = GRAMMARS.compile(Grammar("json_schema", schema, in_one_line=True))
    assert is_refused("{\n", one_line.matcher())


@pytest.mark.parametrize(
    ("text", "may_break"),
    [
        ("{", True),
        ('{\n  "b"', False),
        ('{\n  "b": ', False),
        ('{\n  "b": [', True),
        ('{\n  "b": [1', True),  # before the closing bracket
        ('{\n  "b": [1,', True),
        ('{\n  "b": [1]', False),  # a comma must follow
        ('{\n  "b": [1], "a": 1', True),
        ('{\n  "b": "x', False),
        ('{"b": [', False),
    ],
)
def test_lines_break_only_after_opening_brackets_and_commas_and_before_closing_brackets(
    text: str, may_break: bool
) -> None:
    grammar = compiled("json_schema", '{"properties": {"b": {}, "a": {}}, "required": ["a", "b"], "type": "object"}')
    (line_break,) = ids("\n")
    assert (line_break in allowed(pushed(grammar.matcher(), text))) == may_break
    if "\n" in text:
        rows = np.zeros((len(ids(text)), -(-VOCAB_SIZE // 32)), np.uint32)
        matcher = pushed(grammar.matcher(), "{\n")
        rest = ids(text.removeprefix("{\n"))
        matcher.fill_masks_behind(rest, rows[: len(rest)])
        assert (line_break in allowed_ids(rows[len(rest) - 1])) == may_break


def test_no_draft_is_possible_until_the_layout_is_chosen() -> None:
    matcher = compiled("json_schema", '{"properties": {"b": {}}, "required": ["b"]}').matcher()
    assert matcher.num_possible(ids('{"b": 1}')) == 0
    pushed(matcher, '{"')
    assert matcher.num_possible(ids('b": 1}')) == len(ids('b": 1}'))
    assert matcher.forced_ids()[: len(ids('b"'))] == ids('b"')


def test_indents_are_blanks_or_tabs() -> None:
    schema = '{"properties": {"b": {}}, "required": ["b"]}'
    assert is_refused("{\n \t", compiled("json_schema", schema).matcher())


def test_a_continued_answer_keeps_its_layout() -> None:
    grammar = compiled("json_schema", '{"properties": {"b": {}, "a": {}}, "required": ["a", "b"]}')
    in_lines = grammar.matcher()
    in_lines.begin(b'{\n"b": 1')
    assert pushed(in_lines, ',\n"a": 1').may_end is False
    one_line = grammar.matcher()
    one_line.begin(b'{"b": 1')
    assert is_refused(",\n", one_line)


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        ("json_object", ""),
        ("json_schema", '{"type": "object"}'),
        ("json_schema", '{"type": "object", "additionalProperties": {"type": "array", "items": {}}}'),
    ],
)
def test_an_object_of_the_models_own_names_may_be_laid_out_in_lines(kind: GrammarKind, schema: str) -> None:
    """Models that may not begin a line after the brace write other names than they would."""
    grammar = compiled(kind, schema)
    for answer in (
        '{"a":[1,2]}',
        '{"a": [1, 2], "b": []}',
        '{\n  "a": [\n\t1\n  ],\n  "b": []\n}',
        '{ "a": [] }',
        "{}",
    ):
        assert pushed(grammar.matcher(), answer).is_complete, answer
    for wrong in ("{  ", "{\n\n", "{ \n", "{\n" + 41 * " ", " {"):
        assert is_refused(wrong, grammar.matcher()), wrong


@pytest.mark.parametrize(
    ("pattern", "opening", "is_allowed"),
    [
        (":( a| b)", " ", False),
        (":( a| [0-9])", " ", True),  # no token has a blank and a digit
        (":( a| é)", " ", True),
        (":( a|  b)", " ", True),
        (":( a)? ?", " ", True),  # the text may end after the blank
        (":( a| c)", " ", True),  # no token has a blank and this letter
        (": ", " ", True),
        (r":\[(a|b)\]", "[", False),
        (r":\[[a0]\]", "[", True),
    ],
)
def test_an_opening_is_no_token_of_its_own_where_models_join_it_with_what_follows(
    pattern: str, opening: str, is_allowed: bool
) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken(text, normalized=False) for text in (" a", " b", "[a", "[b")])
    size = backend.get_vocab_size()
    grammars = Grammars(backend, vocab_size=size, eos_token_ids=frozenset([backend.token_to_id("<|im_end|>")]))
    compiled_once = grammars.compile(Grammar("regex", pattern))
    (token_id,) = backend.encode(opening, add_special_tokens=False).ids
    rows = np.full((1, -(-size // 32)), 0xAAAAAAAA, np.uint32)
    compiled_once.matcher().fill_masks_behind(ids(":"), rows)
    for mask in (mask_of(pushed(compiled_once.matcher(), ":"), size), rows[0]):
        assert (token_id in allowed_ids(mask)) == is_allowed


@pytest.mark.parametrize(("layout", "num_compiled"), [('{\n  "b"', 1), ('{"b"', 2)])
def test_json_in_one_line_is_compiled_once_a_model_chooses_it(
    counted: Mock, monkeypatch: pytest.MonkeyPatch, layout: str, num_compiled: int
) -> None:
    monkeypatch.setattr(grammar_module, "MOST_LATER_NS", 10**12)
    grammar = make_grammars().compile(Grammar("json_schema", '{"properties": {"b": {}}, "required": ["b"]}'))
    assert counted.call_count == 1
    for _ in range(2):
        pushed(grammar.matcher(), layout)
    assert counted.call_count == num_compiled


@pytest.mark.parametrize("is_long", [True, False])
def test_no_answer_waits_for_a_layout_that_takes_long(monkeypatch: pytest.MonkeyPatch, is_long: bool) -> None:
    """Both are compiled before the answer begins: those of a long schema beside each other."""
    monkeypatch.setattr(grammar_module, *(("LONG_TEXT", 10) if is_long else ("MOST_LATER_NS", 0)))
    threads: list[Thread] = []
    matcher_of = llguidance.LLMatcher

    def matcher(*args: Any, **options: Any) -> llguidance.LLMatcher:
        compiled = matcher_of(*args, **options)
        threads.append(current_thread())
        return compiled

    monkeypatch.setattr(llguidance, "LLMatcher", matcher)
    grammar = make_grammars().compile(Grammar("json_schema", '{"properties": {"b": {}}, "required": ["b"]}'))
    assert len(threads) == 2
    assert len(set(threads)) == 1 + is_long
    for _ in range(2):
        assert is_refused("\n", pushed(grammar.matcher(), '{"b": {'))
    assert len(threads) == 2


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Count the matchers that are compiled."""
    counting = Mock(side_effect=llguidance.LLMatcher)
    monkeypatch.setattr(llguidance, "LLMatcher", counting)
    return counting
