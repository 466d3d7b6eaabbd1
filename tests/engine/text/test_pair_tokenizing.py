"""Pairs of texts, and texts that are cut, have the ids that transformers gives them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.request import PairPrompt, TextPrompt, TooManyTokens
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import InvalidRequest
from tests.models.poolers import word_tokenizer

REFERENCES = {family: word_tokenizer(family, 300) for family in ("bert", "roberta", "qwen3")}
TOKENIZERS = {family: Tokenizer(word_tokenizer(family, 300)) for family in REFERENCES}
FAMILIES = st.sampled_from(sorted(REFERENCES))
TEXT = st.lists(st.sampled_from(["aa", "b", "zz", "cat"]), min_size=1, max_size=12).map(" ".join)


@given(FAMILIES, TEXT, TEXT)
def test_a_pair_has_the_ids_and_the_border_of_the_reference(family: str, first: str, second: str) -> None:
    expected = REFERENCES[family](first, second, return_token_type_ids=True)
    ids, second_start = TOKENIZERS[family].encode_pair(PairPrompt(first, second))
    assert ids == expected.input_ids
    types = [0] * second_start + [1] * (len(ids) - second_start)
    assert types == expected.token_type_ids
    assert TOKENIZERS[family].encode(PairPrompt(first, second)) == ids


@given(FAMILIES, TEXT, TEXT, st.integers(5, 40))
def test_the_longer_text_of_a_pair_is_cut(family: str, first: str, second: str, most_tokens: int) -> None:
    expected = REFERENCES[family](first, second, truncation="longest_first", max_length=most_tokens).input_ids
    ids, _ = TOKENIZERS[family].encode_pair(PairPrompt(first, second, most_tokens=most_tokens))
    assert len(ids) == len(expected) <= most_tokens
    if len(REFERENCES[family](first, second).input_ids) <= most_tokens:
        assert ids == expected


@given(FAMILIES, TEXT, st.integers(3, 20))
def test_a_text_is_cut_before_its_last_special_tokens(family: str, text: str, most_tokens: int) -> None:
    expected = REFERENCES[family](text, truncation=True, max_length=most_tokens).input_ids
    assert TOKENIZERS[family].encode(TextPrompt(text, most_tokens=most_tokens)) == expected


def test_a_long_text_is_cut_as_well() -> None:
    text = "aa b " * 20_000
    expected = REFERENCES["bert"](text, truncation=True, max_length=100).input_ids
    assert TOKENIZERS["bert"].encode(TextPrompt(text, most_tokens=100)) == expected


def test_what_leaves_no_room_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be > 2, the special tokens"):
        TOKENIZERS["bert"].encode(TextPrompt("aa", most_tokens=2))


def test_a_pair_that_is_too_long_is_refused_by_its_length() -> None:
    with pytest.raises(TooManyTokens) as caught:
        TOKENIZERS["bert"].encode_pair(PairPrompt("aa b", "ab"), 5)
    assert caught.value.num_tokens == 6


def test_half_a_surrogate_pair_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        TOKENIZERS["bert"].encode_pair(PairPrompt("aa", "\ud83d"))
    assert caught.value.param == "documents"
