"""Tests how bodies are parsed and checked, without a server."""

import json
import math
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import input_token_count_params, response_compact_params, response_create_params

from oaiserve.engine.request import SamplingParams
from oaiserve.engine.types.logprobs import TokenLogprobs, text_of
from oaiserve.errors import InvalidRequest
from oaiserve.http.fair_turns import at_once
from oaiserve.routes.adaptations import HEADER, Adaptations
from oaiserve.routes.answer.logprobs import CompletionLogprobs, completion_logprobs_in_parts
from oaiserve.routes.chat.constraints import grammar
from oaiserve.routes.intake import decode as body_decode
from oaiserve.routes.intake import decode as protocol
from oaiserve.routes.intake.body_types import ChatBody, CompletionBody
from oaiserve.routes.intake.decode import MOST_TOLD, num_ids, parse
from oaiserve.routes.intake.parameters import sampling_params
from oaiserve.routes.intake.wishes import NAMES
from tests.engine.logprobs_for_tests import token_logprobs
from tests.routes.asking import BODIES, CHAT, COMPLETIONS, RESPONSES
from tools.reference import bodies_of_routes

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def ignore(place: str, what: str) -> None:
    """Take a note on what is read in another way."""


def refusal(body: bytes) -> InvalidRequest | None:
    try:
        parsed = at_once(parse(CompletionBody, body))
        sampling_params(parsed, SamplingParams(max_tokens=16, grammar=grammar(parsed, ignore)), {}, ignore)
    except InvalidRequest as error:
        return error
    return None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_a_refusal(body: bytes) -> None:
    error = refusal(body)
    assert error is None or error.status == 400


@given(st.dictionaries(st.sampled_from(CompletionBody.__struct_fields__), json_values, max_size=4))
def test_any_values_are_sampling_params_or_a_refusal_that_names_one(fields: dict[str, object]) -> None:
    error = refusal(msgspec.json.encode({"prompt": "Hi", **fields}))
    assert error is None or (error.param in fields and len(error.message) < 400)


@given(st.dictionaries(st.sampled_from([*CompletionBody.__struct_fields__, *sorted(NAMES), "other"]), json_values))
def test_a_large_body_is_read_like_a_small_one(fields: dict[str, object]) -> None:
    body = msgspec.json.encode({"prompt": "Hi", **fields})
    small = refusal(body)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(body_decode, "_MOST_NAMED_BYTES", 0)
        large = refusal(body)
    assert (small and small.message) == (large and large.message)


def test_100_000_unknown_names_take_little_memory_and_a_misspelled_one_is_noted() -> None:
    adaptations = Adaptations()
    names = ",".join(f'"temprature{number}":0' for number in range(100_000))
    tracemalloc.start()
    try:
        at_once(parse(CompletionBody, f'{{"prompt":"Hi",{names}}}'.encode(), None, adaptations.note))
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert "temperature" in adaptations.headers()[HEADER]


@given(st.lists(st.integers(), min_size=1) | st.lists(st.integers() | st.text() | st.lists(st.integers()), min_size=1))
def test_ids_are_counted_in_the_json_exactly_where_there_are_only_ids(values: list[Any]) -> None:
    expected = len(values) if all(isinstance(value, int) for value in values) else 0
    assert num_ids(msgspec.Raw(json.dumps(values).encode())) == expected


@pytest.mark.parametrize("value", [None, msgspec.Raw(b'"1,2"'), msgspec.Raw(b"12"), msgspec.Raw(b'{"a":1,"b":2}')])
def test_what_is_no_list_has_no_ids(value: msgspec.Raw | None) -> None:
    assert num_ids(value) == 0


def test_an_unknown_name_is_logged_once_and_shown_short_and_escaped(caplog: pytest.LogCaptureFixture) -> None:
    strange = json.dumps({"prompt": "Hi", "a\n\x1b[2Jb": 1, "c" * 1000: 1}).encode()
    for body in (b'{"prompt": "Hi", "temprature": 1, "user": "me"}', strange) * 2:
        at_once(parse(CompletionBody, body))
    message = "Clients sent an unknown parameter, which is ignored: "
    shown = ("'temprature'. Did they mean temperature?", "'a\\n\\x1b[2Jb'", f"'{'c' * 59}...")
    assert sorted(caplog.messages) == sorted(message + name for name in shown)


@pytest.mark.parametrize(
    ("path", "given", "sdk"),
    [
        (COMPLETIONS, {"prompt": "Hi"}, completion_create_params.CompletionCreateParamsBase),
        (CHAT, {"messages": []}, chat_params.CompletionCreateParamsBase),
        (RESPONSES, {"input": "Hi"}, response_create_params.ResponseCreateParamsBase),
        (f"{RESPONSES}/input_tokens", {"input": "Hi"}, input_token_count_params.InputTokenCountParams),
        (f"{RESPONSES}/compact", {"input": "Hi"}, response_compact_params.ResponseCompactParams),
    ],
)
def test_every_parameter_of_the_sdk_is_known(
    path: str, given: dict[str, Any], sdk: type, caplog: pytest.LogCaptureFixture
) -> None:
    protocol._tell_of.cache_clear()
    body = {**dict.fromkeys(sdk.__annotations__), "background_options": None, **given}
    at_once(parse(bodies_of_routes()[path], json.dumps(body).encode()))
    assert caplog.messages == []


def test_of_many_unknown_names_few_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    at_once(parse(CompletionBody, json.dumps({"prompt": "Hi"} | {f"x{number}": 1 for number in range(1000)}).encode()))
    assert len(caplog.messages) == MOST_TOLD


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        (CHAT, {"temperatur": 1, "maxTokens": 5, "top-p": 1}, {"temperature", "max_tokens", "top_p"}),
        (
            COMPLETIONS,
            {"stream_options": {"include_usgae": True, "include_obfuscation": True}, "Logprob": 1},
            {"stream_options.include_usage", "logprobs"},
        ),
        (
            RESPONSES,
            {"reasoning": {"efort": "low", "summary": "auto"}, "stream_options": None},
            {"reasoning.effort"},
        ),
        (CHAT, {"user": "me", "user_id": 1, "top_a": 0.5, "service_tier": "auto", "x" * 1000: 1}, set()),
    ],
)
def test_misspelled_names_are_noted_as_those_that_were_probably_meant(
    path: str, body: dict[str, Any], meant: set[str]
) -> None:
    adaptations = Adaptations()
    content = msgspec.json.encode({**BODIES[path], **body})
    at_once(parse(bodies_of_routes()[path], content, None, adaptations.note))
    assert set(adaptations.notes) == {f"{name}: an unknown parameter with a similar name is ignored" for name in meant}


def test_the_two_bodies_share_every_sampling_field() -> None:
    shared = set(CompletionBody.__struct_fields__) & set(ChatBody.__struct_fields__)
    assert set(CompletionBody.__struct_fields__) - shared == {"prompt", "suffix", "echo", "best_of"}


def shown_logprobs(tokens: TokenLogprobs, num_top: int) -> CompletionLogprobs:
    parts = [text_of(data) for _, data, _ in tokens.tokens()]
    return msgspec.json.decode(b"".join(completion_logprobs_in_parts(tokens, parts, num_top)), type=CompletionLogprobs)


def test_of_two_tokens_with_the_same_text_the_likelier_one_is_shown() -> None:
    better = (5, b"\xe2", -0.5)
    worse = (6, b"\xe3", -2.0)
    tokens = token_logprobs([worse, better, worse])
    assert shown_logprobs(tokens, 2).top_logprobs == [{"�": -0.5}]


def test_the_logprob_of_the_sampled_token_is_the_same_float_in_both_lists() -> None:
    value = math.nextafter(-0.1, -1)
    tokens = token_logprobs([(5, b"a", value)] * 2)
    logprobs = shown_logprobs(tokens, 1)
    assert logprobs.token_logprobs[0] == max((logprobs.top_logprobs[0] or {}).values()) == value
