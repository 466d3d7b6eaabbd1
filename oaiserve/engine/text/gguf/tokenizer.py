"""Makes the tokenizer of a GGUF file from its metadata."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, processors

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.gguf import GgufHead
from oaiserve.engine.text.gguf import bpe, encoders
from oaiserve.engine.text.gguf.splits import ADD_BOS, ADD_SEPARATOR, GEMMA4, SPACED
from oaiserve.engine.text.gguf.vocabulary import Vocabulary
from oaiserve.engine.text.stored_tokenizer import StoredTokenizer

# Names of special tokens in templates and libraries, keyed by their names in the metadata.
_NAMES = {
    **{name: f"{name}_token" for name in ("bos", "eos", "cls", "mask")},
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
}
# Special tokens of Phi-3 that don't absorb the white space after them. All others do.
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")


def load_gguf_tokenizer(head: GgufHead) -> StoredTokenizer:
    """Return the tokenizer of a file. Raises BadFile if the file has none, or one of an unknown kind."""
    vocabulary = Vocabulary(head.read_tokenizer())
    tokenizer = _build(vocabulary)
    add_tokens(tokenizer, vocabulary)
    if (processor := _post_processor(vocabulary)) is not None:
        tokenizer.post_processor = processor
    with_names = {name: vocabulary.token_id(role) for role, name in _NAMES.items()}
    return StoredTokenizer(
        backend_tokenizer=tokenizer,
        length=len(vocabulary.tokens),
        split_special_tokens=False,
        eos_token_ids=vocabulary.end_ids,
        special_tokens_map={name: vocabulary.tokens[i] for name, i in with_names.items() if i is not None},
        chat_template=vocabulary.chat_template,
        response_template=None,
        fill_texts=vocabulary.fill_texts,
    )


def _build(vocabulary: Vocabulary) -> Tokenizer:
    match vocabulary.kind:
        case "gemma4":
            return bpe.spaced(vocabulary, has_merges=True)
        case "gpt2" if vocabulary.splits in SPACED:
            return bpe.spaced(vocabulary, has_merges=True)
        case "gpt2":
            return bpe.byte_level(vocabulary)
        case "llama":
            return bpe.spaced(vocabulary, has_merges=False)
        case "whitespace":
            return bpe.words(vocabulary)
        case "bert":
            return encoders.word_piece(vocabulary)
        case "t5":
            return encoders.unigram(vocabulary)
    kinds = "bert, gemma4, gpt2, llama, t5 and whitespace"
    raise BadFile(f"its tokenizer is of the kind {vocabulary.kind[:100]!r}, and those that can be read are {kinds}")


def add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Add the tokens that are matched in a text before anything else."""
    is_phi3 = vocabulary.kind == "llama" and vocabulary.architecture in ("phi3", "phimoe")
    is_roberta = vocabulary.kind != "bert" and _adds_separator(vocabulary)
    mask = vocabulary.token_id("mask") if is_roberta else None

    def added(token_id: int, *, special: bool) -> AddedToken:
        text = vocabulary.tokens[token_id]
        takes_space = is_phi3 and text not in _PHI3_PLAIN
        return AddedToken(text, special=special, normalized=False, lstrip=token_id == mask, rstrip=takes_space)

    tokenizer.add_special_tokens([added(i, special=True) for i in sorted(vocabulary.special_ids)])
    tokenizer.add_tokens([added(i, special=False) for i in sorted(vocabulary.user_defined_ids)])


def _post_processor(vocabulary: Vocabulary) -> processors.TemplateProcessing | None:
    """Return the step that adds special tokens around a text, or around and between two; None if there are none."""
    before, after, between = _affixes(vocabulary)
    special = [
        {"id": str(token_id), "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]}
        for token_id in {*before, *after, *between}
    ]
    if not special:
        return None
    second = 1 if vocabulary.kind == "bert" else 0
    of_second = [f"{part}:{second}" for part in ("$B", *after)]
    first = [*map(str, before), "$A", *map(str, after)]
    return processors.TemplateProcessing(
        single=first, pair=[*first, *map(str, between), *of_second], special_tokens=special
    )


def _affixes(vocabulary: Vocabulary) -> tuple[list[int], list[int], list[int]]:
    """Return the ids of the special tokens before a text, after it, and between two texts."""

    def first_of(*roles: str) -> list[int]:
        return [i for i in map(vocabulary.token_id, roles) if i is not None][:1]

    if vocabulary.kind == "bert":
        return first_of("cls", "bos"), first_of("seperator", "eos"), []
    kind = vocabulary.kind
    splits = vocabulary.splits
    # Files of Gemma 4 may say that it has no BOS, although it has.
    is_gemma4 = kind == "gemma4" or splits in GEMMA4
    adds_bos = is_gemma4 or vocabulary.get("add_bos_token", kind == "llama" or splits in ADD_BOS)
    adds_eos = vocabulary.get("add_eos_token", kind == "t5")
    # Files of ModernBERT say that it has two separators, although it hasn't.
    adds_more = _adds_separator(vocabulary) and splits != "modern-bert"
    return (
        first_of("bos", "cls") if adds_bos else [],
        first_of("eos", "seperator") if adds_eos else [],
        first_of("seperator", "eos") if adds_more else [],
    )


def _adds_separator(vocabulary: Vocabulary) -> bool:
    default = vocabulary.kind == "t5" or vocabulary.splits in ADD_SEPARATOR
    return bool(vocabulary.get("add_sep_token", default))
