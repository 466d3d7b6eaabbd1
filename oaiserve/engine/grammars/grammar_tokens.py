"""The tokens of a model as grammars need them, and those that masks leave out because models don't write them there.

llguidance reads the tokens once for all grammars. This module must not depend on how a grammar is compiled or matched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import llguidance
import numpy as np
from numpy.typing import NDArray

from oaiserve.engine.text.detokenize import TokenTable

MOST_FORCED_CHARACTERS = 256  # characters examined when a text is forced

Mask = NDArray[np.uint32] | NDArray[np.int32]

# Texts whose tokens are collected once, for grammars that allow all of them at some place. Otherwise each mask would
# examine every token. Neither JSON strings nor "." in a regex exclude any of these characters.
_PLAIN = r'[^"\\\x00-\x1F\x7F\u{2028}\u{2029}]'
_SLICES = [f"{_PLAIN}{{1,10}}", f"{_PLAIN}{{1,30}}", f"{_PLAIN}+"]


# A token may contain the beginning of a JSON text together with the next byte, which may begin a non-ASCII character.
_CLOSINGS = (b"}", b"]")
_OPENINGS = (b" ", b"{", b" {", b"[", b" [", b"[{", b" [{")
_MOST_JOINED = 4  # bytes of an opening and the next byte
_AFTER_OPENING = [b"%c" % byte for byte in (*range(32, 127), *b"\t\n\r", 0xC3, 0xCE, 0xD0, 0xE3, 0xE4, 0xF0)]


class _Opening:
    """A token that is removed from a mask if, for each byte that may come next, the vocabulary has a token that joins
    the two."""

    def __init__(self, text: bytes, ids_of: Mapping[bytes, int], eos_token_ids: Sequence[int], num_words: int) -> None:
        token_id = ids_of[text]
        joined = {byte: ids_of[text + byte] for byte in _AFTER_OPENING if byte > b" " and text + byte in ids_of}
        apart = (ids_of[byte] for byte in _AFTER_OPENING if byte in ids_of and byte not in joined)
        self._apart = [[token_id, other] for other in (*apart, *eos_token_ids)]
        # `LineBreaks` removes a line break after a blank.
        line_break = ids_of.get(b"\n") if text == b" " else None
        self._apart_in_lines = [pair for pair in self._apart if pair[1] != line_break]
        self._joined = np.zeros(num_words, np.uint32)
        for other in joined.values():
            self._joined[other // 32] |= np.uint32(1 << other % 32)
        self._word = token_id // 32
        self._bit = np.uint32(1 << token_id % 32)

    def remove(self, words: NDArray[np.uint32], matcher: llguidance.LLMatcher, *, in_lines: bool) -> None:
        apart = self._apart_in_lines if in_lines else self._apart
        if not words[self._word] & self._bit or any(matcher.validate_tokens(pair) == 2 for pair in apart):
            return
        if (words & self._joined).any():
            words[self._word] &= ~self._bit


class LineBreaks:
    """Tokens that begin with a line break. In JSON, a line may break after an opening bracket or a comma, and before a
    closing bracket. Weak models also break lines around colons, and then lose the thread."""

    def __init__(self, tokens: Sequence[bytes], ids_of: Mapping[bytes, int]) -> None:
        bits = np.array([text.startswith(b"\n") for text in tokens])
        self._others = ~np.packbits(np.pad(bits, (0, -len(bits) % 32)), bitorder="little").view(np.uint32)
        self._line_break = [ids_of[b"\n"]] if b"\n" in ids_of else []
        self._before_closing = [[*self._line_break, ids_of[text]] for text in _CLOSINGS if text in ids_of]

    def may_follow(self, matcher: llguidance.LLMatcher, token_ids: list[int]) -> bool:
        """Return whether the grammar allows a line break after these tokens."""
        return matcher.validate_tokens([*token_ids, *self._line_break]) > len(token_ids)

    def remove(self, words: Mask, matcher: llguidance.LLMatcher, last_byte: bytes) -> None:
        """Remove these tokens from a mask unless a line break fits after the last byte, or before a closing bracket."""
        if last_byte in b"{[," or any(matcher.validate_tokens(pair) == 2 for pair in self._before_closing):
            return
        unsigned = words.view(np.uint32)
        if (unsigned & self._others).any():
            unsigned &= self._others


class Tokens:
    """The tokens of a model for llguidance: their bytes, or none for special tokens."""

    def __init__(self, table: TokenTable, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.table = table
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        # An end token is not text, even if the tokenizer does not mark it as special.
        textless = table.special_ids | set(eos_token_ids)
        self.tokens = [b"" if i in textless else table.bytes_of(i) for i in range(vocab_size)]
        self.tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), eos_token=eos_token_ids, slices=_SLICES
        )
        ids_of = {text: token_id for token_id, text in enumerate(self.tokens) if len(text) <= _MOST_JOINED}
        self.all_ids = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
        if vocab_size % 32:
            self.all_ids[-1] = (1 << vocab_size % 32) - 1
        # No text contains this byte, so any match lies within a single token.
        self._joined = b"\xff".join(self.tokens)
        self._ends = np.cumsum([len(token) + 1 for token in self.tokens])
        self._with_rest = lru_cache(self._find_with_rest)
        shared = (ids_of, eos_token_ids, len(self.all_ids))
        self.line_breaks = LineBreaks(self.tokens, ids_of)
        self._openings = [_Opening(text, *shared) for text in _OPENINGS if text in ids_of]

    def remove_joined(self, words: Mask, matcher: llguidance.LLMatcher, *, in_lines: bool = False) -> None:
        """Remove openings from a mask if models write them in one token with the only text that may follow.

        For example, a model that is about to write a number draws a single blank. If only a string may follow, the
        model has to continue with a token that it has never seen there, and answers "time(2020)" instead of "2020".
        """
        unsigned = words.view(np.uint32)
        for opening in self._openings:
            opening.remove(unsigned, matcher, in_lines=in_lines)

    def with_more(self, text: bytes, closing: bytes) -> Iterator[tuple[int, list[int]]]:
        """Yield ids whose tokens, after `text`, complete `closing` and have more than white space after it. Each id
        comes with the ids of that remainder."""
        for num_before in range(len(closing)):
            if text.endswith(closing[:num_before]):
                yield from self._with_rest(closing[num_before:], num_before == 0)

    def _find_with_rest(self, part: bytes, anywhere: bool) -> list[tuple[int, list[int]]]:
        """Find tokens with this part, `anywhere` or at their beginning, and more than white space after it.

        The part is whole characters or their ends. All tokens are searched at once, because one by one they take 25 ms.
        """
        starts = [match.start() for match in re.finditer(re.escape(part), self._joined)]
        found = []
        for token_id in dict.fromkeys(np.searchsorted(self._ends, starts, side="right").tolist()):
            before, _, behind = self.tokens[token_id].partition(part)
            if (anywhere or not before) and (rest := behind.lstrip()):
                found.append((token_id, self.ids_of_text(rest)))
        return found

    def ids_of_text(self, text: bytes) -> list[int]:
        """Return the ids of tokens that together spell this text. Unlike `__call__`, this covers all of a long text."""
        starts = range(0, len(text), MOST_FORCED_CHARACTERS)
        pieces = (self.tokenizer.tokenize_bytes(text[start : start + MOST_FORCED_CHARACTERS]) for start in starts)
        return [token_id for piece in pieces for token_id in piece]

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a forced text as the model would write it; for a long text, only those of its beginning."""
        text = text[:MOST_FORCED_CHARACTERS]
        token_ids = self.table.backend.encode(text, add_special_tokens=False).ids
        if b"".join(self.tokens[i] for i in token_ids if i < len(self.tokens)) == text.encode():
            return token_ids
        return self.tokenizer.greedy_tokenize(text)  # The tokenizer has added a space in front, or something similar.
