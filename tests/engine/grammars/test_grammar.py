"""Tests of what a choice may go on with, on a small tokenizer."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from types import SimpleNamespace
from unittest.mock import Mock

import llguidance
import numpy as np
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from oaiserve.engine.grammars import grammar as grammar_module
from oaiserve.engine.grammars.grammar import (
    GrammarGivenUp,
    Grammars,
    GrammarViolation,
    Matcher,
    Tokens,
)
from oaiserve.engine.grammars.notations import Translated, translate
from oaiserve.engine.request import Grammar, GrammarKind
from oaiserve.engine.text.detokenize import TokenTable
from oaiserve.errors import InvalidRequest
from tests.engine.grammars.plain import (
    BACKEND,
    EOS,
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
from tests.engine.text.tokenizers_for_tests import SPECIALS, sentencepiece, wordpiece

SPECIAL_IDS = [BACKEND.token_to_id(token) for token in SPECIALS]


def texts(token_ids: set[int]) -> set[str]:
    return {BACKEND.decode([token_id], skip_special_tokens=False) for token_id in token_ids}


def test_only_tokens_that_the_grammar_allows_may_come() -> None:
    matcher = compiled("regex", "hello|help|or").matcher()
    assert texts(allowed(matcher)) == {"h", "he", "hell", "hello", "o", "or"}
    assert texts(allowed(pushed(matcher, "hel"))) == {"l", "p"}


def test_a_mask_may_have_signed_words() -> None:
    matcher = compiled("regex", "[a-z]+").matcher()
    unsigned = np.zeros((2, -(-VOCAB_SIZE // 32)), np.uint32)[0]
    signed = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    matcher.fill_mask(unsigned)
    matcher.fill_mask(signed)
    assert unsigned.any()
    assert np.array_equal(unsigned, signed.view(np.uint32))


def test_the_end_may_come_exactly_where_the_grammar_may_end() -> None:
    matcher = compiled("regex", "a{1,2}").matcher()
    assert EOS not in allowed(matcher)
    assert allowed(pushed(matcher, "a")) == {*ids("a"), EOS}
    matcher.push(EOS)
    assert matcher.is_complete


def test_all_ends_of_sequence_are_allowed_together() -> None:
    matcher = make_grammars(eos=(EOS, SPECIAL_IDS[0])).compile(Grammar("regex", "a*")).matcher()
    assert allowed(matcher) & set(SPECIAL_IDS) == {EOS, SPECIAL_IDS[0]}


@pytest.mark.parametrize(
    ("kind", "text"), [("regex", "[0-9]{2}"), ("choice", '["1", "23"]'), ("json_schema", '{"enum": [23]}')]
)
def test_a_grammar_of_any_kind_may_stand_behind_a_prefix(kind: GrammarKind, text: str) -> None:
    prefix = f'<[{SPECIAL_IDS[0]}]> "final: "'
    matcher = GRAMMARS.compile(Grammar(kind, text, prefix=prefix)).matcher()
    matcher.push(SPECIAL_IDS[0])
    pushed(matcher, "final: 23").push(EOS)
    assert matcher.is_complete
    assert is_refused("final: 23", compiled(kind, text).matcher())


def test_special_tokens_are_no_text() -> None:
    matcher = compiled("regex", ".*").matcher()
    assert allowed(matcher) & set(SPECIAL_IDS) == {EOS}
    with pytest.raises(GrammarViolation):
        matcher.push(BACKEND.token_to_id("<|im_start|>"))


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE - 5, VOCAB_SIZE - 7, 288])
def test_no_id_beyond_the_models_or_the_tokenizers_is_allowed(vocab_size: int) -> None:
    matcher = make_grammars(vocab_size).compile(Grammar("regex", "(?:.|\n)*")).matcher()
    known = set(range(min(vocab_size, BACKEND.get_vocab_size())))
    assert allowed(matcher, vocab_size) <= known
    words = mask_of(matcher, vocab_size)
    matcher.fill_free(words)
    assert set(allowed_ids(words)) == set(range(vocab_size))


@pytest.mark.parametrize(
    ("kind", "text", "answer", "is_complete"),
    [
        ("choice", '["a", "ab"]', "a", False),
        ("choice", '["a", "ab"]', "ab", True),
        ("regex", "[0-9]{2}", "1", False),
        ("regex", "[0-9]{2}", "12", True),
        ("regex", "[0-9]+", "12", False),
        ("json_object", "", "{", False),
        ("json_object", "", '{"a": [1, {}]}', True),
        ("json_schema", '{"type": "integer"}', "5", False),
        ("json_schema", '{"const": 5}', "5", True),
        ("json_schema", '{"type": "integer", "multipleOf": 60}', "0", True),
        ("lark", 'start: "a" | "a" "b"', "a", False),
        ("lark", 'start: "a" | "a" "b"', "ab", True),
        ("lark", 'start: "<x>" /<[0-9]+>/ // <|im_end|>', "<x><12>", True),  # a sign in quotes means itself
        ("gbnf", 'root ::= "a"+ "."', "aa", False),
        ("gbnf", 'root ::= "a"+ "."', "aa.", True),
    ],
)
def test_an_answer_is_complete_if_nothing_can_follow(
    kind: GrammarKind, text: str, answer: str, is_complete: bool
) -> None:
    matcher = pushed(compiled(kind, text).matcher(), answer)
    assert matcher.is_complete == is_complete
    assert (allowed(matcher) == {EOS}) == is_complete


def test_a_character_may_be_split_over_tokens() -> None:
    matcher = compiled("choice", '["€uro"]').matcher()
    for byte in "€".encode():
        token_id = BACKEND.token_to_id(bytes_to_unicode()[byte])
        assert token_id in allowed(matcher)
        matcher.push(token_id)
    assert pushed(matcher, "uro").is_complete


def test_a_property_cannot_come_twice_in_another_spelling() -> None:
    schema = '{"type":"object","properties":{"a":{"type":"string"}},"additionalProperties":{"type":"integer"}}'
    assert is_refused('{"a": "x", "\\u0061": 1}', compiled("json_schema", schema).matcher())
    assert pushed(compiled("json_schema", schema).matcher(), '{"a": "x", "b": 1}').is_complete


def test_matchers_of_a_grammar_do_not_share_their_choice() -> None:
    grammar = compiled("regex", "ab|cd")
    one = grammar.matcher()
    other = grammar.matcher()
    pushed(one, "a")
    assert texts(allowed(other)) == {"a", "c"}


def test_a_grammar_is_compiled_once(counted: Mock) -> None:
    grammars = make_grammars()
    first = grammars.compile(Grammar("regex", "a", "response_format"))
    second = grammars.compile(Grammar("regex", "a", "structured_outputs"))
    other = grammars.compile(Grammar("lark", 'start: "a"'))
    assert [each.was_cached for each in (first, second, other)] == [False, True, False]
    assert first.compile_ns > 0
    assert counted.call_count == 2


def test_a_refusal_is_kept_too_and_names_the_parameter_of_each_request(counted: Mock) -> None:
    grammars = make_grammars()
    for param in ("response_format", "structured_outputs"):
        with pytest.raises(InvalidRequest, match=r"the regex has a '\(' without") as refused:
            grammars.compile(Grammar("regex", "(", param))
        assert refused.value.param == param
    assert counted.call_count == 1


def test_the_number_of_grammars_that_are_kept_is_bounded(counted: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MOST_KEPT", 2)
    grammars = make_grammars()
    for text in ("a", "b", "a", "c", "a", "b"):  # the last one was the first to go
        grammars.compile(Grammar("regex", text))
    assert counted.call_count == 4


def test_those_who_want_the_same_grammar_at_once_wait_for_one_to_compile_it(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = make_grammars()
    begun = threading.Event()
    go = threading.Event()

    def slow(kind: GrammarKind, text: str, **how: bool) -> Translated:
        assert not begun.is_set(), "it is compiled twice"
        begun.set()
        go.wait()
        return translate(kind, text, **how)

    monkeypatch.setattr(grammar_module, "translate", slow)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(grammars.compile, Grammar("regex", "a"))
        begun.wait()
        others = [threads.submit(grammars.compile, Grammar("regex", "a")) for _ in range(2)]
        go.set()
        assert [future.result().was_cached for future in (first, *others)] == [False, True, True]


def test_a_grammar_whose_matcher_has_failed_is_compiled_again() -> None:
    """All matchers share the states that were made, so what one has used up is used up for all."""
    grammars = make_grammars()
    grammar = Grammar("regex", "a")
    with pytest.raises(GrammarViolation):
        pushed(grammars.compile(grammar).matcher(), "b")
    assert not grammars.compile(grammar).was_cached
    assert grammars.compile(grammar).was_cached


def test_a_mask_that_takes_too_much_ends_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "_LIMITS", limits)
    matcher = compiled("regex", ".*a.{50}").matcher()
    with pytest.raises(GrammarGivenUp, match="too many states"):
        [allowed(pushed(matcher, character)) for character in "abaab" * 20]


def test_an_allowed_token_may_lead_beyond_a_limit_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "_LIMITS", limits)
    with pytest.raises(GrammarGivenUp, match="too many states"):
        pushed(compiled("regex", ".*a.{50}").matcher(), "".join(random.Random(1).choices("ab", k=1000)))


def test_refusal_of_much_work_gives_no_advice_about_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(initial_lexer_fuel=100, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "_LIMITS", limits)
    with pytest.raises(InvalidRequest, match=": the grammar is too large"):
        compiled("regex", "a?" * 300 + "a" * 300)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock between two of whose reads a mask is made, which takes `taken_ns`."""
    fake = SimpleNamespace(taken_ns=0, seconds=0)
    reads = accumulate(iter(lambda: fake.taken_ns, None))
    monkeypatch.setattr(grammar_module, "thread_time_ns", lambda: next(reads))
    monkeypatch.setattr(grammar_module, "monotonic_ns", lambda: fake.seconds * 10**9)
    return fake


def test_all_answers_of_a_client_share_the_time_that_grammars_may_exceed(clock: SimpleNamespace) -> None:
    grammars = make_grammars()
    texts = ("[a-y]*", "[a-x]*", "[a-x]*")
    clients = ("one", "one", "other")
    pairs = zip(texts, clients, strict=True)
    first, second, others = (grammars.compile(Grammar("regex", text), client).matcher() for text, client in pairs)
    clock.taken_ns = grammar_module.TOKEN_NS + 20_000_000
    for matcher in [first, second] * 6:
        allowed(matcher)
    clock.taken_ns = grammar_module.TOKEN_NS - 1_000_000
    for _ in range(40):  # Each of these gives time back.
        allowed(first)
    clock.taken_ns = grammar_module.TOKEN_NS + 20_000_000  # 12 * 20 - 40 * 1 ms are used up, and 250 ms are allowed
    allowed(second)
    allowed(second)
    with pytest.raises(GrammarGivenUp, match="5 ms a token"):
        allowed(first)
    allowed(others)
    clock.taken_ns = 0
    allowed(first)  # whatever is fast goes on
    clock.taken_ns = grammar_module.TOKEN_NS + 20_000_000
    clock.seconds = 10
    allowed(second)


def test_drafts_and_tokens_take_of_the_same_time(clock: SimpleNamespace) -> None:
    matcher = make_grammars().compile(Grammar("regex", "[a-x]*"), "drafts").matcher()
    clock.taken_ns = 40_000_000
    rows = np.zeros((2, -(-VOCAB_SIZE // 32)), np.uint32)
    matcher.fill_masks_behind(ids("ab"), rows)
    assert rows[0].any()
    assert not rows[1].any()  # the first one has taken the time of both
    assert matcher.num_possible(ids("ab")) == 0  # A slow grammar is not evaluated ahead.
    pushed(matcher, "a")
    matcher.fill_mask(rows[0])  # Until now, 4 * 40 - 2 * 5 ms are used up, and 250 ms are allowed.
    for _ in range(2):
        matcher.fill_mask(rows[0])
    with pytest.raises(GrammarGivenUp):
        matcher.fill_mask(rows[0])


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", '{"type": "object", "properties": {"a": {"not": {}}}}', "'not' at $.properties.a.not"),
        (
            "json_schema",
            '{"type": "array", "minItems": 1, "items": {"type": "string", "pattern": "^a$", "minLength": 2}}',
            "at $.items.",
        ),
        ("json_schema", "{", "not valid JSON"),
        ("regex", "(?=a)", "looks around"),
        ("lark", "start: a", "unknown name"),
        ("lark", "start: <|im_end|>", "'<|im_end|>', which is not supported"),
        ("lark", "start: <[5]>", "not supported"),
        ("lark", 'start: %json {"not": {}}', "'not' at $.not is not supported, in the grammar's '%json'"),
        ("lark", 'start: %json {"type": }', "'%json' that cannot be read"),
        ("lark", "start: %json " + '{"items": ' * 5000, "'%json' that cannot be read"),
        ("lark", "start: " + "%lark { start: " * 3000, "Unmatched"),
        ("lark", "start: a\na[temperature=0.5]: /.*/", "'temperature=', which is not supported"),
        ("lark", "start: @schema_0 %json {}", "'@schema_0', which is not supported"),
        ("lark", "start: " + "(" * 5000, "too deeply nested"),
        ("lark", "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(3000))]), "more than 500 definitions"),
        ("lark", "start: " + "%json {} " * 501, "more than 500 definitions"),
        ("lark", "start: start", "no text can satisfy it"),
        ("lark", "a" * 2**17, "characters"),
        ("gbnf", "root ::= root", "no text can satisfy it"),
        ("choice", json.dumps(["a"] * 20_000), "at most 10000 choices"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_its_reason(kind: GrammarKind, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiled(kind, text)
    assert says in refused.value.message
    assert refused.value.param == "response_format"
    assert len(refused.value.message) < 500


def test_a_refused_grammar_is_quoted_as_the_client_sent_it() -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiled("lark", "start: foo")
    assert "start: foo" in refused.value.message
    assert "llguidance" not in refused.value.message


def test_a_lark_grammar_may_have_schemas_texts_to_stop_at_and_limits_of_tokens() -> None:
    schema = '{"properties": {"a": {"type": "boolean"}}, "x-guidance": {"key_separator": "=", "lenient": true}}'
    matcher = compiled("lark", f'start: "%json {{" a # %json {{\na[capture]: %json {schema}').matcher()
    assert pushed(matcher, '%json {{"a"=true}').is_complete
    matcher = compiled("lark", 'start: a "!"\na[stop="."]: /[a-c]*/').matcher()
    assert is_refused("ab!", matcher)
    assert pushed(compiled("lark", 'start: a "!"\na[stop="."]: /[a-c]*/').matcher(), "ab.!").is_complete
    matcher = compiled("lark", 'start: a "!"\na[max_tokens=2]: /[xyz]*/').matcher()
    assert allowed(pushed(matcher, "xy")) == set(ids("!"))
    words = compiled("lark", 'start: S\nS: %regex {"substring_words": "a b c"}').matcher()
    assert is_refused("a c", words)


def test_no_draft_has_more_tokens_than_a_rule_of_a_grammar_may_have() -> None:
    matcher = compiled("lark", 'start: a "!"\na[max_tokens=2]: /[xyz]*/').matcher()
    draft = ids("xyzx")[: matcher.num_possible(ids("xyzx"))]
    rows = np.zeros((1 + len(draft), -(-VOCAB_SIZE // 32)), np.uint32)
    matcher.fill_mask(rows[0])
    matcher.fill_masks_behind(draft, rows[1:])
    assert set(allowed_ids(rows[2])) == set(ids("!"))


def test_a_lark_grammar_may_begin_with_a_line_of_options_that_change_nothing() -> None:
    matcher = compiled("lark", '%llguidance {"no_forcing": true}\nstart: "yes"').matcher()
    assert pushed(matcher, "yes").is_complete
    for options in ('{"allow_invalid_utf8": true}', "{", "[]"):
        with pytest.raises(InvalidRequest, match="options"):
            compiled("lark", f'%llguidance {options}\nstart: "yes"')


def test_a_tokenizer_that_puts_a_space_in_front_has_exact_bytes_all_the_same() -> None:
    backend = sentencepiece()
    grammars = Grammars(backend, vocab_size=backend.get_vocab_size(), eos_token_ids=frozenset([2]))
    matcher = grammars.compile(Grammar("json_schema", '{"const": {"hello": "é world"}}')).matcher()
    table = TokenTable(backend)
    text = b""
    while not matcher.is_complete:
        token_id = allowed_ids(mask_of(matcher, backend.get_vocab_size()))[-1]
        matcher.push(token_id)
        text += table.bytes_of(token_id)
    assert json.loads(text) == {"hello": "é world"}


def test_a_tokenizer_without_bytes_is_said_to_be_none_for_grammars() -> None:
    backend = wordpiece()
    grammars = Grammars(backend, vocab_size=backend.get_vocab_size(), eos_token_ids=frozenset([2]))
    with pytest.raises(InvalidRequest, match="this model's tokenizer"):
        grammars.compile(Grammar("json_object", ""))


def test_the_tokens_are_prepared_once_however_many_grammars_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    all_here = threading.Barrier(4)
    counted = Mock(side_effect=Tokens)

    def compile_one(number: int) -> Matcher:
        all_here.wait(timeout=30)
        return grammars.compile(Grammar("regex", f"a{{{number}}}")).matcher()

    monkeypatch.setattr(grammar_module, "Tokens", counted)
    grammars = make_grammars()
    assert counted.call_count == 0
    with ThreadPoolExecutor(5) as threads:
        threads.submit(grammars.prepared)
        for number, matcher in enumerate(threads.map(compile_one, range(1, 5)), start=1):
            assert pushed(matcher, "a" * number).is_complete
    assert counted.call_count == 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Count the grammars that are compiled."""
    counting = Mock(side_effect=translate)
    monkeypatch.setattr(grammar_module, "translate", counting)
    return counting


@pytest.mark.parametrize("length", [0, 9, 250, 260, 5_000])
@pytest.mark.parametrize("end", ['"', '", "n": 1', '☺", "n": '])
def test_beginning_with_a_text_of_any_length_is_the_same_as_taking_its_tokens(length: int, end: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
    grammar = compiled("json_schema", json.dumps({**schema, "required": ["a", "n"], "additionalProperties": False}))
    text = f'{{"a": "{"two words "[: length % 10] + "two words é" * (length // 10)}{end}'
    begun = grammar.matcher()
    assert begun.begins(text.encode())
    assert allowed(begun) == allowed(pushed(grammar.matcher(), text))
    assert not grammar.matcher().begins(f"{text}}}}}".encode())


def test_text_before_an_answer_takes_of_the_same_time(clock: SimpleNamespace) -> None:
    grammars = make_grammars()
    first, second, others = (grammars.compile(Grammar("regex", "a*"), client) for client in ("one", "one", "other"))
    clock.taken_ns = grammar_module.BEGUN_NS
    assert first.matcher().begins(b"a" * 2_000), "that is its usual time"
    clock.taken_ns = 20_000_000  # for 8 tokens
    assert first.matcher().begins(b"a" * 80)
    with pytest.raises(GrammarGivenUp, match="250 ms beyond that"):
        second.matcher().begins(b"a" * 80)
    assert others.matcher().begins(b"a" * 80)
