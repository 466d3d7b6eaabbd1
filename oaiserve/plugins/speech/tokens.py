"""What the route, the model and the decoding process agree on: how sound counts in tokens, and how the result of a
window is written as numbers.

The engine carries results as vectors of 32-bit floats. That of a window has a head, and a row for each token, which
ends with the bytes of its text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    Floats = array[float]
else:
    Floats = array

RATE = 16_000  # samples per second
WINDOW_SECONDS = 30
TOKENS_PER_SECOND = 50  # positions of the encoder
SAMPLES_PER_TOKEN = RATE // TOKENS_PER_SECOND
NO_TIME = -1.0
REFUSED = 3  # the exit code of a process that says why it has no samples


class SpokenToken(NamedTuple):
    """A token of a window's text, or one of its timestamps. Times are in seconds from the window's start."""

    token_id: int
    start: float = NO_TIME  # when the token is spoken; NO_TIME: unknown, or a timestamp
    end: float = NO_TIME
    text: bytes = b""  # maybe a part of a character; empty for a timestamp


class WindowText(NamedTuple):
    """The text of a window, as the model has decoded it."""

    language_id: int  # the token of its language; -1: the model knows one language only
    temperature: float
    average_logprob: float
    no_speech_probability: float
    tokens: Sequence[SpokenToken]

    def as_floats(self) -> Floats:
        head = (self.language_id, self.temperature, self.average_logprob, self.no_speech_probability)
        rows = ((token.token_id, token.start, token.end, len(token.text), *token.text) for token in self.tokens)
        return array("f", [*head, *chain.from_iterable(rows)])

    @classmethod
    def read(cls, vector: Floats) -> WindowText:
        language_id, temperature, logprob, no_speech = vector[:4]
        tokens = []
        place = 4
        while place < len(vector):
            token_id, start, end, num_bytes = vector[place : place + 4]
            place += 4 + int(num_bytes)
            text = bytes(map(int, vector[place - int(num_bytes) : place]))
            tokens.append(SpokenToken(int(token_id), start, end, text))
        return cls(int(language_id), temperature, logprob, no_speech, tokens)
