"""Tests the dialect of the families: what a grammar forces, or a prompt shows, is what the parser reads."""

import json
import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.grammars.notations import translate
from oaiserve.engine.request import Grammar
from oaiserve.errors import InvalidRequest
from oaiserve.plugins.dialects.json_rows import PHI4
from oaiserve.plugins.dialects.llama import LLAMA
from oaiserve.plugins.dialects.mistral import MISTRAL, MISTRAL_NAMED
from oaiserve.plugins.dialects.pythonic import LFM2
from oaiserve.plugins.dialects.tagged_rows import MINIMAX_M3
from oaiserve.plugins.dialects.xml import QWEN_CODER
from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.hermes import HERMES
from tests.engine.grammars.plain import allowed_ids
from tests.engine.text.tokenizers_for_tests import byte_level
from tests.plugins.dialects.known import FAMILIES, family_of
from tests.routes.dialects.reading import Read, own_form, read, segments_of

SCHEMAS = {
    "get_time": {
        "type": "object",
        "properties": {"zone": {"enum": ["utc", "cet"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
    "add-2": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/number"}, "text": {"type": "string", "pattern": '^[a-z \n"<>/_]*$'}},
        "additionalProperties": False,
        "$defs": {"number": {"type": "integer"}},
    },
}
ZONES = st.sampled_from(["utc", "cet"]).map(lambda zone: ("get_time", {"zone": zone}))
SUMS = st.fixed_dictionaries({}, optional={"a": st.integers(-99, 99), "text": st.text('ab \n"<>/_', max_size=5)}).map(
    lambda given: ("add-2", {key: given[key] for key in ("a", "text") if key in given})
)
CALLS = st.lists(ZONES | SUMS, min_size=1, max_size=4)


@cache
def tokenizer(*special: str) -> tuple[Tokenizer, LLTokenizer, dict[str, int]]:
    backend = byte_level()
    backend.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in special])
    ids = {tag: backend.token_to_id(tag) for tag in special}
    return backend, LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size()), ids


@cache
def compiled(family: CallFamily, *special: str, only_one: bool) -> LLMatcher:
    """Return a matcher of the grammar of forced calls, which is to be copied."""
    _, guidance, special_ids = tokenizer(*special)
    text = family.grammar(SCHEMAS, only_one=only_one, special_ids=special_ids)
    matcher = LLMatcher(guidance, translate("lark_with_schemas", text).text)
    assert not matcher.get_error()
    return matcher


def accepts(family: CallFamily, text: str, *, only_one: bool = False, special: tuple[str, ...] = ()) -> bool:
    """Return whether the grammar of forced calls takes the whole text, and may end there."""
    return takes(compiled(family, *special, only_one=only_one).deep_copy(), tokenizer(*special)[0], text)


def takes(matcher: LLMatcher, backend: Tokenizer, text: str) -> bool:
    ids = backend.encode(text, add_special_tokens=False).ids
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


def written(family: CallFamily, calls: list[tuple[str, dict[str, object]]]) -> str:
    return family.written((name, json.dumps(arguments)) for name, arguments in calls)


def calls_in(family: CallFamily, text: str) -> Read:
    return read(segments_of(AnswerReader(None, family.parser(SCHEMAS)), text))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30)
@given(calls=CALLS)
def test_what_is_written_is_allowed_by_the_grammar_and_read_by_the_parser(
    family: CallFamily, calls: list[tuple[str, dict[str, object]]]
) -> None:
    text = written(family, calls)
    assert accepts(family, text) == (len(calls) == 1 or not family.by_channels)
    assert accepts(family, text, only_one=True) == (len(calls) == 1)
    assert calls_in(family, text) == Read(calls=[(name, json.dumps(arguments)) for name, arguments in calls])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_grammar_lets_a_model_write_is_read_as_calls(family: CallFamily, seed: int) -> None:
    draw = random.Random(seed)
    backend, guidance, _ = tokenizer()
    matcher = compiled(family, only_one=False).deep_copy()
    token_ids: list[int] = []
    while not (matcher.is_accepting() and draw.random() < 0.5):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = [i for i in allowed_ids(bits) if i < backend.get_vocab_size() and i != guidance.eos_token]
        if not allowed:
            break
        token_ids.append(draw.choice(allowed))
        assert matcher.consume_token(token_ids[-1])
    result = calls_in(family, backend.decode(token_ids, skip_special_tokens=False))
    assert result.calls
    assert result.content == ""
    assert accepts(family, written(family, [(name, json.loads(arguments)) for name, arguments in result.calls]))


@pytest.mark.parametrize("tag", ["<tool_call>", "</tool_call>"])
def test_a_model_may_write_a_tag_as_a_token_or_in_pieces_and_the_rest_is_forced(tag: str) -> None:
    """Qwen 2.5 Coder has tokens for these tags, but has never seen them. After them, its calls are worse."""
    backend = byte_level()
    backend.add_tokens([AddedToken(tag, special=False, normalized=False)])
    eos = backend.token_to_id("<|im_end|>")
    grammars = Grammars(backend, vocab_size=backend.get_vocab_size(), eos_token_ids=frozenset([eos]))
    text = HERMES.grammar({"get_time": SCHEMAS["get_time"]}, only_one=True, special_ids={})
    before, after = HERMES.written([("get_time", '{"zone": "utc"}')]).split(tag)
    for begun in (tag, "<"):
        matcher = grammars.compile(Grammar("lark_with_schemas", text)).matcher()
        for token_id in backend.encode(before + begun, add_special_tokens=False).ids:
            matcher.push(token_id)
        forced = backend.decode(matcher.forced_ids())
        assert (tag + after).startswith(begun + forced)
        assert len(forced) >= 30 * after.startswith("\n{"), forced  # the name and the beginning of the arguments


FLAT = {
    "book": {
        "properties": {"city": {"type": "string"}, "nights": {"type": "integer"}, "class": {"enum": ["a", "b c"]}},
        "required": ["city", "nights"],
        "additionalProperties": False,
    },
    "any": {"type": "object"},
}
BY_VALUES = [family for family in FAMILIES if family.parser.form is not None]


@pytest.mark.parametrize("family", BY_VALUES)
@pytest.mark.parametrize("is_special", [False, True])
def test_forced_calls_may_have_the_familys_own_form(family: CallFamily, is_special: bool) -> None:
    backend, guidance, ids = tokenizer(*family.parser.tags if is_special else ())
    text = translate("lark_with_schemas", family.grammar(FLAT, only_one=True, special_ids=ids)).text
    matcher = LLMatcher(guidance, text)
    assert not matcher.get_error()

    def is_allowed(call: str) -> bool:
        return takes(matcher.deep_copy(), backend, call)

    rome = {"city": "<b>\nRome", "nights": 2}
    for good in (rome, {**rome, "class": "b c"}):
        call = own_form(family, "book", good)
        assert is_allowed(call)
        ((name, arguments),) = read(segments_of(AnswerReader(None, family.parser(FLAT)), call)).calls
        assert (name, json.loads(arguments)) == ("book", good)
    if family is not MINIMAX_M3:  # Its closing tags have the names, too, so that they can't be free.
        assert is_allowed(own_form(family, "any", {"x": 1, "y": 2}))
    for bad in ({"city": "Rome"}, {**rome, "nights": "two"}, {**rome, "class": "c"}, {**rome, "more": "1"}):
        assert not is_allowed(own_form(family, "book", bad))


# Schemas that clients pass on from others, with values that JSON Schema does not know.
WRONG = {
    "nullable": {"type": "string", "enum": ["a", None]},
    "numbers": {"type": "string", "enum": [1]},
    "one": {"type": "string", "enum": "a"},
    "nested": {"type": [{"type": "string"}], "enum": 5},
    "named": {"type": {"type": "string"}},
    "alternatives": {"anyOf": None, "oneOf": 5},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", WRONG)
def test_wrong_schema_of_an_argument_ends_no_request(family: CallFamily, key: str) -> None:
    schemas = {"f": {"type": "object", "properties": {key: WRONG[key]}}}
    _, guidance, ids = tokenizer()
    text = family.grammar(schemas, only_one=True, special_ids=ids)
    assert not LLMatcher(guidance, translate("lark_with_schemas", text).text).get_error()
    family.strict_grammar(schemas, ids)
    ((name, arguments),) = read(
        segments_of(AnswerReader(None, family.parser(schemas)), own_form(family, "f", {key: "a"}))
    ).calls
    assert (name, json.loads(arguments)) == ("f", {key: "a"})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_grammar_refuses_what_is_no_call_of_these_tools(family: CallFamily) -> None:
    zone = {"zone": "utc"}
    good = written(family, [("get_time", zone)])
    assert accepts(family, good)
    for bad in (
        "",
        f"Well. {good}",
        f"{good} Well.",
        f"{good}{family.separator or '}'}",
        good[:-1],
        written(family, [("unknown", zone)]),
        written(family, [("get_time", {})]),
        written(family, [("get_time", {"zone": "est"})]),
        written(family, [("get_time", {**zone, "more": 1})]),
        written(family, [("add-2", {"a": "1"})]),
        good.replace('"utc"', '  "utc"'),
    ):
        assert not accepts(family, bad), bad


@pytest.mark.parametrize(
    ("family", "special"), [(HERMES, ("<tool_call>", "</tool_call>")), (MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]"))]
)
def test_marks_that_are_special_tokens_are_forced_as_these(family: CallFamily, special: tuple[str, ...]) -> None:
    text = written(family, [("get_time", {"zone": "utc"}), ("add-2", {})])
    assert accepts(family, text, special=special)
    special_ids = tokenizer(*special)[2]
    assert compiled(family, *special, only_one=True).deep_copy().consume_token(special_ids[special[0]])


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_calls_may_have_all_their_marks_as_special_tokens(family: CallFamily) -> None:
    text = written(family, [("get_time", {"zone": "utc"})])
    assert accepts(family, text, special=family.parser.tags)
    assert accepts(family, text, only_one=True, special=family.parser.tags)


def test_the_engine_lets_through_exactly_the_special_tokens_that_are_marks() -> None:
    backend, _, special_ids = tokenizer("[TOOL_CALLS]", "[ARGS]")
    eos = backend.token_to_id("<|im_end|>")
    grammars = Grammars(backend, vocab_size=backend.get_vocab_size(), eos_token_ids=frozenset({eos}))
    text = MISTRAL_NAMED.grammar(SCHEMAS, only_one=True, special_ids=special_ids)
    matcher = grammars.compile(Grammar("lark_with_schemas", text, param="tools")).matcher()
    words = np.zeros(-(-backend.get_vocab_size() // 32), np.uint32)
    answer = written(MISTRAL_NAMED, [("get_time", {"zone": "utc"})])
    for token_id in backend.encode(answer, add_special_tokens=False).ids:
        matcher.fill_mask(words)
        assert words[token_id // 32] >> np.uint32(token_id % 32) & 1
        assert not words[eos // 32] >> np.uint32(eos % 32) & 1
        matcher.push(token_id)
    assert matcher.is_complete


@pytest.mark.parametrize(
    "keyword",
    [
        {"not": {}},
        {"properties": {"a": {"$ref": "https://example.com/a"}}},
        {"properties": {"a": {"type": "string", "pattern": "^a$", "minLength": 5}}, "required": ["a"]},
    ],
)
def test_a_schema_that_cannot_be_obeyed_is_refused_by_the_name_of_its_tool(keyword: dict[str, object]) -> None:
    backend, _, _ = tokenizer()
    eos = backend.token_to_id("<|im_end|>")
    grammars = Grammars(backend, vocab_size=backend.get_vocab_size(), eos_token_ids=frozenset({eos}))
    text = HERMES.grammar(
        {**SCHEMAS, "bad": {"type": "object", **keyword}}, only_one=True, special_ids={}, strict=["bad"]
    )
    with pytest.raises(InvalidRequest, match="the parameters of 'bad'") as caught:
        grammars.compile(Grammar("lark_with_schemas", text, param="tools"))
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("name", "template", "family"),
    [
        ("auto", "{{ messages }}", HERMES),
        ("auto", "<tool_call>\n{{ call | tojson }}\n</tool_call>", HERMES),
        ("auto", "<tool_call>\n<function=example>", QWEN_CODER),
        ("auto", "[TOOL_CALLS] [", MISTRAL),
        ("auto", "[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_NAMED),
        ("auto", """<|start_header_id|>{{ '"parameters": ' }}""", LLAMA),
        ("auto", "<|im_start|>system\nList of tools: {{ tools }}", LFM2),
        ("auto", "<|tool|>{{ message['tools'] }}<|/tool|>", PHI4),
        ("none", "<tool_call>", None),
        ("llama3_json", "<tool_call>", LLAMA),
        ("mistral", "", MISTRAL),
        ("mistral", "[ARGS]", MISTRAL_NAMED),
    ],
)
def test_a_family_is_recognised_by_the_template_or_named(name: str, template: str, family: CallFamily | None) -> None:
    assert family_of(name, template) is family
