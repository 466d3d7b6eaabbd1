"""A GGUF file's tokenizer gives the ids of the model's own, and its special tokens are what the file says."""

from pathlib import Path
from typing import Any

import pytest

from oaiserve.engine.request import ChatPrompt, GapPrompt, PairPrompt, TextPrompt
from oaiserve.engine.text.detokenize import TokenTable
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from tests.engine.remembered import AT_ONCE
from tests.engine.text.gguf.files import tokenizer_of, write
from tests.engine.text.gguf.vocabularies import BYTES, byte_level, metadata

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
LETTERS = [*"▁abc[IN", "▁a", "ab", "▁▁", "▁ab", "bc"]
TYPES = [2, 3, 3, *[6] * 256]


def sentencepiece(*more: str, kinds: list[int] | None = None, **settings: Any) -> dict[str, Any]:
    """Return a vocabulary like Llama 2's, whose first tokens have the best scores."""
    tokens = [*PIECES, *LETTERS, *more]
    scores = [float(-i) for i in range(len(tokens))]
    types = [*TYPES, *[1] * len(LETTERS), *(kinds or [3] * len(more))]
    return metadata("llama", tokens, scores=scores, token_type=types, **settings)


def texts(tokenizer: Tokenizer, text: str, *, adds: bool = False) -> list[str | None]:
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(TextPrompt(text, adds))]


def test_sentencepiece_merges_by_scores_and_puts_a_space_before_each_text_between_special_tokens(
    tmp_path: Path,
) -> None:
    tokenizer = tokenizer_of(tmp_path, sentencepiece())
    assert texts(tokenizer, "abc") == ["▁ab", "c"]
    assert texts(tokenizer, " a") == ["▁", "▁a"]
    assert texts(tokenizer, "<s>[IN") == ["<s>", "▁", "[", "I", "N"]
    assert texts(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert texts(tokenizer, "a", adds=True) == ["<s>", "▁a"]
    assert tokenizer.decode(tokenizer.encode(TextPrompt("  aé", False))) == "  aé"
    values = sentencepiece()
    values["tokenizer.ggml.scores"].reverse()
    assert texts(tokenizer_of(tmp_path, values), "abc") == ["▁a", "bc"]


def test_no_space_is_added_and_no_bos_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, sentencepiece(add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert texts(tokenizer, "abc", adds=True) == ["ab", "c", "</s>"]
    assert tokenizer.decode(tokenizer.encode(TextPrompt(" a", False))) == " a"


def test_special_tokens_of_phi_3_take_the_white_space_after_them(tmp_path: Path) -> None:
    values = sentencepiece("<|user|>", "<|endoftext|>")
    for architecture, expected in (("phi3", ["<|user|>", "▁a"]), ("llama", ["<|user|>", "▁", "<0x0A>", "a"])):
        tokenizer = tokenizer_of(tmp_path, values | {"general.architecture": architecture})
        assert texts(tokenizer, "<|user|>\na") == expected
    assert texts(tokenizer_of(tmp_path, values | {"general.architecture": "phi3"}), "<|endoftext|>\na")[1:] == [
        *("▁", "<0x0A>", "a")
    ]


def test_control_tokens_keep_their_text_and_id_and_no_id_is_beyond_the_files_tokens(tmp_path: Path) -> None:
    kinds = [1] * 257 + [3, 3, 4, 4]
    added = ("<｜User｜>", "<｜end▁of▁sentence｜>", "   ", "ö")
    values = byte_level("deepseek-llm", ("h e",), *added, token_type=kinds, bos_token_id=257, eos_token_id=258)
    tokenizer = tokenizer_of(tmp_path, values)
    assert tokenizer.encode(TextPrompt("<｜User｜>he   <｜end▁of▁sentence｜>", False)) == [257, 256, 259, 258]
    assert max(tokenizer.backend.get_added_tokens_decoder()) < tokenizer.vocab_size == 261
    assert tokenizer.special_token_ids == {"<｜User｜>": 257, "<｜end▁of▁sentence｜>": 258}
    assert "<|endoftext|>" not in tokenizer.special_token_ids
    assert len(tokenizer.encode(TextPrompt("<|endoftext|>", False))) == len("<|endoftext|>")


def test_an_added_token_whose_text_could_be_a_byte_comes_back_as_its_text(tmp_path: Path) -> None:
    tokens = [*(byte for byte in BYTES if byte != "ö"), "ö"]  # This byte occurs in no text.
    values = metadata("gpt2", tokens, pre="deepseek-llm", merges=["Ã Ł"], token_type=[1] * 255 + [4, 1])
    tokenizer = tokenizer_of(tmp_path, values | {"tokenizer.ggml.tokens": [*tokens, "ÃŁ"]})
    ids = tokenizer.encode(TextPrompt("Größe ß", False))
    assert {255, 256} <= set(ids)
    assert tokenizer.decode(ids) == "Größe ß"
    detokenizer = TokenTable(tokenizer.backend).detokenizer([], skip_special_tokens=True)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == "Größe ß"
    assert tokenizer.lone_texts([255]) == ["ö"]


@pytest.mark.parametrize(
    ("pre", "settings", "adds"),
    [
        ("llama-bpe", {}, True),
        ("tekken", {}, True),
        ("qwen2", {}, False),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_a_bos_is_added_as_the_file_says_or_else_its_pre_tokenizer(
    pre: str, settings: dict[str, Any], adds: bool, tmp_path: Path
) -> None:
    values = byte_level(pre, ("h e",), "<bos>", token_type=[1] * 257 + [3], bos_token_id=257, **settings)
    assert texts(tokenizer_of(tmp_path, values), "he", adds=True) == [*(["<bos>"] if adds else []), "he"]


def test_an_eos_of_a_single_character_is_text_where_an_unset_id_of_0_names_it(tmp_path: Path) -> None:
    values = byte_level("gpt-2", ("h e",), "<end>", bos_token_id=0, eos_token_id=0, unknown_token_id=0)
    tokenizer = tokenizer_of(tmp_path, values)
    assert not tokenizer.special_ids
    named = byte_level("gpt-2", ("h e",), "<end>", eos_token_id=257)
    assert tokenizer_of(tmp_path, named).special_ids == {257}


def test_gemma_4_has_merges_over_whole_texts_and_a_bos_whatever_the_file_says(tmp_path: Path) -> None:
    tokens = [*PIECES, *"▁ab\n", "\n\n", "▁a", "<|tool_call>"]
    values = metadata(
        "gemma4",
        tokens,
        merges=["\n \n", "▁ a"],
        token_type=[*TYPES, *[1] * 6, 4],
        bos_token_id=1,
        add_bos_token=False,
    )
    tokenizer = tokenizer_of(tmp_path, values)
    assert texts(tokenizer, "b a\n\n<|tool_call>", adds=True) == ["<s>", "b", "▁a", "\n\n", "<|tool_call>"]
    assert tokenizer.decode(tokenizer.encode(TextPrompt(" a\n\nb é", False))) == " a\n\nb é"


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁hello", "▁wor", "ld", "▁,", "▁e"]
BERT = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3, "padding_token_id": 0, "mask_token_id": 4}


def test_word_pieces_are_those_of_bert(tmp_path: Path) -> None:
    values = metadata("bert", WORDS, "bert", token_type=[3] * 5 + [1] * 5, **BERT)
    tokenizer = tokenizer_of(tmp_path, values)
    assert texts(tokenizer, "Hello, World é xyz", adds=True) == [
        *("[CLS]", "hello", ",", "wor", "##ld", "e", "[UNK]", "[SEP]")
    ]
    assert texts(tokenizer, "hello [MASK]") == ["hello", "[MASK]"]
    assert tokenizer.special_token_ids["[MASK]"] == 4
    assert tokenizer.encode_pair(PairPrompt("hello", "world")) == ([2, 5, 3, 6, 7, 3], 3)
    assert tokenizer.decode([5, 8, 6, 7]) == "hello, world"


def test_a_cased_vocabulary_of_bert_is_not_lowered_though_the_file_does_not_say_so(tmp_path: Path) -> None:
    tokens = [*WORDS, "▁Hello"]
    values = metadata("bert", tokens, "bert", token_type=[3] * 5 + [1] * 6, **BERT)
    assert texts(tokenizer_of(tmp_path, values), "Hello hello") == ["Hello", "hello"]
    values["tokenizer.ggml.normalizer.lowercase"] = True
    assert texts(tokenizer_of(tmp_path, values), "Hello") == ["hello"]


def test_unigrams_are_those_of_xlm_roberta(tmp_path: Path) -> None:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁he", "llo", "l", "o", "he", "<mask>"]
    values = metadata(
        "t5",
        tokens,
        "bert",
        scores=[0.0, 0.0, 0.0, 0.0, -3.0, -1.0, -2.0, -5.0, -5.0, -4.0, 0.0],
        token_type=[3, 3, 3, 2, 1, 1, 1, 1, 1, 1, 3],
        bos_token_id=0, eos_token_id=2, unknown_token_id=3, seperator_token_id=2, padding_token_id=1,
        mask_token_id=10, add_bos_token=True, add_eos_token=True, remove_extra_whitespaces=True,
    )  # fmt: skip
    tokenizer = tokenizer_of(tmp_path, values)
    assert texts(tokenizer, "  hello   he ", adds=True) == ["<s>", "▁he", "llo", "▁he", "</s>"]
    assert texts(tokenizer, "hexx") == ["▁he", "<unk>"]
    assert texts(tokenizer, "he <mask>") == ["▁he", "<mask>"]
    assert tokenizer.encode_pair(PairPrompt("he", "hello"))[0] == [0, 5, 2, 2, 5, 6, 2]


def test_a_byte_level_encoder_has_the_pairs_of_roberta_or_modernbert(tmp_path: Path) -> None:
    common: dict[str, Any] = {"add_bos_token": True, "add_eos_token": True, "add_sep_token": True, "mask_token_id": 259}
    ids = {"bos_token_id": 257, "eos_token_id": 258, "seperator_token_id": 258}
    for pre, between in (("roberta-bpe", [258, 258]), ("modern-bert", [258])):
        tokenizer = tokenizer_of(
            tmp_path,
            byte_level(pre, ("h e",), "<s>", "</s>", "<mask>", token_type=[1] * 257 + [3] * 3, **common, **ids),
        )
        assert tokenizer.encode_pair(PairPrompt("he", "he"))[0] == [257, 256, *between, 256, 258]
        assert texts(tokenizer, "he <mask>") == ["he", "<mask>"]


@pytest.mark.parametrize("roles", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_the_tokens_around_a_gap_are_those_of_the_files_roles(roles: tuple[str, ...], tmp_path: Path) -> None:
    first = len(BYTES) + 1
    ids: dict[str, Any] = {f"{role}_token_id": first + number for number, role in enumerate(roles)}
    tokenizer = tokenizer_of(tmp_path, byte_level("gpt-2", ("h e",), "<a>", "<b>", "<c>", **ids))
    assert tokenizer.decode(tokenizer.encode(GapPrompt("he", "h"))) == "<a>he<b>h<c>"
    assert Tokenizer.from_pretrained(tmp_path / "model.gguf").fill == tokenizer.fill, "as the start cache has it"


def test_templates_for_tools_are_read_and_special_tokens_are_their_variables(tmp_path: Path) -> None:
    values = byte_level("qwen2", ("h e",), "<end>", token_type=[1] * 257 + [3], eos_token_id=257)
    values |= {
        "tokenizer.chat_template": "he{{ eos_token }}",
        "tokenizer.chat_template.tool_use": "{{ tools[0].name }}",
    }
    tokenizer = tokenizer_of(tmp_path, values)
    message = [{"role": "user", "content": "Hi"}]
    assert tokenizer.encode(ChatPrompt(message)) == [256, 257]
    assert tokenizer.encode(ChatPrompt(message, tools=[{"name": "he"}])) == [256]


def test_the_second_start_reads_the_tokenizer_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", sentencepiece(eot_token_id=1))
    first = Tokenizer.from_pretrained(path, runtime=AT_ONCE)
    monkeypatch.setattr("oaiserve.engine.text.tokenizer.load_gguf_tokenizer", None)
    second = Tokenizer.from_pretrained(path)
    assert second.backend.to_str() == first.backend.to_str()
    assert second.eos_token_ids == first.eos_token_ids == {1, 2}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (metadata("rwkv", ["a"]), "its tokenizer is of the kind 'rwkv', and those that can be read are"),
        (metadata("gpt2", BYTES, pre="qwen2"), "its tokenizer has no merges"),
        (metadata("llama", PIECES), "it has 259 tokens, and scores of 0"),
        (metadata("gpt2", BYTES, pre="qwen2", merges=["h"]), "its merge 'h' is no pair"),
        (metadata("gpt2", BYTES, token_type=[1]), "it has 256 tokens, and types of 1"),
        ({"general.architecture": "llama"}, "it has no tokenizer"),
        (
            {"general.architecture": "llama", "tokenizer.ggml.tokens": 5},
            r"its tokenizer\.ggml\.tokens is no list of str",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_refused_by_its_name(
    values: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=rf"^Could not load a tokenizer from '.*model\.gguf': .*{reason}"):
        tokenizer_of(tmp_path, values)
