"""Tests how reasoning is split from the answer proper."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.dialects.hermes import HermesCalls
from oaiserve.routes.dialects.reasoning import THINK, ReasoningMode, ThinkingParser
from oaiserve.routes.dialects.segments import Content, Reasoning
from tests.routes.dialects.reading import TOOLS, Read, cut, cuts, read, segments_of


def parser(*, is_open: bool, with_calls: bool = False) -> AnswerReader:
    mode = ReasoningMode(THINK, is_open)
    if not with_calls:
        return AnswerReader(ThinkingParser(mode), None)
    return AnswerReader(ThinkingParser(mode, partial(HermesCalls, TOOLS)), HermesCalls(TOOLS))


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nWell.\n</think>\n\nYes.", False, "Well.\n", "Yes."),
        ("<think>\nWell.\n</think>\n\nYes.", True, "Well.\n", "Yes."),
        ("Well.</think>Yes.", True, "Well.", "Yes."),
        ("Well.</think>Yes.", False, "", "Well.</think>Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("</think>Yes.", True, "", "Yes."),
        (" Yes. <think>No.</think>", False, "", " Yes. <think>No.</think>"),
        ("<think>Well, <b>", False, "Well, <b>", ""),
        ("Well", True, "Well", ""),
        ("<think>a</think>b</think>c", True, "a", "b</think>c"),
        ("<thi", False, "", "<thi"),
        ("<thi", True, "<thi", ""),
        ("", True, "", ""),
    ],
)
def test_reasoning_ends_with_its_mark(text: str, is_open: bool, reasoning: str, content: str) -> None:
    assert read(segments_of(parser(is_open=is_open), [text])) == Read(content, reasoning)
    assert read(segments_of(parser(is_open=is_open), text)) == Read(content, reasoning)


GEMMA = ("<|channel>thought", "<channel|>")
KIMI = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")


@pytest.mark.parametrize(
    ("tags", "text", "reasoning", "content"),
    [
        (GEMMA, "<|channel><|channel>thought\nx<channel|>Hello", "x", "Hello"),
        (GEMMA, "<|channel> <|channel>\n<|channel>thought\nx<channel|>Hello", "x", "Hello"),
        (GEMMA, "<|channel>thought\n<|channel><|channel>thought\nx<channel|>Hello", "x", "Hello"),
        (GEMMA, "<|channel><|channel>final", "", "<|channel><|channel>final"),
        (GEMMA, "<|channel>thought<|channel>x<channel|>", "<|channel>x", ""),
        (GEMMA, "<|channel><|channel>", "", "<|channel><|channel>"),
        (THINK, "<think>\n<think>\n<b>x</think>y", "<b>x", "y"),
        (THINK, "<think><think></think>y", "", "y"),
        (("[THINK]", "[/THINK]"), "[THINK][THINK]x[/THINK]y", "x", "y"),
        (KIMI, "<|open|><|open|>think<|sep|><|sep|>\nx <|sep|><|close|>think<|sep|>y", "x <|sep|>", "y"),
        (KIMI, "<|sep|>x", "", "<|sep|>x"),
    ],
)
def test_a_repeated_opening_tag_is_neither_reasoning_nor_content(
    tags: tuple[str, str], text: str, reasoning: str, content: str
) -> None:
    for num_at_once in range(1, len(text) + 1):
        pieces = [text[begin : begin + num_at_once] for begin in range(0, len(text), num_at_once)]
        reader = AnswerReader(ThinkingParser(ReasoningMode(tags, is_open=False)), None)
        assert read(segments_of(reader, pieces)) == Read(content, reasoning)


def test_many_opening_tags_are_read_once_each() -> None:
    num_tags = 20_000
    thinking = ThinkingParser(ReasoningMode(THINK, is_open=False))
    assert thinking.push("<think>" * num_tags + "x</think>y") == ("x", "y")
    assert thinking.end == num_tags * len("<think>") + len("x</think>")


def test_reasoning_is_held_back_only_while_it_may_be_a_mark() -> None:
    reader = parser(is_open=False)
    assert reader.push("<thi") == []
    assert reader.push("nk> a") == [Reasoning("a")]
    assert reader.push(" <") == [Reasoning(" ")]
    assert reader.push("b> </thi") == [Reasoning("<b> ")]
    assert reader.push("nk>") == []
    assert reader.push("\n") == []
    assert reader.push("c\n") == [Content("c\n")]


def test_calls_are_found_behind_the_reasoning_only() -> None:
    call = '<tool_call>{"name": "add"}</tool_call>'
    result = read(segments_of(parser(is_open=True, with_calls=True), [f"So {call}?</think>\n\n{call}"]))
    assert result == Read("", f"So {call}?", [("add", "{}")])


CALL = '<tool_call>{"name": "add"}</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"I add.\n{CALL}", Read("", "I add.\n", [("add", "{}")])),
        (f"{CALL}\n{CALL}\n", Read("", "", [("add", "{}"), ("add", "{}")])),
        (f"I {CALL} and. {CALL}", Read(" and. ", "I ", [("add", "{}"), ("add", "{}")])),
        (f"Or <tool_call>? {CALL}", Read("", "Or <tool_call>? ", [("add", "{}")])),
        (f"{CALL} Done.", Read(" Done.", "", [("add", "{}")])),
        (f"So {CALL} or {CALL}?</think>{CALL}", Read("", f"So {CALL} or {CALL}?", [("add", "{}")])),
        (f"{CALL}</think>Yes.", Read("Yes.", CALL)),
        (CALL[:-15], Read("", CALL[:-15])),
    ],
)
def test_calls_in_unclosed_reasoning_end_it(text: str, expected: Read) -> None:
    reader = parser(is_open=True, with_calls=True)
    assert read(segments_of(reader, [text])) == expected
    assert reader.thinking is not None
    assert text[: reader.thinking.end].removesuffix("</think>") == expected.reasoning
    for at in range(1, len(text)):
        assert read(segments_of(parser(is_open=True, with_calls=True), [text[:at], text[at:]])) == expected
    assert read(segments_of(parser(is_open=True, with_calls=True), text)) == expected


def test_a_cut_call_in_unclosed_reasoning_stays_reasoning() -> None:
    for text in (CALL, CALL[:-15]):
        assert read(segments_of(parser(is_open=True, with_calls=True), [text], is_cut=True)) == Read("", text)


SNIPPETS = st.sampled_from(["<think>", "</think>", "<thi", "</", "nk>", " ", "\n", "text", "<", "é", CALL, CALL[:20]])


@given(
    text=st.lists(SNIPPETS | st.text(max_size=3), max_size=10).map("".join),
    places=cuts(),
    is_open=st.booleans(),
    is_cut=st.booleans(),
)
def test_the_parts_do_not_depend_on_the_pieces(text: str, places: list[int], is_open: bool, is_cut: bool) -> None:
    at_once, in_pieces, by_character = (parser(is_open=is_open, with_calls=True) for _ in range(3))
    segments = segments_of(at_once, [text], is_cut=is_cut)
    assert segments_of(in_pieces, cut(text, places), is_cut=is_cut) == segments
    assert segments_of(by_character, text, is_cut=is_cut) == segments
    ends = {reader.thinking.end for reader in (at_once, in_pieces, by_character) if reader.thinking is not None}
    assert len(ends) == 1
    (end,) = ends
    result = read(segments)
    if result.calls:
        return
    assert text[end:].lstrip() == result.content.lstrip()
    assert text[:end].endswith("</think>") or not result.content or not end
