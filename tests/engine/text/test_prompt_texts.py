"""The parts of a prompt's text that its tokens stand for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from oaiserve.engine.request import Prompt, TextPrompt, TokenPrompt
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.engine.text.tokenizers_for_tests import byte_level, sentencepiece


def composing() -> Tokenizer:
    """Like Qwen's tokenizers: it composes characters before it encodes them."""
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


BYTE_LEVEL, SENTENCEPIECE = (
    Tokenizer(PreTrainedTokenizerFast(tokenizer_object=build())) for build in (byte_level, sentencepiece)
)
COMPOSING = composing()
any_kind = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, COMPOSING])


def parts(tokenizer: Tokenizer, prompt: Prompt) -> list[str]:
    return list(tokenizer.text_parts(prompt, tokenizer.encode(prompt)))


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        (BYTE_LEVEL, "hello 🙂", ["hello", " ", "", "", "", "🙂"]),
        (BYTE_LEVEL, "<|im_end|>é", ["<|im_end|>", "é"]),
        (SENTENCEPIECE, "hello", ["", "h", "e", "ll", "o"]),
        (SENTENCEPIECE, " h🙂", ["", "", " h", "", "", "", "🙂"]),
        (SENTENCEPIECE, "h▁h", ["", "h", "▁h"]),
        (COMPOSING, "xe\u0301x", ["x", "e\u0301", "x"]),
        (COMPOSING, "e\u0301🙂", ["e\u0301", "", "", "", "🙂"]),
    ],
)
def test_a_split_character_belongs_to_its_last_token(tokenizer: Tokenizer, text: str, expected: list[str]) -> None:
    assert parts(tokenizer, TextPrompt(text)) == expected


@any_kind
@given(text=st.text(st.sampled_from("helo é🙂▁<s>e\u0301\u200d\n") | st.characters(codec="utf-8"), max_size=20))
def test_the_parts_of_a_text_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(TextPrompt(text))
    result = list(tokenizer.text_parts(TextPrompt(text), token_ids))
    assert (len(result), "".join(result)) == (len(token_ids), text)


def test_the_parts_of_a_long_text_are_the_text_where_the_tokenizer_has_changed_it() -> None:
    text = "hello e\u0301 " * 5000
    assert "".join(parts(COMPOSING, TextPrompt(text))) == text


@any_kind
@given(data=st.data())
def test_the_parts_of_token_ids_are_their_own_texts(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=20))
    result = list(tokenizer.text_parts(TokenPrompt(token_ids), token_ids))
    assert len(result) == len(token_ids)
    if "\ufffd" not in "".join(result):
        assert "".join(result) == tokenizer.decode(token_ids)


@any_kind
@pytest.mark.parametrize("number", [1, 2, 5, 20_000])
def test_the_first_tokens_of_a_text_are_so_many(tokenizer: Tokenizer, number: int) -> None:
    for text in ("hello hello 🙂 hello", "hello " * 9000):
        whole = tokenizer.encode(TextPrompt(text, add_special_tokens=False))
        cut = tokenizer.first_tokens(text, number, "documents")
        result = tokenizer.encode(TextPrompt(cut, add_special_tokens=False))
        assert result == whole[: len(result)]
        assert number - 4 < len(result) <= number or result == whole
        assert text.startswith(cut)
