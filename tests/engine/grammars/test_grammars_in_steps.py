"""Grammars in steps: answers are those of a plain loop, however steps overlap and whatever else is in them."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from oaiserve.engine.grammars.grammar import GrammarGivenUp, Grammars, Matcher
from oaiserve.engine.request import (
    Event,
    Failed,
    Finished,
    Grammar,
    Request,
    SamplingParams,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
)
from oaiserve.engine.requests import results
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.errors import InternalError, InvalidRequest
from oaiserve.facts.step_record import HostPart
from oaiserve.runtime import THREADS
from tests.engine.answers import Answers, run_to_the_end
from tests.engine.device import GRAMMARS, REASONING, Device, answers, drawn_after, some_requests
from tests.engine.doubles import (
    EOS,
    TOKENIZER,
    Clock,
    Inbox,
    ScriptedRunner,
    letter_id,
    make_engine,
    request,
    wait_until_idle,
)
from tests.engine.grammars.plain import allowed_ids, mask_of

COMPILED = Grammars(TOKENIZER.backend, vocab_size=TOKENIZER.vocab_size, eos_token_ids=frozenset([EOS]))
in_both_ways = pytest.mark.usefixtures("overlap")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def plain_answer(asked: Request) -> tuple[list[int], str]:
    """Return the ids of an answer and why it ends, one token after the other: mask, draw, push.

    Texts of reasoning are single letters, and the tokens of answers begin with them or do not have them.
    """
    params = asked.params
    reasoning = asked.params.reasoning
    prompt = asked.prompts[0].token_ids
    matcher = None if params.grammar is None else COMPILED.compile(params.grammar).matcher()
    ids = list(prompt)
    thinks = reasoning is not None and not (matcher is not None and reasoning.opening)
    num_thought = 0
    while len(ids) < len(prompt) + params.max_tokens:
        is_begun = thinks and (not reasoning.opening or len(ids) > len(prompt))
        is_spent = is_begun and reasoning.budget is not None and num_thought >= reasoning.budget
        ends = [EOS] if params.ignore_eos or len(ids) - len(prompt) < params.min_tokens else []
        mask = None
        if is_spent:
            mask = np.zeros(-(-TOKENIZER.vocab_size // 32), np.uint32)
            (closing,) = TOKENIZER.encode_plain(reasoning.closing)
            mask[closing // 32] = np.uint32(1 << closing % 32)
            ends = []
        elif matcher is not None:
            mask = mask_of(matcher, TOKENIZER.vocab_size)
            if thinks:
                matcher.fill_free(mask)
                ends = [EOS]
        if mask is not None and set(allowed_ids(mask)) - set(ends):
            for end in ends:
                mask[end // 32] &= np.uint32(0xFFFFFFFF ^ (1 << end % 32))
        token_id = drawn_after(ids, mask)
        ids.append(token_id)
        if token_id == EOS and not (matcher is None and params.ignore_eos):
            return ids[len(prompt) :], "stop"
        if thinks:
            text = TOKENIZER.backend.decode([token_id])
            if not is_begun:
                thinks = text.startswith(reasoning.opening)
            else:
                num_thought += 1
                thinks = reasoning.closing not in text
                behind = text.partition(reasoning.closing)[2].strip()
                if not thinks and behind and matcher is not None:
                    raise AssertionError("a token goes on behind the end of the reasoning")
        elif matcher is not None:
            matcher.push(token_id)
        if not thinks and matcher is not None and matcher.is_complete:
            return ids[len(prompt) :], "stop"
    return ids[len(prompt) :], "length"


def constrained_requests(rng: random.Random, number: int) -> list[Request]:
    requests = []
    for i in range(number):
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 5, 20, 30]),
            grammar=rng.choice([None, *GRAMMARS]),
            reasoning=rng.choice(REASONING),
            min_tokens=rng.choice([0, 0, 3, 12]),
            ignore_eos=rng.random() < 0.2,
            n=rng.choice([1, 1, 2]),
            logprobs=rng.choice([None, None, None, 0]),
        )
        prompt = [*range(rng.randrange(3) * 4), *(rng.randrange(50) for _ in range(rng.randint(1, 9)))]
        requests.append(Request(f"constrained {i}", (TokenPrompt(prompt),), params))
    return requests


@in_both_ways
@pytest.mark.parametrize("kv_blocks", [400, 30], ids=["much cache", "little cache"])
@pytest.mark.parametrize("few_tokens", [0, 16, 1000], ids=lambda few: f"forced below {few} tokens")
def test_answers_are_those_of_a_plain_loop(few_tokens: int, kv_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FEW_TOKENS", few_tokens)
    # Masks take no time here: Python may collect the garbage of many tests while one is filled.
    monkeypatch.setattr("oaiserve.engine.grammars.grammar.thread_time_ns", lambda: 0)
    rng = random.Random(few_tokens)
    requests = constrained_requests(rng, 40)
    device = Device()
    outcome = answers(device, requests, kv_blocks=kv_blocks, max_model_len=80)
    for each in requests:
        expected = plain_answer(each)
        for choice in range(each.params.n):
            key = (each.request_id, choice)
            answer = outcome.choices[key]
            assert (answer.token_ids, answer.finish_reason) == expected
            assert answer.text == TOKENIZER.backend.decode(answer.token_ids)
    assert (outcome.total("num_forced_tokens") > 50) == (few_tokens > 0)
    assert (device.num_superseded > 5) == (few_tokens > 0 and device.is_asynchronous)


@in_both_ways
def test_the_neighbours_of_constrained_answers_get_what_they_get_without_these() -> None:
    rng = random.Random(2)
    plain = [replace(one, params=replace(one.params, grammar=None)) for one in some_requests(rng, 40)]
    expected = answers(Device(), plain, kv_blocks=400, max_model_len=80)
    mixed = [one for pair in zip(plain, constrained_requests(rng, 40), strict=True) for one in pair]
    answers(Device(), mixed, kv_blocks=60, max_model_len=80).check(expected)


@pytest.mark.parametrize("grammar", GRAMMARS[:2], ids=["object", "enum"])
def test_each_forced_id_is_the_only_one_of_its_mask(grammar: Grammar) -> None:
    rng = random.Random(0)
    num_forced = 0
    for _ in range(20):
        matcher = COMPILED.compile(grammar).matcher()
        while not matcher.is_complete:
            forced = matcher.forced_ids()
            num_forced += len(forced)
            for token_id in forced:
                assert allowed_ids(mask_of(matcher, TOKENIZER.vocab_size)) == [token_id]
                matcher.push(token_id)
            drawn = rng.choice(allowed_ids(mask_of(matcher, TOKENIZER.vocab_size)))
            if drawn == EOS:
                break
            matcher.push(drawn)
    assert num_forced > 20


def test_ids_are_forced_only_where_a_long_text_is_not_cut() -> None:
    """Near the cut of a long text, the ids may not be those of the whole."""
    matcher = COMPILED.compile(Grammar("json_schema", json.dumps({"const": "hello" * 100}))).matcher()
    (hello,) = TOKENIZER.encode(TextPrompt("hello"))
    matcher.push(letter_id('"'))
    forced = matcher.forced_ids()
    assert forced == [hello] * len(forced)
    assert 10 < len(forced) < 60


def events_of(runner: ScriptedRunner, asked: Request) -> tuple[str, list[TokenChunk], Event]:
    with make_engine(runner, tokenize_workers=0) as engine:
        *events, end = engine.stream(asked)
        snapshot = engine.snapshot()
    assert snapshot.blocks_used == 0
    chunks = [event for event in events if isinstance(event, TokenChunk)]
    return "".join(chunk.text for chunk in chunks), chunks, end


def obeying(letters: str) -> Callable[[Sequence], int]:
    return lambda sequence: letter_id(letters[sequence.num_generated])


@in_both_ways
def test_a_stop_string_goes_before_the_end_of_a_grammar() -> None:
    one_request = request(max_tokens=20, grammar=Grammar("choice", '["abc"]'), stop=("bc",), logprobs=0)
    text, chunks, _ = events_of(ScriptedRunner(obeying("abc")), one_request)
    assert (text, chunks[-1].stop_reason) == ("a", "bc")


@pytest.mark.parametrize(
    ("continued", "answer"),
    [("ab", "cd"), ("", "abcd"), ("b", "abcd"), ("Sure: ", "abcd"), ("abcd", "abcd")],
)
def test_an_answer_goes_on_from_the_beginning_of_an_allowed_text(continued: str, answer: str) -> None:
    one_request = request(max_tokens=20, grammar=Grammar("choice", '["abcd"]', continued=continued))
    assert events_of(ScriptedRunner(obeying(answer + "!")), one_request)[0] == answer


def test_an_answer_goes_on_from_json_without_blanks() -> None:
    schema = {"type": "object", "properties": {"a": {"const": "é b"}, "n": {"const": 1}}, "required": ["a", "n"]}
    text = json.dumps({**schema, "additionalProperties": False})
    continued = '{"a":"\\u00e9 '
    one_request = request(max_tokens=20, grammar=Grammar("json_schema", text, continued=continued))
    answer, _, _ = events_of(ScriptedRunner(obeying('b", "n": 1}!')), one_request)
    assert json.loads(continued + answer) == {"a": "é b", "n": 1}


def test_text_before_an_answer_is_read_once_for_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    begins = Matcher.begins
    monkeypatch.setattr(Matcher, "begins", lambda matcher, text: read.append(text) or begins(matcher, text))
    ends = {0: "cd!", 1: "xy!", 2: "cd!"}
    runner = ScriptedRunner(lambda sequence: letter_id(ends[sequence.index][sequence.num_generated]))
    asked = request(max_tokens=9, n=3, grammar=Grammar("choice", '["abcd", "abxy"]', continued="ab"))
    _, chunks, end = events_of(runner, asked)
    texts = ["".join(chunk.text for chunk in chunks if chunk.index == index) for index in ends]
    assert (texts, read) == (["cd", "xy", "cd"], [b"ab"])
    assert isinstance(end, Finished)


@pytest.mark.parametrize("error", [GrammarGivenUp("too long"), BaseException("a panic in Rust")], ids=repr)
def test_request_whose_grammar_cannot_begin_fails_alone(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def begins(matcher: Matcher, text: bytes) -> bool:
        raise error

    monkeypatch.setattr(Matcher, "begins", begins)
    bad = request("bad", max_tokens=9, n=2, grammar=Grammar("choice", '["abcd"]', continued="ab"))
    inbox = Inbox()
    with make_engine(grammars=COMPILED, tokenize_workers=0) as engine:
        for one in (request("before", max_tokens=9), bad, request("after", max_tokens=9)):
            engine.submit(one, inbox)
        ended = inbox.wait_terminal("before", "bad", "after")
        wait_until_idle(engine)
        assert (engine.failure, engine.num_waiting, engine.snapshot().blocks_used) == (None, 0, 0)
    assert isinstance(ended["bad"], Failed)
    assert isinstance(ended["bad"].error, InvalidRequest if isinstance(error, GrammarGivenUp) else InternalError)
    assert isinstance(ended["before"], Finished)
    assert isinstance(ended["after"], Finished)


@in_both_ways
def test_forced_tokens_are_not_drawn_and_come_with_the_token_before() -> None:
    answer = '{"abc": "xx"}'
    runner = ScriptedRunner(obeying(answer + "!"))
    schema = {"properties": {"abc": {"enum": ["xx", "yy"]}}, "required": ["abc"], "additionalProperties": False}
    one_request = request(max_tokens=20, grammar=Grammar("json_schema", json.dumps({"type": "object", **schema})))
    text, chunks, end = events_of(runner, one_request)
    assert text == answer
    sizes = [len(chunk.token_ids) for chunk in chunks]
    assert (max(sizes), sum(sizes)) == (8, len(answer))
    assert (end.usage.completion_tokens, end.account.num_forced_tokens) == (len(answer), len(answer) - len(sizes))
    # With overlap, the step in flight has been launched to draw what is forced meanwhile.
    tokens = [chunk[2] for step in runner.steps for chunk in step]
    assert max(tokens[1:]) == (7 if runner.is_asynchronous else 8)
    assert list(end.account.inter_token_ns).count(0) >= len(answer) - len(sizes)
    assert [event.kind for event in end.account.events].count("prefill_chunk") == 1


@in_both_ways
def test_a_forced_token_that_other_parameters_forbid_ends_the_request_with_an_error() -> None:
    one_request = request(max_tokens=20, grammar=Grammar("choice", '["ab"]'), allowed_token_ids=(letter_id("a"),))
    _, _, end = events_of(ScriptedRunner(obeying("ab")), one_request)
    assert end.account.num_forced_tokens == 0


@in_both_ways
def test_a_token_that_is_not_in_the_grammar_fails_its_request_and_no_other() -> None:
    runner = ScriptedRunner(lambda one: letter_id("z" if one.num_generated == 2 else "a"))
    wrong = request("wrong", max_tokens=9, grammar=Grammar("regex", "a*"))
    ended = run_to_the_end(make_engine(runner, tokenize_workers=0), [wrong, request("sound", max_tokens=9)]).ended
    assert isinstance(ended["sound"], Finished)
    assert ended["wrong"].error.status == 500
    assert "grammar" in str(ended["wrong"].error)


@in_both_ways
@pytest.mark.parametrize("error", [GrammarGivenUp("too many states"), ValueError("a bug")], ids=repr)
def test_a_grammar_that_fails_fails_its_request_and_no_other(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Matcher, words: np.ndarray) -> None:
        raise error

    monkeypatch.setattr(Matcher, "fill_mask", fail)
    broken = request("broken", max_tokens=9, grammar=Grammar("regex", "[a-z]*"))
    ended = run_to_the_end(make_engine(tokenize_workers=0), [broken, request("sound", max_tokens=9)]).ended
    assert isinstance(ended["sound"], Finished)
    is_clients = isinstance(error, GrammarGivenUp)
    assert ended["broken"].error.status == (400 if is_clients else 500)
    assert ended["broken"].error.param == ("response_format" if is_clients else None)
    assert ("too many states" in str(ended["broken"].error)) == is_clients


@in_both_ways
def test_client_whose_masks_take_long_waits_for_them_while_others_go_on_and_gets_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill_mask = Matcher.fill_mask

    def slow(self: Matcher, words: np.ndarray) -> None:
        fill_mask(self, words)
        self.mask_ns = 20_000_000

    monkeypatch.setattr(Matcher, "fill_mask", slow)

    masked = request("masked", max_tokens=8, grammar=Grammar("regex", "[a-z]*"), ignore_eos=True)
    plain = request("plain", max_tokens=60, ignore_eos=True)

    def run(*requests: Request) -> tuple[list[list[str]], Answers]:
        clock = Clock()
        runner = ScriptedRunner(launching=lambda _: clock.move(1))
        engine = make_engine(runner, clock_ns=clock, tokenize_workers=0)
        answers = run_to_the_end(engine, [replace(each, client=each.request_id) for each in requests])
        return [sorted(name for name, *_ in step) for step in runner.steps], answers

    steps, together = run(masked, plain)
    alone_steps, alone = run(masked)
    assert together.choices["masked", 0] == alone.choices["masked", 0]
    assert len(alone_steps) < 12
    beside = [number for number, step in enumerate(steps) if "masked" in step]
    # From the first decode of the other client on, a mask of 20 ms waits for four steps. They take a second here, and
    # masks may take 5 ms of each.
    assert [second - first for first, second in pairwise(beside[2:])] == [4] * (len(beside) - 3)
    assert len(beside) == len(alone_steps)
    assert all("plain" in step for step in steps[1:])


@in_both_ways
def test_the_account_of_a_request_says_how_its_grammar_was_compiled_and_what_came_of_it(
    parts_entered: list[str],
) -> None:
    schema = json.dumps({"enum": ["abcd", "axyz"]})
    requests = [request(name, max_tokens=9, n=2, grammar=Grammar("json_schema", schema)) for name in "ab"]
    with make_engine(Device(), tokenize_workers=0, runtime=THREADS) as engine:  # Compiling takes real time.
        ended = [list(engine.stream(one))[-1] for one in (*requests, request("plain", max_tokens=9))]
        snapshot = engine.snapshot()
    *constrained, plain = [end.account for end in ended]
    for end, cache in zip(ended, ("miss", "hit"), strict=False):
        account = end.account
        times = end.times
        compiled = account.events[0]
        assert (compiled.kind, compiled.choice) == ("grammar_compiled", None)
        assert times.tokenize_started <= compiled.at_ns <= times.tokenized
        assert compiled.details == {"compile_ns": account.grammar_compile_ns, "cache": cache, "kind": "json_schema"}
        assert 0 < account.grammar_compile_ns <= compiled.at_ns - times.tokenize_started
        assert account.num_masked_draws > 0
        assert account.num_forced_tokens > 0
    assert (plain.grammar_kind, plain.grammar_compile_ns, plain.num_masked_draws) == (None, None, 0)
    assert "grammar_compiled" not in [event.kind for event in plain.events]
    assert snapshot.host_ns[HostPart.MASKS] > 0
    assert any(name.startswith("masks") for name in parts_entered)
    num_masked = sum(account.num_masked_draws for account in constrained)
    assert num_masked == snapshot.num_masked_draws
    assert sum(account.num_forced_tokens for account in constrained) == snapshot.num_forced_tokens


def test_a_request_whose_grammar_is_refused_is_known_to_have_one() -> None:
    with make_engine(tokenize_workers=0) as engine:
        (failed,) = engine.stream(request(grammar=Grammar("regex", "(")))
    assert (failed.account.grammar_kind, failed.account.grammar_compile_ns, failed.account.events) == (
        "regex",
        None,
        [],
    )
