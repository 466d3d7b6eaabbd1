"""Tests the parsers of calls: each family's form, what is no call, and that pieces do not matter."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oaiserve.plugins.dialects.llama import LlamaCalls
from oaiserve.plugins.dialects.xml import QWEN_CODER
from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.dialects.calls import CallParser
from oaiserve.routes.dialects.hermes import HermesCalls
from oaiserve.routes.dialects.segments import Arguments, CallBegin, CallBroken, CallEnd, Content, joined
from tests.nesting import TOO_DEEP
from tests.plugins.dialects.known import FAMILIES
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
        (HermesCalls, "<tool_call>" + '{"name":' * TOO_DEEP),
        (HermesCalls, '<tool_call>{"name": "add", "arguments": ' + '{"a":' * TOO_DEEP + "1" + "}" * (TOO_DEEP + 2)),
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


OBJECT = '{"name": "add", "arguments": {"a": 1}}'
FENCED = f"```json\n{OBJECT}\n```"
ADDED = ("add", '{"a": 1}')
ONE = Read("", "", [ADDED])
TAGS = (("", ""), ("```json\n", "\n```"), ("<tool_call>\n", "\n</tool_call>"), ("<tool_call>{", "}</tool_call>"))
ESCAPES = (
    r"""{"name": "add", "arguments": {"text": "printf \'a\\n\\\\\' \d \"\u00e9"}}"""  # as in other languages than JSON
)
ESCAPED = r"""{"text": "printf 'a\\n\\\\' \\d \"\u00e9"}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FENCED, ONE),
        (FENCED.removesuffix("```"), ONE),
        (f"I add.\n{FENCED}\n{FENCED}\nDone.", Read("I add.\n\nDone.", "", [ADDED] * 2)),
        *((FENCED.replace("json", language), ONE) for language in ("", "tool_call", "xml", "JSON", "javascript")),
        (f"```xml\n<tool_call>\n{OBJECT}\n</tool_call>\n```", ONE),
        (f"```json\n{OBJECT}\n{OBJECT}\n```", Read("", "", [ADDED] * 2)),
        (f"```json\n[{OBJECT}, {OBJECT}]\n```", Read("", "", [ADDED] * 2)),
        (f"<tools>\n{OBJECT}\n{OBJECT}\n</tools>", Read("", "", [ADDED] * 2)),
        (f"<tool_call>\n{FENCED}\n</tool_call>", ONE),
        (f"<tool_call>[{OBJECT}]</tool_call>", ONE),
        (f"<tool_call>{{{OBJECT}}}</tool_call>", ONE),
        (
            '<tool_call>{{"name": "add", "arguments": {"a": {"b": {}}}}}</tool_call>',
            Read("", "", [("add", '{"a": {"b": {}}}')]),
        ),
        (f"```json\n{{{OBJECT}}}\n```", ONE),
        (f"{{{OBJECT}}}", ONE),
        ('{{"name": "add", "arguments": {{"a": 1}}}}', ONE),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', ONE),
        ('{"name": "functions.add", "parameters": {"a": 1}}', ONE),
        ('{"type": "function", "name": "add", "arguments": {"a": 1}}', ONE),
        (OBJECT, ONE),
        *((f"{begin}{ESCAPES}{end}", Read("", "", [("add", ESCAPED)])) for begin, end in TAGS),
        (f"\n{OBJECT}\n", ONE),
        (f"[{OBJECT}, {OBJECT}]", Read("", "", [ADDED] * 2)),
        *((f"{OBJECT}{between}{OBJECT}", Read("", "", [ADDED] * 2)) for between in ("\n", "\n\n", ",\n", ", ")),
        (f"{OBJECT}, and so on", Read(", and so on", "", [ADDED])),
        (f"{OBJECT},\n{{}}", Read(",\n{}", "", [ADDED])),
        *((f"{{{OBJECT}{braces}\n", ONE) for braces in ("", "}}", "\n}")),
        (f"<tools></tools>\n{{{OBJECT}\n{{{OBJECT}\n```", Read("<tools></tools>\n\n```", "", [ADDED] * 2)),
        (
            f'<tools>\n{{"type": "function"}}\n</tools>\n<tools>\n{OBJECT}\n</tools>',
            Read('<tools>\n{"type": "function"}\n</tools>\n', "", [ADDED]),
        ),
        (f"```json\n[{{{OBJECT}}}]\n```", ONE),
        (f"Sure:\n\n{OBJECT}\nDone.", Read("Sure:\n\n\nDone.", "", [ADDED])),
        (f"```python\n1\n```\n{OBJECT}", Read("```python\n1\n```\n", "", [ADDED])),
    ],
)
def test_plain_json_that_names_a_known_tool_is_a_call(text: str, expected: Read) -> None:
    check(text, expected)


@pytest.mark.parametrize(
    "text",
    [
        *(FENCED.replace("add", "unknown"), OBJECT.replace("add", "unknown"), f"I add: {OBJECT}"),
        *(OBJECT[:-1], FENCED.replace("}}", "}"), FENCED.replace("\n```", "\n[]\n```"), f"[{OBJECT}, 1]", f"[{OBJECT}"),
        *(OBJECT.replace("}}", '}, "reason": "x"}'), '{"name": "add"}', '{"name": "add", "arguments": [1]}'),
        *(
            '```json\n{"a": 1}\n```',
            "```json\n[1]\n```",
            "```json\n[]\n```",
            "```\n```",
            "[]",
            "[link](x)",
            "```" + "x" * 99,
        ),
        *(
            '{"name": "Anna", "age": 3}',
            '{"answer": {"name": "add"}}',
            f'{{"answer":\n{OBJECT}\n}}',
            f"[\n{OBJECT},\n1]",
        ),
        f"```python\nprint(\n{OBJECT}\n)\n```",
        '<tools>\n{"name": "add", "parameters": {"type": "object", "properties": {}}}\n</tools>',
        f"```json\n{OBJECT}\n{OBJECT.replace('add', 'unknown')}\n```",
    ],
)
def test_plain_json_that_is_no_call_stays_text(text: str) -> None:
    check(text, Read(text))
    reader = parser(HermesCalls)
    segments_of(reader, [text])
    assert reader.calls is not None
    assert reader.calls.num_unparsed == 0


def check(text: str, expected: Read, tools: Mapping[str, Any] = TOOLS) -> None:
    for pieces in ([text], text, *([text[:at], text[at:]] for at in range(1, len(text)))):
        assert read(segments_of(AnswerReader(None, HermesCalls(tools)), pieces)) == expected


CMD = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
HELLO = r"""{"cmd": "cat > hello.py <<'END'\nprint('hello')\nEND"}"""
WRITTEN = f'{{"name": "exec_command", "arguments": {HELLO}}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<tool_call>\n{WRITTEN}\n</tool_call>\nI wrote it.", Read("\nI wrote it.", "", [("exec_command", HELLO)])),
        (
            f"Sure, I'll create it:\n\n```json\n{WRITTEN}\n```",
            Read("Sure, I'll create it:\n\n", "", [("exec_command", HELLO)]),
        ),
        (
            r"""<tool_call>
{"name": "exec_command", "arguments": {"cmd": "printf 'print(\'hello\')\\n\' > hello.py"}}
</tool_call>""",
            Read("", "", [("exec_command", r"""{"cmd": "printf 'print('hello')\\n' > hello.py"}""")]),
        ),
        *(
            (text, Read(text))
            for text in (
                'It takes:\n```json\n{"name": "exec_command", "arguments": {"command": "ls"}}\n```',
                '<tools>\n{"command":{"name":"exec_command","arguments":{"objective":"Write hello.py."}}}\n</tools>',
                '<return-provider type="text/plain">{"name": "hello.py", "arguments": {}}</return-provider>',
                """```python\n{{"name": "hello", "arguments": {"script": "print('hello')"}}}\n```""",
                '<tools>\n  <type>function", "function": {"name": "exec_command", "parameters": {}}}\n</tools>',
                '<tools>\n  <function>\n    <name>exec_command</name>\n    <arguments>\n      {"cmd": "ls"}\n</tools>',
            )
        ),
    ],
)
def test_answers_of_a_small_model_in_coding_tools(text: str, expected: Read) -> None:
    check(text, expected, {"exec_command": CMD})


COPY = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("from", "to", "why")},
    "required": ["from", "to"],
}


def test_arguments_in_a_fenced_block_come_as_they_are_written_once_it_is_certainly_a_call() -> None:
    reader = AnswerReader(None, HermesCalls({"copy": COPY}))
    written = ["I copy.\n```json", '\n{"name": "copy", "arguments": {"from": "a', 'b", "to', '": "c', 'd", "w']
    assert [reader.push(piece) for piece in written] == [
        [Content("I copy.\n")],
        [],
        [],
        [CallBegin("copy"), Arguments('{"from": "ab", "to": "c')],
        [Arguments('d", "w')],
    ]
    assert reader.push('hy": "e"}}\n') == [Arguments('hy": "e"}')]
    assert reader.push("```") == [CallEnd()]
    alone = AnswerReader(None, HermesCalls({"copy": COPY}))  # without other text, the name is enough
    assert alone.push('{"name": "copy", "arguments": {"') == [CallBegin("copy"), Arguments('{"')]


@pytest.mark.parametrize(
    "text",
    [
        'I copy.\n```\n{"name": "copy", "arguments": {"to": {"from": "a"}, "why": "from"}}\n```',
        'I copy.\n```\n{"name": "copy", "arguments": {"to": "\\"from\\": ", "why": ["from"]}}\n```',
        'I copy.\n```\n{"name": "copy", "arguments": {"to": "a\n", "from": "b"}}\n```',
        '{"name": "copy", "arguments": {"to": x}}',
        '```\n{"name": "copy", "arguments": {"to": 1}}\n{"name": "other", "arguments": {"to": 1}}\n```',
        '```\n{"name": "copy", "arguments": {"to": 1}}\n``',
    ],
)
def test_a_block_whose_call_is_broken_stays_text(text: str) -> None:
    check(text, Read(text), {"copy": COPY})


def test_the_last_call_of_a_block_may_be_broken() -> None:
    broken = '\n{"name": "copy", "arguments": {"to": x}}\n```'
    text = f'```\n{{"name": "copy", "arguments": {{"to": "b"}}}}{broken}'
    check(text, Read(broken, "", [("copy", '{"to": "b"}')]), {"copy": COPY})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('I copy.\n```\n{"name": "copy", "arguments": {"from": "a', [("copy", "")]),
        ('{"name": "copy", "arguments": {"from": "a', [("copy", '{"from": "a')]),
        ('{"name": "copy", "arguments": {"from": "a"}', [("copy", '{"from": "a"}')]),
        ('```\n{"name": "copy", "arguments": {}}\n``', [("copy", "{}")]),
        ('```\n{"name": "copy", "arguments": {}}\n{"name": "co', [("copy", "{}")]),
        ('```\n{"name": "copy", "arguments": {}}\n{"name": "copy", "arguments": {"', [("copy", "{}"), ("copy", '{"')]),
        ('<tool_call>\n{"na', []),
        ("<tool_call>", []),
    ],
)
def test_an_answer_that_is_cut_shows_no_markup_of_its_calls(text: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], text, *([text[:at], text[at:]] for at in range(1, len(text)))):
        result = read(segments_of(AnswerReader(None, HermesCalls({"copy": COPY})), pieces, is_cut=True))
        assert (result.content, result.calls) == ("I copy.\n" * text.startswith("I"), calls)


BLOCKS = st.sampled_from(
    [
        *(
            '{"name": "copy", "arguments": {',
            '{"name": "copy", "parameters": {',
            '"from": ',
            '"to": ',
            '"why": ',
            '"a"',
        ),
        *("```json\n", "\n```", "```", "\n", ",", "}", "}}", "{", "[", "]", "\\", '"', "1", "<tools>", "</tools>", "I"),
        '{"name": "copy", "arguments": {"from": "a", "to": "b"}}',
    ]
)


@given(text=st.lists(BLOCKS, max_size=16).map("".join), places=cuts(), is_cut=st.booleans(), only_one=st.booleans())
def test_blocks_with_required_arguments_do_not_depend_on_the_pieces(
    text: str, places: list[int], is_cut: bool, only_one: bool
) -> None:
    def reader() -> AnswerReader:
        return AnswerReader(None, HermesCalls({"copy": COPY}, only_one=only_one))

    at_once = segments_of(reader(), [text], is_cut=is_cut)
    assert segments_of(reader(), cut(text, places), is_cut=is_cut) == at_once
    assert segments_of(reader(), text, is_cut=is_cut) == at_once


def test_plain_json_is_passed_on_as_soon_as_it_can_be_no_call() -> None:
    for text in ('{"name": "x"', "```python\nx", '```json\n{"a"', "[1", "[link", '{"name": "add", "arguments": 1}'):
        assert read(parser(HermesCalls).push(text)).content == text


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
        *("```json\n", "\n```", FENCED, "```", "<tools>", "</tools>", OBJECT, f"\n{OBJECT}", "{{", "\n[", "[{"),
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
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, indent=indent)}\n</tool_call>"
        for name, arguments in calls
    ]
    text = before + "\n".join(written)
    result = whole(HermesCalls, text)
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == calls
    assert result.content == (before if not calls or not before.isspace() else "")


@pytest.mark.parametrize("blanks", [" " * 5000, "\n" * 5000])
def test_endless_white_space_is_not_held_back(blanks: str) -> None:
    for family in PARSERS:
        assert joined(parser(family).push(blanks)) != []
