"""Fill-in-the-middle: a model's control tokens for it, and the order of the two sides of a gap.

Code models are trained to write the middle after both of its sides. Model families differ in the names of the control
tokens, and in which side comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer as RustTokenizer

# The tokens before the prefix, before the suffix and before the middle, and whether the suffix comes first.
_KNOWN: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), False),  # Qwen2.5-Coder, CodeGemma, Granite 4
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), False),  # StarCoder, Granite Code, StableCode, Refact
    (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), False),  # SantaCoder
    (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), False),  # DeepSeek
    (("▁<PRE>", "▁<SUF>", "▁<MID>"), False),  # CodeLlama
    (("<PRE>", "<SUF>", "<MID>"), False),
    (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), False),  # GLM
    (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), True),  # Seed-Coder
    (("[PREFIX]", "[SUFFIX]"), True),  # Codestral, which writes the middle directly after the prefix
)


@dataclass(frozen=True, slots=True)
class FillTokens:
    """A model's control tokens around the two sides of a gap."""

    ids: tuple[int, ...]  # before the prefix, before the suffix, and before the middle if there is one
    texts: tuple[str, ...]  # the texts of the same tokens
    suffix_first: bool

    def joined(self, start: Sequence[int], prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Return the prompt that requests the middle, after the tokens that start a text."""
        before_prefix, before_suffix, *before_middle = self.ids
        sides = [[before_prefix, *prefix], [before_suffix, *suffix]]
        if self.suffix_first:
            sides.reverse()
        return [*start, *sides[0], *sides[1], *before_middle]

    def prefix_of(self, token_ids: Sequence[int]) -> slice:
        """Return where the prefix is in a fill-in-the-middle prompt. Its suffix contains no control tokens, because it
        is text."""
        before_prefix, before_suffix, *before_middle = self.ids
        if self.suffix_first:
            return slice(token_ids.index(before_prefix) + 1, len(token_ids) - len(before_middle))
        end = len(token_ids) - 1 - [*reversed(token_ids)].index(before_suffix)
        return slice(token_ids.index(before_prefix) + 1, end)


def fill_tokens(backend: RustTokenizer, of_file: Sequence[str] = ()) -> FillTokens | None:
    """Return the control tokens of a vocabulary, or None if it has no complete set.

    `of_file` contains the tokens before the prefix, the suffix and the middle, if the model's file names them by role.
    """
    known = [*_KNOWN]
    if of_file:
        orders = {texts[0]: suffix_first for texts, suffix_first in _KNOWN}
        known.insert(0, (tuple(of_file), orders.get(of_file[0], False)))
    for texts, suffix_first in known:
        ids = [token_id for text in texts if (token_id := backend.token_to_id(text)) is not None]
        if len(ids) == len(texts):
            return FillTokens(tuple(ids), texts, suffix_first)
    return None
