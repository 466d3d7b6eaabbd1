"""Tokenizers of GGUF files split texts as those of the models do."""

import logging

import pytest

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.engine.text.gguf.bpe import byte_level
from oaiserve.engine.text.gguf.vocabulary import Vocabulary
from tests.engine.text.gguf import vocabularies


def parts(name: str | None, text: str) -> list[str]:
    tokenizer = byte_level(Vocabulary(vocabularies.byte_level(name)))
    return [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("afmoe", "a 1234567 x漢字y", ["a", " ", "1", "234", "567", " x", "漢字", "y"]),
        ("bailingmoe", "a'll 12\n\nb", ["a", "'ll", " ", "1", "2", "\n\n", "b"]),
        ("bloom", "ab, 12 (c)", ["ab", ",", " 12", " (", "c", ")"]),
        ("chameleon", "IMGIMGAZ a12,", ["IMGIMGAZ", " a", "1", "2", ","]),
        ("command-r", "abc 123 don't", ["abc", " ", "1", "2", "3", " don", "'t"]),
        ("deepseek-coder", "ab, cd 12", ["ab", ",", " cd", " ", "1", "2"]),
        ("deepseek-llm", "ab\ncd 漢字12!", ["ab", "\n", "cd", " ", "漢字", "1", "2", "!"]),
        ("deepseek-v3", "1234 漢字 'a b.", ["123", "4", " ", "漢字", " '", "a", " b", "."]),
        ("exaone-moe", "a b c, d", ["a b c", ",", " d"]),
        ("glm4", "I'VE 1234\n\n x", ["I", "'VE", " ", "123", "4", "\n\n", " x"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("hunyuan", "12 x\r\n", ["1", "2", " x", "\r\n"]),
        ("jais-2", "a" + 9 * " " + "b", ["a", 8 * " ", " b"]),
        ("kimi-k2", "漢字Abc'S 1234", ["漢字", "Abc'S", " ", "123", "4"]),
        ("laguna", "x.\n\n12", ["x", ".", "\n\n", "1", "2"]),
        ("minicpm5", "ab 12345", ["ab", " ", "123", "45"]),
        ("qwen35", "e\u0301a 12", ["e\u0301a", " ", "1", "2"]),
        ("seed-coder", "x;\n12", ["x", ";", "\n", "1", "2"]),
        ("smollm", "x=1;\n  y", ["x", "=", "1", ";", "\n ", " y"]),
        ("spark2_5", "a.\n1234", ["a", ".", "\n", "1", "2", "3", "4"]),
        ("superbpe", "of the 1234567", ["of the ", "1", "234", "567"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("tiny_aya", "1234567 1234a", ["1", "234", "567", " ", "123", "4", "a"]),
        ("ufakzeka", "Ankara'dan 12", ["Ankara", "'dan", " ", "1", "2"]),
        ("viking", "ab12, c", ["ab", "1", "2", ",", " c"]),
        ("youtu", "漢字한글Ab12", ["漢字", "한글", "Ab", "1", "2"]),
    ],
)
def test_texts_are_split_as_the_file_names_it(name: str, text: str, expected: list[str]) -> None:
    assert parts(name, text) == expected


def test_a_file_without_a_name_is_split_like_gpt_2_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert parts("gpt-2", "abc 123 don't") == ["abc", " 123", " don", "'t"]
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        assert parts(None, "abc 123") == ["abc", " 123"]
    assert caplog.messages == ["The file does not say how its tokenizer splits texts: it is taken as GPT-2's"]


def test_an_unknown_name_is_refused_with_a_way_out() -> None:
    with pytest.raises(BadFile, match=r"tokenizer 'unheard-of' splits texts.*gguf-new-metadata --pre-tokenizer NAME"):
        parts("unheard-of", "abc 123")


def test_a_word_that_is_a_token_needs_no_merges_where_the_models_own_tokenizer_needs_none() -> None:
    for name, expected in (("qwen2", ["x", "y"]), ("llama-bpe", ["xy"])):
        tokenizer = byte_level(Vocabulary(vocabularies.byte_level(name, ("h e",), "xy")))
        assert tokenizer.encode("xy").tokens == expected
