"""What the inspector keeps of requests, and its limits."""

from __future__ import annotations

from array import array
from math import isnan
from typing import Any

import pytest

from oaiserve.config import OptionError
from oaiserve.engine.request import ChatPrompt, Prompt, PromptDone, Request, SamplingParams, TextPrompt, TokenChunk
from oaiserve.engine.types.media import MediaFile
from oaiserve.facts.record import Origin
from oaiserve.facts.times import RequestTimes
from oaiserve.plugins.inspector.kept import FIRST_CHARACTERS, KeptRequests
from oaiserve.plugins.inspector.options import InspectorOptions
from tests.engine.logprobs_for_tests import token_logprobs


def request(name: str, prompt: Prompt = TextPrompt("Hello"), num_bytes: int = 0) -> Request:  # noqa: B008 - immutable
    return Request(name, (prompt,), SamplingParams(), num_bytes=num_bytes, origin=Origin(name))


def test_only_the_last_requests_are_kept() -> None:
    kept = KeptRequests(2)
    for name in ("first", "second", "third"):
        kept.add(request(name))
    assert [kept.find(name) is not None for name in ("first", "second", "third")] == [False, True, True]


def test_the_oldest_requests_are_dropped_beyond_the_limit_of_tokens_and_the_newest_stays() -> None:
    kept = KeptRequests(10, max_tokens=100)
    first = kept.add(request("first"))
    second = kept.add(request("second"))
    for each in (first, second):
        each.take(PromptDone("", 0, range(45), None, RequestTimes()))
    kept.trim()
    assert kept.find("first") is first
    second.take(TokenChunk("", 0, "", [1] * 11, None))
    kept.trim()
    assert kept.find("first") is None
    second.take(TokenChunk("", 0, "", [1] * 100, None))
    kept.trim()
    assert kept.find("second") is second


def test_a_large_body_counts_before_its_tokens_are_known() -> None:
    kept = KeptRequests(10, max_tokens=100)
    kept.add(request("first"))
    kept.add(request("large", num_bytes=404))
    assert kept.find("first") is None


def test_an_image_is_kept_as_its_kind_and_size() -> None:
    prompt = ChatPrompt([{"role": "user", "content": [{"type": "image"}]}], media=(MediaFile("image", b"12345"),))
    (kept,) = KeptRequests(1).add(request("image", prompt)).prompts
    assert isinstance(kept.prompt, ChatPrompt)
    assert kept.prompt.media == ()
    assert [(medium.kind, medium.num_bytes) for medium in kept.media] == [("image", 5)]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write\n  a poem. "}],
            "Write a poem.",
        ),
        ([{"role": "user", "content": "First"}, {"role": "user", "content": "Second"}], "First"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}], "What is it?"),
        ([{"role": "user", "content": [{"type": "image"}]}], ""),
        ([{"role": "system", "content": "Be brief."}], ""),
        ([{"role": "user", "content": "a" * FIRST_CHARACTERS}], "a" * FIRST_CHARACTERS),
        ([{"role": "user", "content": "a" * (FIRST_CHARACTERS + 1)}], "a" * (FIRST_CHARACTERS - 1) + "…"),
    ],
    ids=["after the system", "first of two", "beside an image", "only an image", "no user", "longest", "too long"],
)
def test_first_words_are_the_beginning_of_the_first_user_message(messages: list[dict[str, Any]], words: str) -> None:
    kept = KeptRequests(2)
    kept.add(request("chat", ChatPrompt(messages)))
    kept.add(request("text"))
    assert kept.first_words() == ({"chat": words} if words else {})


def test_tokens_of_another_server_have_no_certainty() -> None:
    kept = KeptRequests(1).add(request("continued"))
    logprobs = token_logprobs([(5, b"a", 0.0)])
    kept.take(TokenChunk("", 0, "a", [5], logprobs, was_sent=True))
    kept.take(TokenChunk("", 0, "b", [6], token_logprobs([(6, b"b", -0.5)])))
    assert kept.choices[0].token_ids == array("i", [5, 6])
    assert [isnan(value) for value in kept.choices[0].logprobs] == [True, False]


@pytest.mark.parametrize("number", [-1, 1001])
def test_a_wrong_number_of_requests_is_refused(number: int) -> None:
    with pytest.raises(OptionError, match=f"--inspect is {number}, but must be between 0 and 1000"):
        InspectorOptions(inspect=number)
