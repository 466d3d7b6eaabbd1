"""What the route, the model and the decoding process agree on: how sound counts in tokens, and how the result of a
window is written as numbers.

The engine carries results as vectors of 32-bit floats. That of a window has a head, and a row for each token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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


class WindowText(NamedTuple):
    """The text of a window, as the model has decoded it."""

    language_id: int  # the token of its language; -1: the model knows one language only
    temperature: float
    average_logprob: float
    no_speech_probability: float
    tokens: Sequence[SpokenToken]

    def as_floats(self) -> Floats:
        head = (self.language_id, self.temperature, self.average_logprob, self.no_speech_probability)
        return array("f", [*head, *(number for token in self.tokens for number in token)])

    @classmethod
    def read(cls, vector: Floats) -> WindowText:
        language_id, temperature, logprob, no_speech, *rest = vector
        rows = zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        tokens = [SpokenToken(int(token_id), start, end) for token_id, start, end in rows]
        return cls(int(language_id), temperature, logprob, no_speech, tokens)
