"""Pieces of a text have exactly the ids of the whole, and no token stands for more characters than the rules say."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.trainers import BpeTrainer

from oaiserve.checkpoints import demo
from oaiserve.engine.text import encoding_rules
from oaiserve.engine.text.encoding_rules import EncodingRules, _alternatives
from oaiserve.engine.text.gguf.splits import expressions
from tests.engine.text.tokenizers_for_tests import byte_level, metaspace, sentencepiece, wordpiece

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "the cat, the dog. the\n\ncat   sat    on 1234 the mat... 'tis don't we'll",
    "漢字かな混じり文。 漢字 한국어 é é naïve ñ Straße",
    "<tool> <tool>cat aaaaaaaa!!!! \t\r\n  return x;\n    return y;\n",
] * 3
ADDED = [
    AddedToken("<s>", special=True, normalized=False),
    AddedToken("<tool>", normalized=True),
    AddedToken("cat the", normalized=False),
    AddedToken(" sat", normalized=False),
    AddedToken("mat", single_word=True, normalized=False),
    AddedToken("    ", normalized=False),
]


def trained(
    pre_tokenizer: pre_tokenizers.PreTokenizer | None,
    normalizer: normalizers.Normalizer | None = None,
    *,
    added: list[AddedToken] | None = None,
    spaces: bool = False,
) -> Backend:
    """Return a BPE tokenizer with merges from a small corpus, so that tokens cross as many borders as they may."""
    tokenizer = Backend(models.BPE(byte_fallback=spaces, unk_token="<unk>" if spaces else None, fuse_unk=spaces))
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = ["▁"] if spaces else pre_tokenizers.ByteLevel.alphabet()
    specials = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))] if spaces else []
    trainer = BpeTrainer(
        vocab_size=900, min_frequency=1, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if spaces:  # the byte tokens are no added tokens in the models that have them
        definition = json.loads(tokenizer.to_str())
        definition["added_tokens"] = definition["added_tokens"][:1]
        tokenizer = Backend.from_str(json.dumps(definition))
    tokenizer.add_tokens(ADDED if added is None else added)
    return tokenizer


def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(one), "isolated") for one in patterns), last])


def with_dropout(backend: Backend) -> Backend:
    backend.model.dropout = 0.1
    return backend


RAW_ADDED = [token for token in ADDED if not token.normalized]
LLAMA_SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
GEMMA_SPLIT = pre_tokenizers.Split(" ", "merged_with_previous")
FAMILIES: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level,
    "gpt2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2 with a space before": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "starcoder": lambda: trained(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ),
    "llama3": lambda: trained(split(LLAMA3)),
    "o200k": lambda: trained(split(O200K)),
    "qwen35": lambda: trained(split(*expressions("qwen35"))),
    "deepseek-v3": lambda: trained(split(*expressions("deepseek-v3"))),
    "kimi-k2": lambda: trained(split(*expressions("kimi-k2"))),
    "qwen": lambda: trained(split(LLAMA3.replace("{1,3}", "")), normalizers.NFC(), added=RAW_ADDED),
    "sentencepiece": sentencepiece,
    "llama2": lambda: trained(None, LLAMA_SPACES, spaces=True),
    "gemma": lambda: trained(GEMMA_SPLIT, normalizers.Replace(" ", "▁"), spaces=True),
    "mistral": lambda: trained(
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False), added=RAW_ADDED, spaces=True
    ),
}
WHOLE: dict[str, Callable[[], Backend]] = {
    "metaspace words": metaspace,
    "wordpiece": wordpiece,
    "an unknown pattern": lambda: trained(split(r"\w+ \w+|\s+|.")),
    "added tokens in normalized text": lambda: trained(split(LLAMA3), normalizers.NFC()),
    "merges drawn by chance": lambda: with_dropout(trained(split(LLAMA3))),
    "another normalizer": lambda: trained(split(LLAMA3), normalizers.NFKC()),
}


def ids_of(backend: Backend, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


STRANGE = (
    *("the", "cat", " sat", "mat", "'ll", "'S", "<tool>", "<s>", "cat the", "    ", "two words", "[tool ▁call]", "▁▁"),
    *("e\u0301", "👩\u200d👩\u200d👧", *"\u0301🙂\u200d\ufb01\u1f82\u212b\u093f\u017f\uff14▁"),
    *("123", *"\x00\x04\x1d\U00040000\x85\u2028"),
)
nasty_texts = st.lists(
    st.one_of(
        st.sampled_from([*"aeé漢か한 \n\t\r.,'!-1\u00a0\u3000Ωคकßİ²", *STRANGE]),
        st.tuples(st.sampled_from([*"a 1\n漢!\u0301▁", "ab ", "<tool>", "cat "]), st.integers(1, 60)).map(
            lambda part: part[0] * part[1]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    ),
    max_size=40,
).map("".join)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_rules, "PIECE_CHARACTERS", 12)


def check_pieces(backend: Backend, rules: EncodingRules) -> None:
    """Check with nasty texts that the ids of their pieces are those of the whole."""

    @settings(max_examples=100, deadline=None)
    @given(nasty_texts)
    def check(text: str) -> None:
        pieces = list(rules.pieces(text))
        ids = ids_of(backend, text)
        assert [token_id for piece in pieces for token_id in ids_of(backend, piece)] == ids

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ids_of_pieces_are_those_of_the_whole(family: str) -> None:
    """The last check, by the tokenizer, sees only a window. It is left out, so that every cut must be right without."""
    backend = FAMILIES[family]()
    rules = EncodingRules(backend)
    rules._agrees = lambda *_: True
    check_pieces(backend, rules)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_text_is_cut_into_pieces_that_are_no_longer_than_they_should(family: str) -> None:
    backend = FAMILIES[family]()
    text = "hello the dog the low row here " * 40
    pieces = list(EncodingRules(backend).pieces(text))
    assert max(map(len, pieces)) <= 12
    assert [token_id for piece in pieces for token_id in ids_of(backend, piece)] == ids_of(backend, text)


@pytest.mark.parametrize("build", WHOLE.values(), ids=WHOLE)
def test_what_is_not_known_is_encoded_whole(build: Callable[[], Backend]) -> None:
    backend = build()
    text = "hello the dog, the low row. here\n" * 40
    assert list(EncodingRules(backend).pieces(text)) == [text]


def test_a_letter_that_a_token_has_before_a_space_makes_no_cut() -> None:
    vocab = {token: i for i, token in enumerate(["▁", "a", "b", "c", "a▁", "a▁b", "▁c"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[("a", "▁"), ("a▁", "b"), ("▁", "c")]))
    backend.normalizer = normalizers.Replace(" ", "▁")
    pieces = list(EncodingRules(backend).pieces("a b c" * 30))
    assert len(pieces) > 10
    assert all(piece.startswith(" c") for piece in pieces[1:])


def test_a_text_with_nothing_but_false_candidates_is_not_looked_through() -> None:
    text = "cat the" * 100_000
    tried = 0

    def count(*arguments: Any) -> bool:
        nonlocal tried
        tried += 1
        return False

    rules = EncodingRules(FAMILIES["gpt2"]())
    rules._is_cut = count
    assert list(rules.pieces(text)) == [text]
    assert tried == encoding_rules.MOST_CANDIDATES


def test_the_alternatives_of_a_pattern_are_found_outside_of_groups() -> None:
    assert list(_alternatives(r"(?i:a|b)|[|]|\||\s+")) == ["(?i:a|b)", "[|]", r"\|", r"\s+"]


def test_the_demo_models_tokenizer_is_known() -> None:
    from oaiserve.engine.text.tokenizer import Tokenizer

    backend = Tokenizer.from_pretrained(demo.fetched()).backend
    rules = EncodingRules(backend)
    check_pieces(backend, rules)
    assert len(list(rules.pieces("hello the dog, the low row. " * 40))) > 10
