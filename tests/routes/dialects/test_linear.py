"""The time of parsers grows with the text and not faster, whatever a model writes and however it comes."""

from collections.abc import Callable
from typing import Any

import pytest

from oaiserve.engine.grammars.parts import Leads
from oaiserve.engine.text.detokenize import TokenTable
from oaiserve.routes.answer_reader import AnswerReader
from oaiserve.routes.dialects.dialect import FAMILIES
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.gemma import GEMMA4
from oaiserve.routes.dialects.hermes import HERMES
from oaiserve.routes.dialects.llama import LLAMA4
from oaiserve.routes.dialects.reasoning import THINK, ReasoningMode, ThinkingParser
from oaiserve.routes.dialects.segments import joined
from oaiserve.routes.dialects.xml import QWEN_CODER
from tests.engine.grammars.plain import BACKEND, ids
from tests.growth import cut, is_linear
from tests.routes.dialects.reading import TOOLS, own_form, segments_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "object"}, "b": {"type": "string"}}}
TOOL: dict[str, Any] = {"f": SCHEMA, **TOOLS}


def texts(family: CallFamily) -> dict[str, Callable[[int], str]]:
    """Return texts of about a length, by name: what parsers might search again and again."""
    parser = family.parser
    opening = "".join(parser.opening_tags[-1:]) or ">>>f\n"
    whole = own_form(family, "f", {"a": {"x": 1}})
    begun = whole.partition("x")[0]
    head = begun.rpartition("{")[0]

    def repeated(begin: str, unit: str, end: str = "") -> Callable[[int], str]:
        return lambda size: begin + unit * (size // len(unit)) + end

    def nested(begin: str, end: str) -> Callable[[int], str]:
        return lambda size: begin * (size // len(begin + end)) + end * (size // len(begin + end))

    return {
        "opening tags": repeated("", opening),
        "all opening tags": repeated("", "".join(parser.opening_tags) or opening),
        "almost tags": repeated("", opening[:-1] + "x" if len(opening) > 1 else "x"),
        "beginnings of tags": repeated("", opening[0]),
        "begun calls": repeated("", begun),
        "begun calls in lines": repeated("", begun + "\n"),
        "heads": repeated("", head + "x"),
        "nested calls": nested(begun, "}"),
        "nested brackets": nested(opening + "[f(a=[", ")]"),
        "blanks": repeated("", " "),
        "blanks behind a tag": repeated(opening, " "),
        "blanks and no head": repeated(opening, " " * 50 + "x"),
        "blanks behind calls": repeated(whole, " "),
        "blanks in a value": repeated(begun, " ", "x"),
        "name": repeated(opening, "f"),
        "name in JSON": repeated(opening + '{"name": "', "f"),
        "object in another order": repeated(opening + '{"arguments": {"a": "', "x"),
        "broken object": repeated(opening + '{"arguments": {"a": "', opening, '\n"}}'),
        "brackets": repeated(opening + '{"arguments": ', "["),
        "backslashes": repeated(begun + 'x": "', "\\"),
        "quotes": repeated(begun, '"'),
        "escaped quotes": repeated(begun + 'x": "', '\\"'),
        "apostrophes": repeated(begun, "\\'"),
        "words": repeated(begun, "x "),
        "commas": repeated(begun, ","),
        "keys": repeated(begun, "x:1,"),
        "fences": repeated("", "```json\n"),
        "tools": repeated("", "<tools>"),
        "objects in a fence": repeated("```json\n", '{"name": "f", "arguments": {}}\n', "x"),
        "lines with brackets": repeated("", "\n{"),
        "calls": repeated("", whole + family.separator),
    }


def slow(reader: Callable[[], AnswerReader], of: dict[str, Callable[[int], str]], length: int) -> list[str]:
    """Return the names of the texts that take longer to read, in pieces of a length, than in proportion to theirs."""

    def is_read_in_time(text: Callable[[int], str]) -> bool:
        return is_linear(lambda size: segments_of(reader(), cut(text(size), length)), 700 if length else 3000)

    return [name for name, text in of.items() if not is_read_in_time(text)]


@pytest.mark.parametrize("length", [3, 0])
@pytest.mark.parametrize("family", {family.parser: family for family in FAMILIES}.values(), ids=lambda one: one.name)
def test_reading_calls_takes_linear_time(family: CallFamily, length: int) -> None:
    assert slow(lambda: AnswerReader(None, family.parser(TOOL)), texts(family), length) == []


@pytest.mark.parametrize("length", [3, 0])
@pytest.mark.parametrize("family", [HERMES, GEMMA4, QWEN_CODER, LLAMA4], ids=lambda family: family.name)
def test_reading_calls_in_reasoning_takes_linear_time(family: CallFamily, length: int) -> None:
    mode = ReasoningMode(THINK, is_open=True)

    def reader() -> AnswerReader:
        return AnswerReader(ThinkingParser(mode, lambda: family.parser(TOOL)), None)

    assert slow(reader, texts(family), length) == []


@pytest.mark.parametrize("length", [3, 0])
@pytest.mark.parametrize("unit", [" ", "<", "<think", "</think", "<think>", "<think> <", "x"])
def test_reading_reasoning_takes_linear_time(unit: str, length: int) -> None:
    mode = ReasoningMode(THINK, is_open=False)
    of = {begin: lambda size, begin=begin: begin + unit * (size // len(unit)) for begin in ("", "<think>", "<think>x")}
    assert slow(lambda: AnswerReader(ThinkingParser(mode), None), of, length) == []


@pytest.mark.parametrize("blanks", [" " * 5000, "\n" * 5000])
def test_endless_white_space_is_not_held_back(blanks: str) -> None:
    for family in FAMILIES:
        reader = AnswerReader(None, family.parser(TOOL))
        assert joined(reader.push(blanks)) != []


@pytest.mark.parametrize("unit", [" ", "[", '{"tool_call_id": "', "x"])
@pytest.mark.parametrize("family", {family.parser: family for family in FAMILIES}.values(), ids=lambda one: one.name)
def test_searching_the_leads_of_strict_calls_takes_linear_time(family: CallFamily, unit: str) -> None:
    table = TokenTable(BACKEND)
    leads = tuple(site.lead for site in family.parser.sites)
    begin = '{"tool_call_id": "' if unit == "x" else (*family.parser.opening_tags, "{")[0]

    def search(size: int) -> None:
        leads_in_text = Leads(leads, table, frozenset())
        for token_id in ids(begin + unit * (size // len(unit))):
            leads_in_text.push(token_id)
            leads_in_text.find()

    assert is_linear(search, 800)
