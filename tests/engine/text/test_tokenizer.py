import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from oaiserve.engine.request import ChatPrompt, PairPrompt, Prompt, TextPrompt, TokenPrompt, TooManyTokens
from oaiserve.engine.text.encoding_rules import PIECE_CHARACTERS
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import InvalidRequest, StartupError
from tests.engine.text.tokenizers_for_tests import CHATML, byte_level, metaspace, sentencepiece, wordpiece
from tests.models.poolers import word_tokenizer

Result = TypeVar("Result")


def wrap(backend: Backend, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template)


BYTE_LEVEL = Tokenizer(wrap(byte_level()))
SENTENCEPIECE = Tokenizer(wrap(sentencepiece()))
HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize("build", [byte_level, sentencepiece, metaspace, wordpiece])
@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("text", ["hello world", " two words, é€🙂\n", "hello<|im_end|></s>[SEP]"])
def test_text_becomes_the_ids_that_transformers_gives(
    build: Callable[[], Backend], add_special_tokens: bool, text: str
) -> None:
    expected = wrap(build())(text, add_special_tokens=add_special_tokens).input_ids
    assert Tokenizer(wrap(build())).encode(TextPrompt(text, add_special_tokens)) == expected


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_apply() -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert len(Tokenizer(wrap(backend)).encode(TextPrompt("xyz"))) == 3


def test_many_threads_share_a_tokenizer() -> None:
    text = TextPrompt("hello world " * 50)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(BYTE_LEVEL.encode, [text] * 80)) == [BYTE_LEVEL.encode(text)] * 80


def without_unknown() -> Tokenizer:
    backend = metaspace()
    backend.model.unk_token = "not in the vocabulary"
    return Tokenizer(wrap(backend))


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "reason", "param"),
    [
        (BYTE_LEVEL, TextPrompt("smile \ud83d"), r"half of a surrogate pair \(U\+D83D\)", "prompt"),
        (BYTE_LEVEL, TextPrompt("hello wow " * 5000 + "\ud83d"), "half of a surrogate pair", "prompt"),
        (without_unknown(), TextPrompt("xyz"), "cannot encode it", "prompt"),
        (BYTE_LEVEL, ChatPrompt([HELLO]), "no chat template", "messages"),
    ],
)
def test_what_has_no_ids_is_refused(tokenizer: Tokenizer, prompt: Prompt, reason: str, param: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        tokenizer.encode(prompt)
    assert caught.value.param == param


def test_token_ids_are_used_as_they_are_and_special_tokens_fill_an_empty_text() -> None:
    assert SENTENCEPIECE.encode(TokenPrompt((5, 7, 5))) == [5, 7, 5]
    assert BYTE_LEVEL.encode(TextPrompt("")) == []
    assert SENTENCEPIECE.encode(TextPrompt("")) == [1]


def test_bad_words_are_encoded_with_and_without_a_space_before_them_and_without_special_tokens() -> None:
    encoded = BYTE_LEVEL.encode_bad_words(["w", "  hello", "he w"])
    texts = [BYTE_LEVEL.lone_texts(token_ids) for token_ids in encoded]
    assert texts == [["w"], [" w"], ["hello"], [" ", "hello"], ["he", " w"], [" ", "he", " w"]]
    assert 1 not in SENTENCEPIECE.encode_bad_words(["hello"])[0]


@pytest.mark.parametrize(("word", "reason"), [("  ", "'  ' has no tokens"), ("a\ud83d", "half of a surrogate pair")])
def test_a_bad_word_without_tokens_is_refused(word: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        BYTE_LEVEL.encode_bad_words(["fine", word])
    assert caught.value.param == "bad_words"


def test_a_tokenizer_without_rust_form_is_refused_at_the_start() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(StartupError, match="The tokenizer Slow has no Rust form"):
        Tokenizer(Slow())


def test_an_added_token_that_is_too_long_to_search_for_is_refused() -> None:
    backend = byte_level()
    backend.add_special_tokens([f"<|{'a' * 500}|>"])
    with pytest.raises(StartupError, match="has an added token of 504 characters, and one may have at most 500"):
        Tokenizer(wrap(backend))


def test_a_folder_without_a_tokenizer_stops_the_start_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="Could not load a tokenizer from") as caught:
        Tokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(StartupError, match=r"There is no model at '.*model\.gguf'"):
        Tokenizer.from_pretrained(tmp_path / "model.gguf")


def test_a_tokenizer_in_the_format_of_sentencepiece_needs_that_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("sentencepiece", "tiktoken"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(StartupError, match=r"format \(tokenizer\.model\)\. Add .*: pip install sentencepiece$"):
        Tokenizer.from_pretrained(tmp_path)


def test_decode_and_token_text_show_special_tokens_and_spaces() -> None:
    token_ids = BYTE_LEVEL.encode(TextPrompt("hello w<|im_end|>"))
    assert BYTE_LEVEL.decode(token_ids) == "hello w<|im_end|>"
    assert BYTE_LEVEL.lone_texts(token_ids) == ["hello", " w", "<|im_end|>"]


def test_messages_go_through_the_given_template_and_get_no_second_special_tokens() -> None:
    tokenizer = Tokenizer(wrap(sentencepiece(), CHATML), "{{ '<s>' }}{{ messages[0]['content'] }}")
    assert tokenizer.encode(ChatPrompt([HELLO])) == SENTENCEPIECE.encode(TextPrompt("hello"))


# -- pieces


def run(pieces: Generator[None, None, Result]) -> tuple[Result, int]:
    """Return the result, and how often the generator has stopped before it."""
    for stops in count():
        try:
            next(pieces)
        except StopIteration as stop:
            return stop.value, stops
    raise AssertionError


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_a_long_text_is_encoded_in_pieces_with_the_special_tokens_of_the_whole(
    tokenizer: Tokenizer, add_special_tokens: bool
) -> None:
    text = "hello wow<|im_end|> two words </s> here\n" * 2000
    token_ids, stops = run(tokenizer.encode_in_pieces(TextPrompt(text, add_special_tokens)))
    assert token_ids == tokenizer.backend.encode(text, add_special_tokens=add_special_tokens).ids
    assert stops >= len(text) // PIECE_CHARACTERS
    assert tokenizer.encode(TextPrompt(text, add_special_tokens)) == token_ids


def test_special_tokens_after_a_text_come_after_its_last_piece() -> None:
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 265), ("<|im_end|>", 266)]
    )
    text = "hello wow " * 5000
    token_ids, stops = run(Tokenizer(wrap(backend)).encode_in_pieces(TextPrompt(text)))
    assert token_ids == backend.encode(text).ids
    assert stops > 1


def test_a_short_text_is_one_piece_and_a_list_of_ids_is_too() -> None:
    assert run(BYTE_LEVEL.encode_in_pieces(TextPrompt("hello")))[1] == 0
    assert run(BYTE_LEVEL.encode_in_pieces(TokenPrompt([1] * 100_000)))[1] == 0


@pytest.mark.parametrize("prompt", [TextPrompt("xyz"), TokenPrompt([1, 2, 3])])
def test_a_prompt_that_is_too_long_says_so_at_once(prompt: Prompt) -> None:
    with pytest.raises(TooManyTokens) as caught:
        next(BYTE_LEVEL.encode_in_pieces(prompt, 2))
    assert (caught.value.num_tokens, caught.value.is_exact) == (3, True)


def test_a_text_is_encoded_until_it_cannot_fit() -> None:
    text = "hello wow " * 25_000
    num_tokens = len(BYTE_LEVEL.encode(TextPrompt(text)))
    with pytest.raises(TooManyTokens) as caught:
        run(BYTE_LEVEL.encode_in_pieces(TextPrompt(text), 20_000))
    assert 20_000 < caught.value.num_tokens <= 20_000 + PIECE_CHARACTERS < num_tokens
    assert not caught.value.is_exact


# -- pairs of texts, and texts that are cut, as transformers has them

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


def test_a_pair_that_has_no_room_or_no_ids_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be > 2, the special tokens"):
        TOKENIZERS["bert"].encode(TextPrompt("aa", most_tokens=2))
    with pytest.raises(TooManyTokens) as too_many:
        TOKENIZERS["bert"].encode_pair(PairPrompt("aa b", "ab"), 5)
    assert too_many.value.num_tokens == 6
    with pytest.raises(InvalidRequest) as broken:
        TOKENIZERS["bert"].encode_pair(PairPrompt("aa", "\ud83d"))
    assert broken.value.param == "documents"
