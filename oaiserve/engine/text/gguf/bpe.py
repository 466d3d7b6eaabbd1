"""Byte-pair encoding of GGUF files: over bytes (GPT-2, Llama 3, Qwen), and over whole texts with "▁" for spaces
(Llama 2, Gemma)."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from oaiserve.engine.text.gguf.splits import WHOLE_TOKENS, expressions
from oaiserve.engine.text.gguf.vocabulary import SPACE, Vocabulary


def byte_level(vocabulary: Vocabulary) -> Tokenizer:
    name = vocabulary.splits
    cuts = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in expressions(name)]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, vocabulary.merges, ignore_merges=name in WHOLE_TOKENS))
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cuts)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def words(vocabulary: Vocabulary) -> Tokenizer:
    """Return a tokenizer whose tokens are parts of words, without a token for the space
    (jina-embeddings-v2-base-zh)."""
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, vocabulary.merges))
    if vocabulary.get("normalizer.lowercase", False):
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def spaced(vocabulary: Vocabulary, *, has_merges: bool) -> Tokenizer:
    """Return a tokenizer that writes spaces as "▁", and merges by the file's merges or, like sentencepiece, by its
    scores."""
    merges = vocabulary.merges if has_merges else _merges_by_scores(vocabulary)
    unknown = vocabulary.token_id("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids,
            merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=vocabulary.has_bytes,
        )
    )
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    normalizer: normalizers.Normalizer = normalizers.Replace(" ", SPACE)
    if not has_merges and vocabulary.get("add_space_prefix", True):
        normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizer])
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _merges_by_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens that form another token, by descending score.

    Sentencepiece merges the two neighbours whose joined token has the best score. Special tokens are left out: they are
    matched in a text before that, or never result from merges.
    """
    ids = {token: token_id for token, token_id in vocabulary.ids.items() if vocabulary.is_normal(token_id)}
    scores = vocabulary.scores
    merges = []
    for token in sorted(ids, key=lambda token: (-scores[ids[token]], ids[token])):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += sorted(
            (pair for pair in pairs if pair[0] in ids and pair[1] in ids), key=lambda p: (ids[p[0]], ids[p[1]])
        )
    return merges
