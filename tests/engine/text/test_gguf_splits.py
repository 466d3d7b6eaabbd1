"""Tokenizers of GGUF files split texts as those of the models do."""

import logging

import pytest
from tokenizers import pre_tokenizers

from oaiserve.engine.text.gguf_splits import split_as_named
from tests.models.decoders import byte_tokenizer


def parts(name: str, text: str) -> list[str]:
    tokenizer = byte_tokenizer()
    split_as_named(tokenizer, name)
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in found]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("command-r", "abc 123 don't", ["abc", " ", "1", "2", "3", " don", "'t"]),
        ("smollm", "x=1;\n  y", ["x", "=", "1", ";", "\n ", " y"]),
        ("deepseek-llm", "ab\ncd 漢字12!", ["ab", "\n", "cd", " ", "漢字", "1", "2", "!"]),
        ("deepseek-coder", "ab, cd 12", ["ab", ",", " cd", " ", "1", "2"]),
        ("deepseek-v3", "1234 漢字 'a b.", ["123", "4", " ", "漢字", " '", "a", " b", "."]),
        ("glm4", "I'VE 1234\n\n x", ["I", "'VE", " ", "123", "4", "\n\n", " x"]),
        ("hunyuan", "12 x\r\n", ["1", "2", " x", "\r\n"]),
        ("kimi-k2", "漢字Abc'S 1234", ["漢字", "Abc'S", " ", "123", "4"]),
        ("bailingmoe", "a'll 12\n\nb", ["a", "'ll", " ", "1", "2", "\n\n", "b"]),
        ("seed-coder", "x;\n12", ["x", ";", "\n", "1", "2"]),
    ],
)
def test_texts_are_split_as_the_file_names_it(name: str, text: str, expected: list[str]) -> None:
    assert parts(name, text) == expected


def test_a_tokenizer_that_is_not_known_is_taken_as_gpt_2s_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert parts("gpt-2", "abc 123 don't") == ["abc", " 123", " don", "'t"]
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        assert parts("unheard-of", "abc 123") == ["abc", " 123"]
    assert caplog.messages == ["It is not known how the tokenizer 'unheard-of' splits texts: it is taken as GPT-2's"]


def test_a_word_that_is_a_token_needs_no_merges_where_the_models_own_tokenizer_needs_none() -> None:
    tokenizer = byte_tokenizer(300)  # "aa" is a token that no merge makes
    assert len(tokenizer.backend_tokenizer.encode("aa").ids) == 2
    split_as_named(tokenizer, "llama-bpe")
    assert len(tokenizer.backend_tokenizer.encode("aa").ids) == 1
    assert isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel)
