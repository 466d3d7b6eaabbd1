"""Finds positions at which a text can be cut and encoded piece by piece, from the definition of its tokenizer.

A cut must be certain, because a wrong one would give wrong ids. So a tokenizer is only analysed if this file knows each
of its components; for any other, texts are encoded whole. This module must not depend on HTTP, prompts or the length of
the context.

Two families are supported:

- Byte-level BPE (GPT-2, Llama 3, Qwen). A pattern splits the text, and each split is encoded on its own. So a position
  is a cut if no match of the pattern can contain the characters on both sides. In the patterns known here, that is the
  case between a letter or digit and a space, a line end, a comma or a full stop.
- BPE over a whole text with "▁" for spaces (Llama 2, Gemma, Mistral). No pattern splits the text, but BPE only produces
  tokens of its vocabulary. A position between a letter and a space is a cut if no token contains that letter before
  a "▁".

In both, added tokens are matched before anything else, and may absorb the white space around them. So none of them may
touch a cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokenizers import models

if TYPE_CHECKING:
    import tokenizers

PIECE_CHARACTERS = 2**14  # encoded within about five milliseconds
SEARCHED_CHARACTERS = 2**20  # longest search for a cut, which blocks other threads for about 30 ms
MOST_CANDIDATES = 64  # positions that are tried for a cut; a text could have millions of unsuitable ones
WINDOW_CHARACTERS = 32  # context on both sides of a cut for the final check with the tokenizer
SPACE = "▁"

# Letters and digits in every version of Unicode that a tokenizer may use. There are many more, but these suffice.
_LETTERS = "0-9A-Za-zÀ-ÖØ-öø-ÿА-яא-תぁ-んァ-ヺ一-龥가-힣"
_SPLITTING = re.compile(f"(?<=[{_LETTERS}])(?=[ \n,.。、\uff0c])")
_SPACES = re.compile(f"(?<=[{_LETTERS}])(?= )")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Known alternatives of models' patterns. None of them matches a letter or digit together with a following character of
# _SPLITTING, none looks behind, and only white space looks ahead, by one character.
_WHITE_SPACE = r"\s+"
_PUNCTUATION = {
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
}
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ALTERNATIVES = {
    *_PUNCTUATION,
    _WHITE_SPACE,
    r"\s+(?!\S)",
    r"\s*[\r\n]+",
    r"\s*[\r\n]",
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
    _CONTRACTION,
    r"'(?i:[sdmt]|ll|ve|re)",
    r" ?\p{L}+",
    r" ?\p{N}+",
    r"\p{N}",
    r"\p{N}{1,3}",
    r"\p{N}{1,3}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    *(
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{but}]{upper}[{_LOWER}{but}]{lower}{contraction}"
        for upper, lower in (("*", "+"), ("+", "*"))
        for contraction in ("", f"{_CONTRACTION}?")
        for but in ("", r"&&[^\p{Han}]")
    ),
    r"\p{Han}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
}


class EncodingRules:
    """The rules of one tokenizer. It never changes, so any number of threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._candidates: re.Pattern[str] | None = None  # None: there are no cuts
        self._left: frozenset[str] | None = None  # letters after which a cut may be; None: all that the pattern allows
        self._has_spaces = False  # The tokenizer writes spaces as "▁".
        self._drops_space = False  # The normalizer puts a space before each text.
        self._added: dict[str, list[str]] = {}  # added tokens, by their first character
        self._longest_added = 0
        model: Any = backend.model
        if isinstance(model, models.BPE) and not model.dropout:
            normalizer = _definition(backend.normalizer)
            pre_tokenizer = _definition(backend.pre_tokenizer)
            self._recognise_byte_level(normalizer, pre_tokenizer)
            self._recognise_spaces(normalizer, pre_tokenizer, model)

    def pieces(self, text: str, backend: tokenizers.Tokenizer | None = None) -> Iterator[str]:
        """Yield pieces of a text whose ids, joined and without special tokens, are exactly those of the text.

        The text must be valid Unicode. Where no cut is certain, a piece is as long as necessary. `backend`, if given,
        is the same tokenizer with fewer added tokens.
        """
        backend = backend or self._backend
        start = 0
        while len(text) - start > PIECE_CHARACTERS and (cut := self._find_cut(text, start, backend)) is not None:
            yield text[start:cut]
            start = cut + self._drops_space
        yield text[start:]

    def _find_cut(self, text: str, start: int, backend: tokenizers.Tokenizer) -> int | None:
        """Return the last cut within the next piece, or else the first one after it; None if there is none."""
        if self._candidates is None:
            return None
        last = start + PIECE_CHARACTERS
        num_tried = 0
        for end in range(last, start + 1, -256):
            first = max(start + 1, end - 256)  # no piece may be empty
            for place in reversed([match.start() for match in self._candidates.finditer(text, first, end)]):
                if self._is_cut(text, place, backend):
                    return place
                num_tried += 1
                if num_tried == MOST_CANDIDATES:
                    return None
        for match in self._candidates.finditer(text, last, last + SEARCHED_CHARACTERS):
            if self._is_cut(text, match.start(), backend):
                return match.start()
            num_tried += 1
            if num_tried == MOST_CANDIDATES:
                return None
        return None

    def _is_cut(self, text: str, at: int, backend: tokenizers.Tokenizer) -> bool:
        """Return whether a candidate is a cut. The tokenizer itself must agree, in case its definition is
        misleading."""
        if self._left is not None and text[at - 1] not in self._left:
            return False
        right = at + self._drops_space
        if right == len(text) or any(self._is_touched(text, place) for place in {at, right}):
            return False
        return self._agrees(text, at, right, backend)

    def _agrees(self, text: str, at: int, right: int, backend: tokenizers.Tokenizer) -> bool:
        before = text[max(0, at - WINDOW_CHARACTERS) : at]
        after = text[right : right + WINDOW_CHARACTERS]
        both = before + text[at:right] + after
        encoded = backend.encode_batch_fast([both, before, after], add_special_tokens=False)
        return bool(encoded[0].ids == encoded[1].ids + encoded[2].ids)

    def _is_touched(self, text: str, at: int) -> bool:
        """Return whether an added token contains this position, or begins or ends there."""
        first = max(0, at - self._longest_added)
        around = text[first : at + self._longest_added]
        at = at - first
        if self._has_spaces:
            around = around.replace(" ", SPACE)  # Then it doesn't matter to the search how the space is spelled.
        for start in range(at + 1):
            for token in self._added.get(around[start : start + 1], ()):
                if start + len(token) >= at and around.startswith(token, start):
                    return True
        return False

    def _recognise_byte_level(self, normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None) -> None:
        if normalizer is not None and normalizer["type"] != "NFC":
            return
        steps = _steps(pre_tokenizer, "pretokenizers")
        if not steps or steps[-1]["type"] != "ByteLevel":
            return
        patterns = [_GPT2] if steps[-1]["use_regex"] else []
        for step in steps[:-1]:
            match step:
                case {"type": "Digits"}:  # equivalent to the pattern of digits
                    pass
                case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                    patterns.append(pattern)
                case _:
                    return
        added = self._backend.get_added_tokens_decoder().values()
        if normalizer is not None and any(token.normalized for token in added):
            return  # These are matched in the normalized text, which may differ.
        alternatives = [set(_alternatives(pattern)) for pattern in patterns]
        is_known = all(characters <= _ALTERNATIVES for characters in alternatives)
        # One alternative must match any text that may follow a cut. Otherwise the cut could be inside text that none
        # matches.
        if is_known and any(_WHITE_SPACE in characters and characters & _PUNCTUATION for characters in alternatives):
            if steps[-1]["add_prefix_space"]:
                self._candidates = _SPACES
            else:
                self._candidates = _SPLITTING
            self._set_added([token.content for token in added])

    def _recognise_spaces(
        self, normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None, model: Any
    ) -> None:
        normalizers = _steps(normalizer, "normalizers")
        prepends = normalizers[:1] == [{"type": "Prepend", "prepend": SPACE}]
        replaces = normalizers[prepends:] == [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
        match pre_tokenizer:
            case None if replaces:
                pass
            case {"type": "Split", "pattern": {"String": " "}} if replaces:  # There are no spaces left.
                pass
            case {"type": "Metaspace", "replacement": "▁"} if not normalizers:
                pass
            case _:
                return
        if model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix:
            return
        vocab = self._backend.get_vocab(with_added_tokens=False)
        if SPACE in vocab:
            with_inner_space = (token for token in vocab if token.rfind(SPACE) > 0)
            before_space = {
                token[i - 1] for token in with_inner_space for i in range(1, len(token)) if token[i] == SPACE
            }
            self._left = frozenset(token for token in vocab if len(token) == 1) - before_space
            self._candidates = _SPACES
            self._has_spaces = True
            self._drops_space = prepends
            added = self._backend.get_added_tokens_decoder().values()
            self._set_added([token.content.replace(" ", SPACE) for token in added])

    def _set_added(self, tokens: list[str]) -> None:
        for token in filter(None, tokens):
            self._added.setdefault(token[0], []).append(token)
        self._longest_added = max(map(len, tokens), default=0)


def _definition(part: Any) -> dict[str, Any] | None:
    """Return the definition of one part of a tokenizer: its pickled state. The whole tokenizer's would include the
    vocabulary."""
    definition: dict[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return definition


def _steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return step[name] if step["type"] == "Sequence" else [step]


def _alternatives(pattern: str) -> Iterator[str]:
    """Yield the alternatives of a regular expression, in the same form as `_ALTERNATIVES`."""
    pattern = re.sub(r"\\x\{([0-9a-f]+)\}", lambda match: chr(int(match[1], 16)), pattern)
    pattern = pattern.replace("\r", r"\r").replace("\n", r"\n")
    depth = 0
    start = 0
    i = 0
    while i < len(pattern):
        if pattern[i] == "\\":
            i += 1
        elif pattern[i] in "([":
            depth += 1
        elif pattern[i] in ")]":
            depth -= 1
        elif pattern[i] == "|" and depth == 0:
            yield pattern[start:i]
            start = i + 1
        i += 1
    yield pattern[start:]
