"""Tokenizers of encoders: WordPiece (BERT) and Unigram (XLM-RoBERTa, T5)."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.engine.text.gguf.vocabulary import CONTINUES, SPACE, Vocabulary

_MOST_WORD_CHARACTERS = 100  # longer words are unknown


def word_piece(vocabulary: Vocabulary) -> Tokenizer:
    unknown = vocabulary.token_id("unknown")
    if unknown is None:
        raise BadFile("its tokenizer has no unknown token")
    # Older files do not say whether the model expects lower case. Then its tokens reveal it.
    is_cased = any(vocabulary.is_normal(i) and "A" <= token[:1] <= "Z" for token, i in vocabulary.ids.items())
    lowercase = bool(vocabulary.get("normalizer.lowercase", not is_cased))
    tokenizer = Tokenizer(
        models.WordPiece(
            vocabulary.ids, unk_token=vocabulary.tokens[unknown], max_input_chars_per_word=_MOST_WORD_CHARACTERS
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=bool(vocabulary.get("normalizer.strip_accents", lowercase))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    return tokenizer


def unigram(vocabulary: Vocabulary) -> Tokenizer:
    unknown = vocabulary.token_id("unknown")
    pieces = list(zip(vocabulary.tokens, vocabulary.scores, strict=False))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=vocabulary.has_bytes))
    merges_spaces = bool(vocabulary.get("remove_extra_whitespaces", False))
    steps: list[normalizers.Normalizer] = []
    if (characters := vocabulary.get("precompiled_charsmap")) is not None:
        steps.append(normalizers.Precompiled(bytes(number & 0xFF for number in characters)))
    if merges_spaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    has_prefix = merges_spaces or vocabulary.get("add_space_prefix", True)
    scheme = "always" if has_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    return tokenizer
