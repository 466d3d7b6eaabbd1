"""Tests each dialect in the forms that its models write, whole and cut at every character."""

import json
from typing import Any

import pytest

from oaiserve.plugins.dialects.harmony import HARMONY, HarmonyCalls
from oaiserve.plugins.dialects.headed_calls import FUNCTIONARY_HEADED
from oaiserve.plugins.dialects.kimi import with_counted_ids
from oaiserve.plugins.dialects.llama import LLAMA, LLAMA4
from oaiserve.plugins.dialects.pythonic import as_python
from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.reasoning import THINK, ReasoningMode, ThinkingParser
from oaiserve.routes.dialects.segments import Segment
from tests.plugins.dialects.known import FAMILIES, family_of
from tests.plugins.dialects.more_cases import BOOK_CASES
from tests.routes.dialects.reading import Read, own_form, read, segments_of

TOOLS: dict[str, Any] = {
    "book": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "nights": {"type": "integer"},
            "price": {"type": ["number", "null"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "guests": {"type": "array", "items": {"type": "string"}},
            "more": {"type": "object"},
        },
    },
    "get-time": {"type": "object", "properties": {}},
}
Arguments = dict[str, Any]
ROME: Arguments = {"city": "Rome"}
# Each: the dialect, what the model writes, the content and the calls. The forms are those of the models' templates, and
# of the cases in the tests of vLLM, SGLang and llama.cpp.
CASES: list[tuple[str, str, str, list[tuple[str, Arguments]]]] = [
    ("hermes", 'Sure. <tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>', "Sure. ", [("get-time", {})]),
    ("hermes", '\n\n<tool_call>{"arguments":{"city": "Rome"} , "name":"book"}</tool_call>\n', "", [("book", ROME)]),
    ("hermes", '<tool_call>{"name": "book", "parameters": {"city": "Rome"}, "id": "x"}', "", [("book", ROME)]),
    ("hermes", '<tool_call>{"name": "book", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>', "",
     [("book", ROME)]),
    ("hermes", '<tool_call>{"arguments": null, "name": "book"}</tool_call>', "", [("book", {})]),
    ("llama3_json", ' {"name": "book", "parameters": {"city": "Rome"}}', "", [("book", ROME)]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "book", "parameters": {"city": "Rome"}}', "",
     [("book", ROME)]),
    ("llama3_json", '{"name": "get-time", "parameters": {}}; {"name": "book", "parameters": {}}\n{"name": "get-time"}',
     "", [("get-time", {}), ("book", {}), ("get-time", {})]),
    ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    ("llama3_json", '<|python_tag|>print("hello")', '<|python_tag|>print("hello")', []),
    ("mistral", '[TOOL_CALLS] [{"name": "book", "arguments": {"city": "Rome"}, "id": "abc"}, {"name": "get-time"}]',
     "", [("book", ROME), ("get-time", {})]),
    ("mistral", "[TOOL_CALLS] and nothing", "[TOOL_CALLS] and nothing", []),
    ("mistral", "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    ("qwen3_coder", "<function=book><parameter=city>Rome</parameter></function>", "", [("book", ROME)]),
    ("qwen3_coder", '<tool_call>\n{"name": "book", "arguments": {"city": "Rome"}}\n</tool_call>', "", [("book", ROME)]),
    ("qwen3_coder", "<function=book>text</function>", "<function=book>text</function>", []),
    ("qwen3_coder", "<function=book><parameter=nights>1", "<function=book><parameter=nights>1", []),
    ("qwen3_coder", "<tool_call>text", "<tool_call>text", []),
    ("granite", '<|tool_call|>[{"name": "get-time", "arguments": {}}, {"name": "book", "arguments": {"nights": 2}}]',
     "", [("get-time", {}), ("book", {"nights": 2})]),
    ("phi4_mini_json", '<|tool_call|>{"name": "book", "arguments": {"city": "Rome"}}<|/tool_call|>', "",
     [("book", ROME)]),
    ("phi4_mini_json", 'functools[{"name": "book", "arguments": {"city": "Rome"}}]', "", [("book", ROME)]),
    ("llama4_pythonic", "[book(city='Rome', nights=9, more={'a': [True, None]})]", "",
     [("book", {"city": "Rome", "nights": 9, "more": {"a": [True, None]}})]),
    ("llama4_pythonic", "<|python_start|>[get-time(), book(guests=['A', \"B's\"], price=-1.5)]<|python_end|>", "",
     [("get-time", {}), ("book", {"guests": ["A", "B's"], "price": -1.5})]),
    ("llama4_pythonic", r"""[book(city='L\'A', note='a "b" )]')]""", "",
     [("book", {"city": "L'A", "note": 'a "b" )]'})]),
    ("llama4_pythonic", "I look it up. [book(city='Rome', more={}, guests=[])]", "I look it up. ",
     [("book", {"city": "Rome", "more": {}, "guests": []})]),
    ("llama4_pythonic", '{"name": "book", "parameters": {"city": "Rome"}}', "", [("book", ROME)]),
    ("llama4_pythonic", "See [note (1)] and [book] for more.", "See [note (1)] and [book] for more.", []),
    ("llama4_pythonic", "[book('Rome')]", "[book('Rome')]", []),
    ("llama4_pythonic", "[book(nights=1e999)]", "[book(nights=1e999)]", []),
    ("llama4_pythonic", "[book(city=b'z')]", "[book(city=b'z')]", []),
    ("llama4_pythonic", "[book(**{'city': 'Rome'})]", "", [("book", ROME)]),
    *(("llama4_pythonic", text, text, []) for text in (r"[book(city='\ud83d')]", r"[book(**{'city': '\ud83d'})]")),
    ("llama4_pythonic", "[book(city=1])]", "[book(city=1])]", []),
    ("lfm2", '<|tool_call_start|>[book(city="Rome")]<|tool_call_end|>Wait.', "Wait.", [("book", ROME)]),
    ("mistral", '[TOOL_CALLS]book{"city": "Rome"}[TOOL_CALLS]get-time[CALL_ID]1aB[ARGS]{}', "",
     [("book", ROME), ("get-time", {})]),
    ("qwen3_coder", "<tool_call>\n<function=book>\n<parameter=city>\n\nRome\n\n</parameter>\n<parameter=nights>\n2\n"
     "</parameter>\n</function>\n</tool_call>", "", [("book", {"city": "\nRome\n", "nights": 2})]),
    ("seed_oss", "Well.<seed:tool_call>\n<function=book>\n<parameter=city>a\nb\n</parameter>\n<parameter=guests>['x']"
     "</parameter>\n</function>\n</seed:tool_call>", "Well.", [("book", {"city": "a\nb\n", "guests": "['x']"})]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="book">\n<parameter name="city">Rome</parameter>\n'
     '<parameter name="note">null</parameter>\n</invoke>\n<invoke name="get-time">\n</invoke>\n</minimax:tool_call>',
     "", [("book", {"city": "Rome", "note": None}), ("get-time", {})]),
    ("minimax_m2", '<minimax:tool_call><invoke name="book"><parameter name="note">5</parameter>'
     '<parameter name="more">{"a": 1}</parameter></invoke></minimax:tool_call>', "",
     [("book", {"note": "5", "more": {"a": 1}})]),
    ("glm45", "Checking.<tool_call>book\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>nights"
     "</arg_key>\n<arg_value>2</arg_value>\n</tool_call>", "Checking.", [("book", {"city": "Rome", "nights": 2})]),
    ("glm45", "<tool_call>get-time</tool_call><tool_call>book<arg_key>city</arg_key><arg_value>Rome</arg_value>"
     "</tool_call>", "", [("get-time", {}), ("book", ROME)]),
    ("glm45", "<tool_call>get<arg_key>city</arg_key>", "<tool_call>get<arg_key>city</arg_key>", []),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>book\n```json\n{\"city\": "
     "\"Rome\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time\n```json\n{}\n```<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>", "", [("book", ROME), ("get-time", {})]),
    ("deepseek_v31", "text<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>book<｜tool▁sep｜>{\"city\": \"Rome\"}"
     "<｜tool▁call▁end｜>"
     "<｜tool▁call▁begin｜>get-time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "text",
     [("book", ROME), ("get-time", {})]),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>book<｜tool▁sep｜>{}<｜tool▁calls▁end｜>",
     "<｜tool▁calls▁begin｜>book<｜tool▁sep｜>{}<｜tool▁calls▁end｜>", []),
    ("deepseek_v32", "3 < 5. <｜DSML｜function_calls>\n<｜DSML｜invoke name=\"book\">\n"
     "<｜DSML｜parameter name=\"city\" "
     "string=\"true\">5</｜DSML｜parameter>\n"
     "<｜DSML｜parameter name=\"nights\" string=\"false\">5</｜DSML｜parameter>\n"
     "</｜DSML｜invoke>\n</｜DSML｜function_calls>", "3 < 5. ", [("book", {"city": "5", "nights": 5})]),
    ("deepseek_v32", "<｜DSML｜invoke name=\"book\"><｜DSML｜parameter name=\"nights\" string=\"true\">42"
     "</｜DSML｜parameter><｜DSML｜parameter name=\"x\" string=\"true\">42</｜DSML｜parameter></｜DSML｜invoke>", "",
     [("book", {"nights": 42, "x": "42"})]),
    ("deepseek_v4", "<｜DSML｜invoke name=\"book\"><｜DSML｜parameter name=\"city\" string=\"true\">Rome"
     "</｜DSML｜parameter>"
     "</｜DSML｜invoke>", "", [("book", ROME)]),
    ("kimi_k2", 'I check. <|tool_calls_section_begin|><|tool_call_begin|>functions.book:0 <|tool_call_argument_begin|>'
     '{"city": "<b>"} <|tool_call_end|><|tool_call_begin|>get-time:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
     "<|tool_calls_section_end|>", "I check. ", [("book", {"city": "<b>"}), ("get-time", {})]),
    ("gemma4", '<|tool_call>call:book{city:<|"|>Rome, {x}: "a"<|"|>,nights:2,price:null,more:{<|"|>3<|"|>:true,in:[1,'
     '<|"|>b<|"|>]}}<tool_call|>', "", [("book", {"city": 'Rome, {x}: "a"', "nights": 2, "price": None,
                                               "more": {"3": True, "in": [1, "b"]}})]),
    ("gemma4", "<|tool_call>call:get-time{}<tool_call|><|tool_call>call:book{city: Rome}<tool_call|>", "",
     [("get-time", {}), ("book", ROME)]),
    ("gemma4", '<|tool_call>call:book{city:Rome, "I"<|"|>,nights:2, note : x<|"|>,more:{a:b c<|"|>}}<tool_call|>',
     "", [("book", {"city": 'Rome, "I"', "nights": 2, "note": "x", "more": {"a": "b c"}})]),
    ("gemma4", """<|tool_call>call:book{city:<|"|>a, b:c<|"|>,guests:["A","B"],note:'it, so',more:{"in": 'x'}}""", "",
     [("book", {"city": "a, b:c", "guests": ["A", "B"], "note": "it, so", "more": {"in": "x"}})]),
    ("gemma4", '<|tool_call>call:book{city:<|"|>Rome', '<|tool_call>call:book{city:<|"|>Rome', []),
    ("gemma4", "Hi.<|channel>thought\n<channel|><channel|>", "Hi.", []),
    ("functiongemma", "<start_function_call>call:book{city:<escape>Rome<escape>}<end_function_call>", "",
     [("book", ROME)]),
    *BOOK_CASES,
]  # fmt: skip


def named(name: str) -> CallFamily:
    family = family_of(name, "[ARGS]")
    assert family is not None
    return family


def segments(name: str, text: str, places: tuple[int, ...]) -> list[Segment]:
    reader = AnswerReader(None, named(name).parser(TOOLS))
    return segments_of(reader, [text[start:end] for start, end in zip((0, *places), (*places, len(text)), strict=True)])


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_read_whole_and_cut_at_every_character(
    name: str, text: str, content: str, calls: list[tuple[str, Arguments]]
) -> None:
    whole = segments(name, text, ())
    result = read(whole)
    assert (result.content, [(called, json.loads(arguments)) for called, arguments in result.calls]) == (content, calls)
    for at in range(1, len(text)):
        assert segments(name, text, (at,)) == whole
    assert segments(name, text, tuple(range(1, len(text)))) == whole


def test_calls_of_a_history_are_read_as_they_are_written_in_python() -> None:
    calls = [("book", json.dumps(HARD)), ("get-time", "{}")]
    reader = AnswerReader(None, named("lfm2").parser(TOOLS))
    read_again = read(segments_of(reader, [f"<|tool_call_start|>{as_python(calls)}<|tool_call_end|>"])).calls
    assert [(name, json.loads(arguments)) for name, arguments in read_again] == [("book", HARD), ("get-time", {})]
    assert as_python([("book", "no JSON")]) == '[book(arguments="no JSON")]'


def test_each_dialect_has_a_case() -> None:
    tried = {name for name, *_ in CASES} | {"openai"}
    assert tried == {family.name for family in FAMILIES}


HARD: Arguments = {
    "city": 'a "b" {c} [d]\n\\ é',
    "nights": 2,
    "price": None,
    "guests": ["x", ""],
    "more": {"k": [True, {}]},
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_dialect_does_the_same_in_each_case(family: CallFamily) -> None:
    def outcome(
        text: str, *, is_cut: bool = False, thinks: bool = False, only_one: bool = False
    ) -> tuple[str, str, list[tuple[str, str]]]:
        def reader() -> AnswerReader:
            mode = ReasoningMode(THINK, is_open=False)
            return AnswerReader(ThinkingParser(mode) if thinks else None, family.parser(TOOLS, only_one=only_one))

        answer_read = read(segments_of(reader(), [text], is_cut=is_cut))
        assert answer_read == read(segments_of(reader(), text, is_cut=is_cut))  # by the character
        return answer_read.reasoning, answer_read.content, answer_read.calls

    call = family.written([("book", json.dumps(ROME))])
    hard = json.dumps(HARD)
    called = [("book", json.dumps(ROME))]
    two = family.written([("book", hard), ("get-time", "{}")])
    assert outcome(two) == ("", "", [("book", hard), ("get-time", "{}")])
    assert outcome(two, only_one=True)[2] == [("book", hard)]
    assert [json.loads(arguments) for _, arguments in outcome(own_form(family, "book", HARD))[2]] == [HARD]
    has_tags = family not in (LLAMA, LLAMA4, FUNCTIONARY_HEADED)  # without one, text before a call makes it a text
    assert outcome(f"Sure. {call}") == ("", "Sure. " if has_tags else f"Sure. {call}", called if has_tags else [])
    assert outcome(f"{call}\nDone.") == ("", "\nDone.", called)
    unknown = family.written([("unknown", "{}")])
    assert outcome(unknown) == ("", "" if family.by_channels else unknown, [])
    for end in range(1, call.index("Rome") + 2):  # nothing is lost
        assert outcome(call[:end]) == ("", call[:end], [])
    assert outcome(call[:end], is_cut=True) == ("", "", [("book", '{"city": "R')])
    assert outcome(f"<think>{call}</think>Yes.", thinks=True) == (call, "Yes.", [])


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
START = "<|start|>assistant"
CALL = "<|channel|>commentary to=functions.book json<|message|>"
HARMONIES: list[tuple[str, Read]] = [
    (f"{ANALYSIS}{START}<|channel|>final<|message|>Yes.<|return|>", Read("Yes.", "Hm.")),
    (f"{ANALYSIS}{START}<|channel|>commentary to=functions.book <|constrain|>json<|message|>{{}}<|call|>",
     Read("", "Hm.", [("book", "{}")])),
    (f'{ANALYSIS}{START} to=functions.book<|channel|>commentary json<|message|>{{"nights": 2}}',
     Read("", "Hm.", [("book", '{"nights": 2}')])),
    ("<|channel|>analysis to=functions.get-time code<|message|>{}<|call|>", Read("", "", [("get-time", "{}")])),
    (" to=functions.get-time<|channel|>commentary<|message|>{}", Read("", "", [("get-time", "{}")])),
    (f"<|channel|>commentary<|message|>I look.<|end|>{START}<|channel|>analysis<|message|>a < b",
     Read("I look.", "a < b")),
    ("No channels at all.", Read("No channels at all.")),
    ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", Read()),
    (f"{ANALYSIS}{START} to=browser.open<|channel|>commentary<|message|>a<|call|>"
     f"{START}<|channel|>final<|message|>Yes.", Read("Yes.", "Hm.")),
    (f"<|channel|>commentary to=assistant{ANALYSIS}{START}<|channel|>commentary to=assistant<|channel|>final"
     "<|message|>Yes.", Read("Yes.", "Hm.")),
    ("<|channel|>commentary to=functions.book<|message|>no JSON<|call|>",
     Read("<|channel|>commentary to=functions.book<|message|>no JSON<|call|>")),
    ("<|channel|>", Read("<|channel|>")),
    (f"<|channel|>{ANALYSIS}<|start|>{START}<|channel|><|channel|>final<|message|>Yes.", Read("Yes.", "Hm.")),
    (f"<|channel|>analysis<|message|><|message|>Hm.<|end|>{START}<|channel|>final<|message|> <|message|>\n<|message|>"
     "\nYes.", Read("\nYes.", "Hm.")),
    (f"<|channel|>analysis<|message|>{ANALYSIS}{START}<|channel|>final<|message|>{START}<|channel|>final<|message|>Yes.",
     Read("Yes.", "Hm.")),
    (f"{ANALYSIS}{START}<|channel|>final<|message|>{START}<|message|><|constrain|>json<|message|>{{}}",
     Read("{}", "Hm.")),
    (f"<|channel|>analysis<|message|>{START}<|channel|>final<|message|>Yes.", Read("Yes.")),
    ("<|channel|>commentary to=functions.book json<|message|><|message|>{}<|call|>", Read("", "", [("book", "{}")])),
    (f"{CALL}{CALL}{{}}<|call|>", Read("", "", [("book", "{}")])),
    (f"{CALL}<|message|>no JSON<|call|>", Read(f"{CALL}<|message|>no JSON<|call|>")),
    ("<|channel|>commentary to=python<|message|><|message|>1 + 1<|call|>", Read()),
    ("<|channel|>final<|message|><|message|>", Read()),
    ("<|channel|>final<|message|>\n", Read("\n")),
    ("<|channel|>final<|message|><|message|><|mess", Read("<|mess")),
    ("<|channel|>final<|message|><|start|> and <|message|> are tokens", Read("<|start|> and <|message|> are tokens")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), HARMONIES)
def test_channels_are_read_whole_and_cut_at_every_character(text: str, expected: Read) -> None:
    def pieces(places: list[int]) -> tuple[Read, int]:
        parser = HarmonyCalls(TOOLS)
        ends = zip([0, *places], [*places, len(text)], strict=True)
        return read(segments_of(AnswerReader(None, parser), [text[start:end] for start, end in ends])), parser.end

    whole, end = pieces([])
    assert whole == expected
    assert text[:end].endswith((expected.reasoning, f"{expected.reasoning}<|end|>")) or not expected.reasoning
    for places in [*([at] for at in range(1, len(text))), list(range(1, len(text)))]:
        assert pieces(places) == (whole, end)


def test_reasoning_may_begin_in_the_prompt_and_a_call_may_be_plain_text() -> None:
    text = f'Hm.<|end|>{START}<|channel|>commentary to=functions.get-time <|constrain|>json<|message|>say "a"'
    parser = HarmonyCalls(TOOLS, in_reasoning=True, is_raw=True)
    assert read(segments_of(AnswerReader(None, parser), text)) == Read(
        "", "Hm.", [("get-time", '{"input": "say \\"a\\""}')]
    )
    assert parser.num_called == 1


@pytest.mark.parametrize(
    ("is_raw", "arguments"),
    [(False, '{"nights": 2}'), (True, '{"input": "{\\"nights\\": 2}"}')],
)
def test_repeated_tags_before_reasoning_in_the_prompt_and_before_calls_are_dropped(
    is_raw: bool, arguments: str
) -> None:
    text = f'<|message|>Hm.<|end|>{START}{CALL}<|message|>{{"nights": 2}}'
    for at in range(len(text)):
        parser = HarmonyCalls(TOOLS, in_reasoning=True, is_raw=is_raw)
        pieces = [text[:at], text[at:]]
        assert read(segments_of(AnswerReader(None, parser), pieces)) == Read("", "Hm.", [("book", arguments)])
        assert parser.num_called == 1


def test_blanks_before_a_message_are_held_only_up_to_a_limit() -> None:
    parser = HarmonyCalls(TOOLS)
    blanks = " " * 10_000
    assert parser.push(f"<|channel|>final<|message|>{blanks}")
    assert read(parser.push(f"{blanks}<|message|>")) == Read(f"{blanks}<|message|>")


def test_history_has_counted_ids_for_kimi() -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]
    results: list[dict[str, Any]] = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("b", "a")]
    asking, *answered = with_counted_ids([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
    assert [call["id"] for call in asking["tool_calls"]] == ["functions.a:0", "functions.b:1"]
    assert [message["tool_call_id"] for message in answered] == ["functions.b:1", "functions.a:0"]


def test_an_answer_in_the_final_channel_may_come_in_place_of_calls() -> None:
    ids = {"<|start|>": 1, "<|channel|>": 2, "<|message|>": 3, "<|constrain|>": 4}
    text = json.loads(HARMONY.grammar({"book": {}}, only_one=True, special_ids=ids, answer='{"type": "object"}'))
    assert text["lark"].startswith('start: <[1]> "assistant" <[2]> "final" <[3]> @answer | ')
    assert 'call: <[1]> "assistant" <[2]> "commentary to=functions." body' in text["lark"]
