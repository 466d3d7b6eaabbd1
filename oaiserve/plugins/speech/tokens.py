"""What the route, the model and the decoding process agree on: how sound counts in tokens, and the result of a
window."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    Floats = array[float]
else:
    Floats = array

RATE = 16_000  # samples per second
WINDOW_SECONDS = 30
TOKENS_PER_SECOND = 50  # positions of the encoder
SAMPLES_PER_TOKEN = RATE // TOKENS_PER_SECOND
NO_TIME = -1.0


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
        """Return the bytes of a message as numbers: the engine carries results as vectors of 32-bit floats."""
        return array("f", list(msgspec.msgpack.encode(self)))

    @classmethod
    def read(cls, vector: Floats) -> WindowText:
        return msgspec.msgpack.decode(bytes(map(int, vector)), type=cls)
