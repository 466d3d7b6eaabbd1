"""Clients' sounds: decoded by another process, and cut into the windows that the model reads."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oaiserve.errors import InternalError
from oaiserve.plugins.shared.decoding_process import DecodingProcess, Refused
from oaiserve.plugins.speech.tokens import RATE, WINDOW_SECONDS
from oaiserve.routes.intake.invalid import invalid

Samples = NDArray[np.int16]
MOST_SECONDS = 1800.0  # limit for one sound
LEAST_SECONDS = 0.1  # as in OpenAI's API
NOT_INSTALLED = (
    "This server decodes no sounds: that needs the package 'av'. Install it with: pip install 'oaiserve[speech]'"
)
# A window ends in the quietest part of its last seconds.
_SEARCHED_SECONDS = 5
_PART = RATE // 20


class SoundProcess(DecodingProcess):
    """Decodes one sound file in a process of its own."""

    def samples(self, content: bytes) -> Samples:
        """Return the samples of a file, of all its channels together. This blocks. Raises InvalidRequest."""
        if find_spec("av") is None:
            raise InternalError(NOT_INSTALLED)
        try:
            output = self.output(content, f"{__package__}.model.sound_process", str(MOST_SECONDS))
        except Refused as refused:
            raise invalid("file", f"the sound {refused}") from None
        samples = np.frombuffer(output, "<i2")
        if len(samples) < LEAST_SECONDS * RATE:
            raise invalid("file", f"the sound must last at least {LEAST_SECONDS:g} seconds")
        return samples


def windows_of(samples: Samples) -> list[tuple[int, Samples]]:
    """Return the windows of a sound, each with its first sample. Longer sounds are cut where they are quiet."""
    windows: list[tuple[int, Samples]] = []
    start = 0
    while len(samples) - start > WINDOW_SECONDS * RATE:
        end = start + WINDOW_SECONDS * RATE
        searched = samples[end - _SEARCHED_SECONDS * RATE : end]
        loudness: NDArray[Any] = np.square(searched.reshape(-1, _PART).astype(np.float32)).mean(axis=1)
        quietest = len(loudness) - 1 - int(loudness[::-1].argmin())  # the last one if there are several
        end -= (len(loudness) - quietest) * _PART - _PART // 2
        windows.append((start, samples[start:end]))
        start = end
    windows.append((start, samples[start:]))
    return windows
