"""Log-probabilities that are rendered in parts are the same bytes as those that are rendered at once."""

import math
from collections.abc import Iterable
from itertools import repeat

import msgspec
import pytest

from oaiserve.engine.event_streams import MAX_CHUNK_TOKENS
from oaiserve.engine.types.logprobs import TokenLogprobs
from oaiserve.routes.answer.common_shape import HOLE, filled, joined
from oaiserve.routes.answer.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    chat_entries,
    chat_logprobs_in_parts,
    completion_logprobs_in_parts,
    prompt_logprobs_in_parts,
)
from tests.engine.logprobs_for_tests import token_logprobs
from tests.routes.doubles import logprob


def tokens_of(number: int) -> TokenLogprobs:
    first = [(1, '"\0é'.encode(), math.nan)]
    return token_logprobs(*[first, *(logprob(f"{i}", i) for i in range(number - 1))][:number])


@pytest.mark.parametrize("number", [0, 1, MAX_CHUNK_TOKENS, 2 * MAX_CHUNK_TOKENS + 1])
def test_parts_are_the_bytes_of_the_whole(number: int) -> None:
    tokens = tokens_of(number)
    whole = ChatLogprobs(chat_entries(tokens.entries(), 3))
    assert b"".join(chat_logprobs_in_parts(tokens, 3)) == msgspec.json.encode(whole)


@pytest.mark.parametrize("number", [0, 1, MAX_CHUNK_TOKENS, 2 * MAX_CHUNK_TOKENS + 1])
def test_the_lists_of_completions_have_an_item_for_each_token(number: int) -> None:
    tokens = tokens_of(number)
    texts = [data.decode() for _, data, _ in tokens.tokens()]
    rendered = b"".join(completion_logprobs_in_parts(tokens, texts, 3, text_offset=7))
    shown = msgspec.json.decode(rendered, type=CompletionLogprobs)
    assert shown.tokens == texts
    assert shown.token_logprobs == [None if math.isnan(value) else value for _, _, value in tokens.tokens()]
    assert shown.text_offset == [7 + sum(map(len, texts[:i])) for i in range(number)]
    assert len(shown.top_logprobs) == number


def test_no_part_is_large() -> None:
    tokens = tokens_of(20_000)
    for parts in (
        chat_logprobs_in_parts(tokens, 3),
        completion_logprobs_in_parts(tokens, repeat("ab", 20_000), 3),
        prompt_logprobs_in_parts(tokens, 3),
    ):
        assert max(map(len, parts)) < 100 * MAX_CHUNK_TOKENS


def test_each_hole_is_filled_in_its_order_whatever_the_text_holds() -> None:
    frame = msgspec.json.encode({"text": '\0\\u0000"', "first": HOLE, "second": HOLE})
    whole = b"".join(filled(frame, [b"[", b"]"], [b"null"]))
    assert msgspec.json.decode(whole) == {"text": '\0\\u0000"', "first": [], "second": None}


@pytest.mark.parametrize("items", [[], [[b"1"]], [[b"[", b"]"], [b"2"]]])
def test_items_in_parts_are_joined_to_a_list(items: Iterable[Iterable[bytes]]) -> None:
    assert msgspec.json.decode(b"".join(joined(items))) == [msgspec.json.decode(b"".join(item)) for item in items]
