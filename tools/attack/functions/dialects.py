"""The time of parsers grows with the text and not faster, whatever a model writes and however it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from oaiserve.engine.grammars.parts import Leads
from oaiserve.engine.text.detokenize import TokenTable
from oaiserve.plugins.dialects import families
from oaiserve.plugins.dialects.gemma import GEMMA4
from oaiserve.plugins.dialects.llama import LLAMA4
from oaiserve.plugins.dialects.xml import QWEN_CODER
from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.hermes import HERMES
from oaiserve.routes.dialects.reasoning import THINK, ReasoningMode, ThinkingParser
from tests.engine.grammars.plain import BACKEND, ids
from tests.routes.dialects.reading import TOOLS, own_form, segments_of
from tools.attack.functions.linear import Case, cut, repeated

Text = Callable[[int], str]  # a text of about a length

SCHEMA = {"type": "object", "properties": {"a": {"type": "object"}, "b": {"type": "string"}}}
TOOL: dict[str, Any] = {"f": SCHEMA, **TOOLS}
PARSED = {family.parser: family for family in (*families(), HERMES)}.values()  # one family for each parser
BEGINNINGS = ("", "<think>", "<think>x")
LENGTHS = (3, 0)  # lengths of the pieces of an answer; 0: as a whole


def cases() -> Iterator[Case]:
    for family in PARSED:
        yield from calls(family)
        yield from leads(family)
    for family in (HERMES, GEMMA4, QWEN_CODER, LLAMA4):
        yield from calls_in_reasoning(family)
    yield from reasoning()


def title(family: CallFamily) -> str:
    return f"{family.name} ({family.opening.strip()})"


def read_cases(name: str, reader: Callable[[], AnswerReader], texts: dict[str, Text]) -> Iterator[Case]:
    """Yield a case for each text, which comes in pieces and as a whole."""
    for length in LENGTHS:
        for kind, text in texts.items():
            pieces = f"in pieces of {length}" if length else "as a whole"
            yield Case(f"{name}, {kind}, {pieces}", reading(reader, text, length), 700 if length else 3000)


def reading(reader: Callable[[], AnswerReader], text: Text, length: int) -> Callable[[int], object]:
    return lambda size: segments_of(reader(), cut(text(size), length))


def calls(family: CallFamily) -> Iterator[Case]:
    return read_cases(f"calls of {title(family)}", lambda: AnswerReader(None, family.parser(TOOL)), texts(family))


def calls_in_reasoning(family: CallFamily) -> Iterator[Case]:
    mode = ReasoningMode(THINK, is_open=True)

    def reader() -> AnswerReader:
        return AnswerReader(ThinkingParser(mode, lambda: family.parser(TOOL)), None)

    return read_cases(f"calls of {title(family)} in reasoning", reader, texts(family))


def reasoning() -> Iterator[Case]:
    mode = ReasoningMode(THINK, is_open=False)
    units = (" ", "<", "<think", "</think", "<think>", "<think> <", "x")
    texts = {f"{begin!r} and many {unit!r}": repeated(begin, unit) for unit in units for begin in BEGINNINGS}
    return read_cases("reasoning", lambda: AnswerReader(ThinkingParser(mode), None), texts)


def leads(family: CallFamily) -> Iterator[Case]:
    """Yield the searches for the leads of strict calls."""
    table = TokenTable(BACKEND)
    leads = tuple(site.lead for site in family.parser.sites)
    first_tag = (*family.parser.opening_tags, "{")[0]

    def searching(text: Text) -> Callable[[int], None]:
        def search(size: int) -> None:
            leads_in_text = Leads(leads, table, frozenset())
            for token_id in ids(text(size)):
                leads_in_text.push(token_id)
                leads_in_text.find()

        return search

    for unit in (" ", "[", '{"tool_call_id": "', "x"):
        begin = '{"tool_call_id": "' if unit == "x" else first_tag
        yield Case(f"leads of {title(family)}, many {unit!r}", searching(repeated(begin, unit)), 800)


def texts(family: CallFamily) -> dict[str, Text]:
    """Return texts of about a length, by name: what parsers might search again and again."""
    parser = family.parser
    opening = "".join(parser.opening_tags[-1:]) or ">>>f\n"
    whole = own_form(family, "f", {"a": {"x": 1}})
    begun = whole.partition("x")[0]
    head = begun.rpartition("{")[0]

    def nested(begin: str, end: str) -> Text:
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
