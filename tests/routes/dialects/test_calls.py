"""Tests the parsers of calls: each family's form, what is no call, and that pieces do not matter."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oaiserve.routes.answer_reader import AnswerReader
from oaiserve.routes.dialects.calls import CallParser
from oaiserve.routes.dialects.dialect import FAMILIES
from oaiserve.routes.dialects.hermes import HermesCalls
from oaiserve.routes.dialects.llama import LlamaCalls
from oaiserve.routes.dialects.segments import Arguments, CallBegin, CallBroken, CallEnd, Content
from oaiserve.routes.dialects.xml import QWEN_CODER
from tests.routes.dialects.reading import TOOLS, Read, cut, cuts, read, segments_of

PARSERS = list(dict.fromkeys(family.parser for family in FAMILIES))


def parser(family: type[CallParser], *, only_one: bool = False) -> AnswerReader:
    return AnswerReader(None, family(TOOLS, only_one=only_one))


def whole(family: type[CallParser], text: str, *, is_cut: bool = False, only_one: bool = False) -> Read:
    return read(segments_of(parser(family, only_one=only_one), [text], is_cut=is_cut))


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (HermesCalls, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> and so on'),
        (HermesCalls, '<tool_call>{"name": "add", "arguments": {"a": 1}, }</tool_call>'),
        (HermesCalls, '<tool_call>{"name": "add", "arguments": {"a": 1}'),
        (HermesCalls, '<tool_call>{"name": "add", "argu'),
        (HermesCalls, '<tool_call>{"name": 3}</tool_call>'),
        (HermesCalls, "<tool_call>" + '{"name":' * 3000),
        (HermesCalls, '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3002),
        (HermesCalls, "<tool_call>{}</tool_call>"),
        (LlamaCalls, 'Here: {"name": "add", "parameters": {}}'),
    ],
)
def test_what_is_no_call_stays_text(family: type[CallParser], text: str) -> None:
    reader = parser(family)
    assert read(segments_of(reader, [text])) == Read(text)
    assert reader.calls is not None
    assert reader.calls.num_called == 0
    assert read(segments_of(parser(family), text)) == Read(text)


def test_a_call_is_found_behind_one_that_is_none() -> None:
    call = '<tool_call>{"name": "add"}</tool_call>'
    assert whole(HermesCalls, f"<tool_call>{call}") == Read("<tool_call>", calls=[("add", "{}")])
    broken = '<tool_call>{"name": "add", "arguments": {"a": </tool_call>'
    assert whole(HermesCalls, f"{broken}{call}") == Read(broken, calls=[("add", "{}")])


def test_arguments_come_as_they_are_written() -> None:
    pieces = ["<tool", '_call>{"name": "get_ti', 'me", "arguments": ', '{"zo', 'ne": "u', 'tc"', "}}", "</tool_call>"]
    reader = parser(HermesCalls)
    assert [reader.push(piece) for piece in pieces] == [
        [],
        [],
        [],
        [CallBegin("get_time"), Arguments('{"zo')],
        [Arguments('ne": "u')],
        [Arguments('tc"')],
        [Arguments("}"), CallEnd()],
        [],
    ]


def test_strings_of_qwen_coder_come_as_they_are_written() -> None:
    reader = parser(QWEN_CODER.parser)
    reader.push("<function=add><parameter=text>\n")
    assert reader.push('one "two"') == [Arguments('one \\"two\\"')]
    assert reader.push("\nthree\n") == [Arguments("\\nthree")]
    assert reader.push("</para") == []
    assert reader.push("meter><parameter=a>1.5</parameter></function>")[0] == Arguments('"')


@pytest.mark.parametrize(
    ("value", "expected"), [("3", 3), ("True", True), ("null", None), ("[1, 2]", [1, 2]), ("three", "three")]
)
def test_values_of_qwen_coder_are_json_where_they_are_no_strings(value: str, expected: object) -> None:
    text = f"<function=add><parameter=a>\n{value}\n</parameter><parameter=text>\n{value}\n</parameter></function>"
    ((_, arguments),) = whole(QWEN_CODER.parser, text).calls
    assert json.loads(arguments) == {"a": expected, "text": value}


def test_text_is_held_back_only_while_it_may_be_a_mark() -> None:
    reader = parser(HermesCalls)
    assert reader.push("a <") == [Content("a ")]
    assert reader.push("b") == [Content("<b")]
    assert reader.push(" <tool_") == [Content(" ")]
    assert reader.push("box>") == [Content("<tool_box>")]


FENCED = '```json\n{"name": "add", "arguments": {"a": 1}}\n```'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FENCED, Read("", "", [("add", '{"a": 1}')])),
        (f"I add.\n{FENCED}\n{FENCED}\nDone.", Read("I add.\n\nDone.", "", [("add", '{"a": 1}')] * 2)),
        (FENCED.replace("add", "unknown"), Read(FENCED.replace("add", "unknown"))),
        (FENCED.replace('"arguments"', '"parameters"'), Read(FENCED.replace('"arguments"', '"parameters"'))),
        (
            FENCED.replace('"name"', '"type": "function", "name"'),
            Read(FENCED.replace('"name"', '"type": "function", "name"')),
        ),
        (FENCED.replace("\n```", "\n[]\n```"), Read(FENCED.replace("\n```", "\n[]\n```"))),
        (FENCED.removesuffix("```"), Read(FENCED.removesuffix("```"))),
        ('```json\n{"a": 1}\n```', Read('```json\n{"a": 1}\n```')),
        ("```json\n[1]\n```", Read("```json\n[1]\n```")),
    ],
)
def test_a_fenced_block_that_is_exactly_one_call_of_a_known_tool_is_one(text: str, expected: Read) -> None:
    assert whole(HermesCalls, text) == expected
    for at in range(1, len(text)):
        assert read(segments_of(parser(HermesCalls), [text[:at], text[at:]])) == expected
    assert read(segments_of(parser(HermesCalls), text)) == expected


BARE = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BARE, Read("", "", [("add", '{"a": 1}')])),
        (f"\n{BARE}\n", Read("", "", [("add", '{"a": 1}')])),
        (f"I add: {BARE}", Read(f"I add: {BARE}")),
        (BARE.replace("add", "unknown"), Read(BARE.replace("add", "unknown"))),
        (BARE.replace('"a"', '"b"')[:-1], Read(BARE.replace('"a"', '"b"')[:-1])),
        ('{"name": "Anna", "age": 3}', Read('{"name": "Anna", "age": 3}')),
        ('{"answer": {"name": "add"}}', Read('{"answer": {"name": "add"}}')),
    ],
)
def test_an_answer_that_begins_with_the_object_of_a_known_tool_is_a_call(text: str, expected: Read) -> None:
    assert whole(HermesCalls, text) == expected
    for at in range(1, len(text)):
        assert read(segments_of(parser(HermesCalls), [text[:at], text[at:]])) == expected
    assert read(segments_of(parser(HermesCalls), text)) == expected


def test_a_broken_call_tells_all_that_was_written_of_it() -> None:
    assert segments_of(parser(HermesCalls), ['\n<tool_call>{"name": "add", "arguments": {"a": x}}']) == [
        CallBegin("add"),
        Arguments('{"a": '),
        CallBroken('\n<tool_call>{"name": "add", "arguments": {"a": '),
        Content("x}}"),
    ]


SNIPPETS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<function=add>"),
        *("```json\n", "\n```", FENCED),
        *("</function>", "<parameter=a>", "<parameter=text>", "</parameter>", "<function=", "<tool_", "[TOOL"),
        *('{"name": "add", "arguments": ', '{"name": "get_time", "parameters": {}}', '{"name": "x", "arguments": {}}'),
        *('{"arguments": {}, "name": "add"}', '{"a": 1}', '{"text": "', '"}', '"', "\\", "{", "}", "[", "]", ","),
        *(" ", "\n", "text", "add", "é", "1", "-0.5e3", "true", "\x00", "\u2028", "{}", "}}", '{"name"', ": ", "<"),
        *(";", "</para", "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"),
    ]
)
TEXTS = st.lists(SNIPPETS | st.text(max_size=3), max_size=14).map("".join)


@pytest.mark.parametrize("family", PARSERS)
@given(text=TEXTS, places=cuts(), is_cut=st.booleans(), only_one=st.booleans())
def test_the_parts_do_not_depend_on_the_pieces(
    family: type[CallParser], text: str, places: list[int], is_cut: bool, only_one: bool
) -> None:
    at_once, in_pieces, by_character = (parser(family, only_one=only_one) for _ in range(3))
    segments = segments_of(at_once, [text], is_cut=is_cut)
    assert segments_of(in_pieces, cut(text, places), is_cut=is_cut) == segments
    assert segments_of(by_character, text, is_cut=is_cut) == segments
    for reader in (in_pieces, by_character):
        assert reader.calls is not None
        assert at_once.calls is not None
        assert (reader.calls.num_called, reader.calls.num_unparsed) == (
            at_once.calls.num_called,
            at_once.calls.num_unparsed,
        )


@pytest.mark.parametrize("family", PARSERS)
@given(text=TEXTS)
def test_a_text_without_calls_stays_as_it_is_and_complete_calls_have_valid_arguments(
    family: type[CallParser], text: str
) -> None:
    result = whole(family, text)
    if not result.calls:
        assert result.content == text
    for name, arguments in result.calls:
        assert name in TOOLS
        assert isinstance(json.loads(arguments), dict)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), st.dictionaries(st.text(), JSON, max_size=3)), max_size=3)


@given(calls=CALLS, before=st.text(alphabet="ab \n<[{"), indent=st.none() | st.integers(0, 2))
@example(calls=[("add", {"</tool_call>": "<tool_call>"})], before="", indent=None)
def test_calls_of_any_arguments_are_read_as_they_were_written(
    calls: list[tuple[str, dict[str, object]]], before: str, indent: int | None
) -> None:
    written = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': given}, indent=indent)}\n</tool_call>"
        for name, given in calls
    ]
    text = before + "\n".join(written)
    result = whole(HermesCalls, text)
    assert [(name, json.loads(given)) for name, given in result.calls] == calls
    assert result.content == (before if not calls or not before.isspace() else "")
