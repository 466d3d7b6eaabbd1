"""Prompts with a gap: each family's control tokens, in its order, around both sides."""

import pytest
from tokenizers import AddedToken

from oaiserve.engine.request import GapPrompt
from oaiserve.engine.text.stored_tokenizer import StoredTokenizer
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.engine.text.tokenizers_for_tests import byte_level, sentencepiece

PSM = "{0}he{1}lo{2}"
SPM = "{1}lo{0}he{2}"
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def made(*controls: str, build: object = byte_level, special: bool = True, of_file: tuple[str, ...] = ()) -> Tokenizer:
    backend = build()  # type: ignore[operator]
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in controls])
    return Tokenizer(
        StoredTokenizer(
            backend_tokenizer=backend,
            length=backend.get_vocab_size(),
            split_special_tokens=False,
            eos_token_ids=[],
            special_tokens_map={},
            chat_template=None,
            response_template=None,
            fill_texts=[*of_file],
        )
    )


def texts(tokenizer: Tokenizer, prompt: GapPrompt) -> list[str]:
    return [tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.encode(prompt)]


@pytest.mark.parametrize(
    ("controls", "order"),
    [
        (QWEN, PSM),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), PSM),
        (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), PSM),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), PSM),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), PSM),
        (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), PSM),
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), SPM),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), SPM.removesuffix("{2}")),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_each_family_gets_its_own_tokens_in_its_own_order(controls: tuple[str, ...], order: str, special: bool) -> None:
    tokenizer = made(*controls, special=special)
    token_ids = tokenizer.encode(GapPrompt("he", "lo"))
    assert tokenizer.decode(token_ids) == order.format(*controls)
    assert list(tokenizer.text_parts(GapPrompt("he", "lo"), token_ids)).count("he") == 1


def test_a_model_without_such_tokens_has_none() -> None:
    assert made().fill is None
    assert made(*QWEN[:2]).fill is None


def test_the_roles_that_a_file_names_win_over_usual_names() -> None:
    assert texts(made(*QWEN, "<a>", "<b>", "<c>", of_file=("<a>", "<b>", "<c>")), GapPrompt("he", "w")) == [
        *("<a>", "he", "<b>", "w", "<c>")
    ]
    seed = ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>")
    assert made(*seed, of_file=seed).fill == made(*seed).fill


@pytest.mark.parametrize("special", [True, False])
def test_control_tokens_in_the_sides_are_text(special: bool) -> None:
    tokenizer = made(*QWEN, special=special)
    assert tokenizer.fill is not None
    prompt = GapPrompt("he<|fim_suffix|>x<|im_end|>", "<|fim_middle|>")
    token_ids = tokenizer.encode(prompt)
    assert [i for i in token_ids if i in {*tokenizer.fill.ids, *tokenizer.special_ids}] == list(tokenizer.fill.ids)
    assert tokenizer.decode(token_ids) == f"<|fim_prefix|>{prompt.prefix}<|fim_suffix|>{prompt.suffix}<|fim_middle|>"
    assert "".join(tokenizer.text_parts(prompt, token_ids)) == prompt.prefix


def test_a_prefix_of_token_ids_is_used_as_it_is() -> None:
    tokenizer = made(*QWEN)
    assert tokenizer.fill is not None
    before, between, after = tokenizer.fill.ids
    prompt = GapPrompt((7, between, 8), "w")
    token_ids = tokenizer.encode(prompt)
    assert token_ids == [before, 7, between, 8, between, *tokenizer.backend.encode("w").ids, after]
    own = tokenizer.decode([7, between, 8])
    assert "".join(tokenizer.text_parts(prompt, token_ids)) == own


def test_only_the_prefix_gets_the_space_that_sentencepiece_puts_before_a_text() -> None:
    tokenizer = made("▁<PRE>", "▁<SUF>", "▁<MID>", build=sentencepiece)
    assert texts(tokenizer, GapPrompt("hello", "he")) == [
        *("<s>", "▁<PRE>", "▁h", "e", "ll", "o", "▁<SUF>", "h", "e", "▁<MID>")
    ]
    assert texts(tokenizer, GapPrompt("h", "</s>w", add_special_tokens=False))[:5] == [
        *("▁<PRE>", "▁h", "▁<SUF>", "<0x3C>", "<0x2F>")
    ]


def test_a_long_side_is_encoded_in_pieces() -> None:
    tokenizer = made(*QWEN)
    prefix = "hello wow " * 5000
    suffix = "wow hello " * 5000
    result = tokenizer.decode(tokenizer.encode(GapPrompt(prefix, suffix)))
    assert result == f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
