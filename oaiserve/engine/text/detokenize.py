"""Detokenizers turn token ids into text in whole characters, and stop matchers keep stop strings out of it.

Each choice has one of each, owned by the engine thread. This module must not depend on torch, the scheduler or HTTP.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_table() -> dict[int, str]:
    """Return a table for `str.translate` that maps each character of byte-level BPE to the one whose code is its byte.

    GPT-2 writes printable Latin-1 bytes as themselves and the other 68 as the characters from U+0100 on. A character
    below U+0100 that stands for no byte becomes U+FFFF, so that encoding the result as Latin-1 fails.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = dict.fromkeys(others, "\uffff")
    table |= {byte: chr(byte) for byte in printable}
    table |= {0x100 + i: chr(byte) for i, byte in enumerate(others)}
    return table


_BYTE_LEVEL = _byte_level_table()


class TokenTable:
    """The true bytes of each token id of one tokenizer. All detokenizers of the tokenizer share the table.

    The bytes of a token follow from the rules of the tokenizer's own decoder, which is recognised by its structure:
    byte-level BPE, sentencepiece's Replace / ByteFallback / Fuse / Strip, or Metaspace. With any other decoder, text is
    decoded by the tokenizer itself (`has_bytes` is False).
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.has_bytes = True
        self.strip_start = 0  # leading spaces that decoding removes at the start of a text
        self.drop_first_spaces = False  # Metaspace: the first token of a text has no spaces at all
        self.is_byte_level = False  # The text is exactly the bytes of its tokens, joined.
        self._byte_fallback = False
        self._replace: list[tuple[str, str]] = []
        self._cache: dict[int, bytes] = {}
        self.whole_texts: dict[int, str] = {}  # cache of texts, for tokens whose bytes are whole characters
        # The pickled state of a decoder is its JSON. That of the whole tokenizer would include the vocabulary.
        self._recognise(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": None})
        # Added tokens whose text the tokenizer's own decoder mistakes for bytes: DeepSeek has one for "ö".
        self._like_bytes = {
            token_id: text
            for token_id, text in self._added.items()
            if self.is_byte_level
            and not text.isascii()
            and backend.decode([token_id], skip_special_tokens=False) != text
        }

    def _recognise(self, decoder: dict[str, Any]) -> None:
        if decoder["type"] == "Sequence":
            steps = decoder["decoders"]
        else:
            steps = [decoder]
        while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
            self._replace.append((steps[0]["pattern"]["String"], steps[0]["content"]))
            steps = steps[1:]
        if steps and steps[0]["type"] == "ByteFallback":
            self._byte_fallback = True
            steps = steps[1:]
        match [step["type"] for step in steps]:
            case ["ByteLevel"] if not self._replace and not self._byte_fallback:
                self.is_byte_level = True
            case ["Metaspace"] if not self._replace and not self._byte_fallback:
                self._replace = [(steps[0]["replacement"], " ")]
                self.drop_first_spaces = steps[0]["prepend_scheme"] != "never"
            case ["Fuse"] if self._replace:
                pass
            case ["Fuse", "Strip"] if self._replace and steps[1]["content"] == " " and steps[1]["stop"] == 0:
                self.strip_start = steps[1]["start"]
            case _:
                self.has_bytes = False

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token within a text: possibly part of a character, or none for an unknown id (if
        `has_bytes`)."""
        data = self._cache.get(token_id)
        if data is None:
            data = self._cache[token_id] = self._work_out(token_id, self._replace)
        return data

    def first_bytes_of(self, token_id: int) -> bytes:
        if not self.drop_first_spaces:
            return self.bytes_of(token_id)
        return self._work_out(token_id, [(space, "") for space, _ in self._replace])

    def _work_out(self, token_id: int, replace: list[tuple[str, str]]) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            if token_id in self._added:
                return self._added[token_id].encode()
            try:
                return token.translate(_BYTE_LEVEL).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()
        for old, new in replace:
            token = token.replace(old, new)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.encode()

    def bytes_alone(self, token_id: int) -> bytes:
        """Return the true bytes of a token on its own, for logprobs. It is the same object each time."""
        if self.has_bytes:
            return self.bytes_of(token_id)
        data = self._cache.get(token_id)
        if data is None:
            data = self._cache[token_id] = self.backend.decode([token_id], skip_special_tokens=False).encode()
        return data

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        runs = [(False, list(token_ids))]
        if self._like_bytes:
            runs = [(is_text, list(run)) for is_text, run in groupby(token_ids, self._like_bytes.__contains__)]
        others = [run for is_text, run in runs if not is_text]
        decoded = iter(self.backend.decode_batch(others, skip_special_tokens=False))  # This releases the GIL.
        return "".join(
            "".join(map(self._like_bytes.__getitem__, run)) if is_text else next(decoded) for is_text, run in runs
        )

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool, visible_ids: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Return a detokenizer for one choice after `prompt_ids`. Special tokens are skipped, except `visible_ids`."""
        if skip_special_tokens:
            hidden = self.special_ids - visible_ids
        else:
            hidden = frozenset()
        return (ByteDetokenizer if self.has_bytes else WindowDetokenizer)(self, prompt_ids, hidden)


class ByteDetokenizer:
    """Joins the bytes of tokens to text. It holds back at most 3 bytes while they may become a character.

    An invalid run of byte-fallback tokens yields one U+FFFD for each broken character. The Rust decoder looks at the
    whole run and returns one U+FFFD for each of its bytes, even those of valid characters. A stream cannot see the
    whole run in time, and that result would be worse.
    """

    def __init__(self, table: TokenTable, prompt_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._table = table
        self._hidden = hidden
        self._is_first = table.drop_first_spaces and all(i in hidden for i in prompt_ids)
        self._to_strip = table.strip_start
        prompt = (table.bytes_of(i) for i in prompt_ids if i not in hidden)
        while self._to_strip and (data := next(prompt, None)) is not None:
            num_spaces = len(data) - len(data.lstrip(b" "))
            if num_spaces == len(data):
                self._to_strip = max(0, self._to_strip - num_spaces)
            else:
                self._to_strip = 0
        self._held = b""  # the beginning of a character
        # The prompt may end inside a character. At most 3 of its bytes are in the last tokens.
        self._decode(b"".join(table.bytes_of(i) for i in prompt_ids[-4:] if i not in hidden))

    def push(self, token_id: int) -> str:
        """Take a token, and return the characters that it completes: often none, sometimes several."""
        if token_id in self._hidden:
            return ""
        if not (self._held or self._is_first or self._to_strip):
            whole = self._table.whole_texts.get(token_id)
            if whole is not None:
                return whole
            data = self._table.bytes_of(token_id)
            text = self._decode(data)
            if not self._held and text.encode() == data:
                self._table.whole_texts[token_id] = text
            return text
        if self._is_first:
            self._is_first = self._table.backend.id_to_token(token_id) is None
            return self._decode(self._table.first_bytes_of(token_id))
        text = self._decode(self._table.bytes_of(token_id))
        if self._to_strip:
            return self._strip(text)
        return text

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD for an incomplete character. Call it once, after the last push."""
        return self._strip(self._decode(b"", is_last=True))

    def _decode(self, data: bytes, *, is_last: bool = False) -> str:
        data = self._held + data
        text, num_decoded = codecs.utf_8_decode(data, "replace", is_last)
        self._held = data[num_decoded:]
        return text

    def _strip(self, text: str) -> str:
        start = 0
        while self._to_strip and start < len(text):
            if text[start] == " ":
                self._to_strip -= 1
                start += 1
            else:
                self._to_strip = 0
        return text[start:]


class WindowDetokenizer:
    """A detokenizer for tokenizers whose tokens have no fixed bytes: it decodes a short window of tokens with the new
    ones and without them, and returns the difference."""

    MAX_HELD_TOKENS = 4  # A character has at most 4 bytes, so one still broken after this many tokens stays broken.

    def __init__(self, table: TokenTable, prompt_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._backend = table.backend
        self._hidden = hidden
        # Tokens that are decoded again for context, followed by those whose text has not been returned yet.
        self._window = [i for i in prompt_ids[-16:] if i not in hidden]
        self._num_context = len(self._window)
        self._context_text = self._text(self._window)

    def _text(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def push(self, token_id: int) -> str:
        if token_id in self._hidden or self._backend.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._text(self._window)
        is_whole = len(text) > len(self._context_text) and not text.endswith("\ufffd")
        if is_whole or len(self._window) - self._num_context > self.MAX_HELD_TOKENS:
            return self._advance(text)
        return ""

    def finish(self) -> str:
        return self._advance(self._text(self._window))

    def _advance(self, text: str) -> str:
        new_text = text[len(self._context_text) :]
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._context_text = self._text(self._window)
        return new_text


Detokenizer = ByteDetokenizer | WindowDetokenizer


class StopStrings:
    """The stop strings of a request, shared by the matchers of all its choices. If two end at the same position, the
    first in the list wins."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        """No stop string may be empty."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self.stops = tuple(stops)
        self.include_in_output = include_in_output
        self._by_first: defaultdict[str, list[str]] = defaultdict(list)  # stop strings by their first character
        for stop in stops:
            self._by_first[stop[0]].append(stop)
        self._longest = max(map(len, stops), default=1)

    def held_from(self, text: str) -> int:
        """Return where the text ends with the beginning of a stop string, the longest one, or else the text's
        length."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if (stops := self._by_first.get(text[start])) is not None:
                end = text[start:]
                if any(stop.startswith(end) and stop != end for stop in stops):
                    return start
        return len(text)


class StopMatcher:
    """Searches the text of one choice, piece by piece, for stop strings, and holds back the beginning of one."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def push(self, text: str, *, enabled: bool = True) -> tuple[str, str | None]:
        """Take a piece of text. Return the text to send now, and the complete stop string, if any.

        Unless `enabled` (before min_tokens), a stop string that ends in this piece doesn't count, but one that only
        begins in it counts later. Do not push again after a match.
        """
        stops = self._stops
        if not stops.stops:
            return text, None
        held = self._held + text
        for end in range(len(self._held) + 1, len(held) + 1) if enabled else ():
            if held.endswith(stops.stops, 0, end):
                stop = next(stop for stop in stops.stops if held.endswith(stop, 0, end))
                self._held = ""
                return held[: end if stops.include_in_output else end - len(stop)], stop
        cut = stops.held_from(held)
        self._held = held[cut:]
        return held[:cut], None

    def finish(self) -> str:
        """Return the text that is still held back when the text ends for another reason."""
        held = self._held
        self._held = ""
        return held
