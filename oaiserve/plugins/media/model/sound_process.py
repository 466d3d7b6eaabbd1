"""Decodes one sound: a process reads its file from stdin, and writes its samples, or why there are none, to stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from io import BytesIO

import numpy as np
import soxr
from numpy.typing import NDArray
from soundfile import SoundFile, SoundFileError

from oaiserve.plugins.media.model.decode import TOO_LOUD
from oaiserve.plugins.shared.decoding_process import Refused, decode_stdin

Samples = NDArray[np.float32]
FORMATS = ("WAV", "WAVEX", "FLAC", "MP3")
MOST_CHANNELS = 16
RATES = range(4_000, 96_001)  # allowed samples per second
PIECE_SAMPLES = 2**14  # read at once
MOST_BYTES = 2**30  # address space
MOST_CPU_SECONDS = 10  # The longest allowed sounds take two.


class _Sound(SoundFile):  # type: ignore[misc]
    """A sound that is read from its beginning to its end."""

    def seekable(self) -> bool:
        return False  # Otherwise it seeks after each read, which in an MP3 does not lead to the same place.


def samples_of(content: bytes, rate: int, max_seconds: float) -> Samples:
    """Return the samples of a file at this rate. Raises Refused."""
    try:
        with _Sound(BytesIO(content)) as sound:
            if sound.format not in FORMATS:
                raise Refused(f"must be WAV, FLAC or MP3, got {sound.format}")
            if sound.samplerate not in RATES:
                raise Refused(f"must have {RATES[0]} to {RATES[-1]} samples per second, got {sound.samplerate}")
            if sound.channels > MOST_CHANNELS:
                raise Refused(f"must have at most {MOST_CHANNELS} channels, got {sound.channels}")
            pieces = resampled(_pieces(sound, max_seconds), sound.samplerate, rate)
            samples = np.concatenate([np.zeros(0, np.float32), *pieces])
    except (SoundFileError, ValueError) as error:
        reason = "cannot be read as WAV, FLAC or MP3: it is none of these, cut off, or damaged"
        raise Refused(reason) from error
    if not len(samples):
        raise Refused("has no samples")
    if not np.isfinite(samples).all():  # A new rate overshoots.
        raise Refused(TOO_LOUD)
    return samples


def _pieces(sound: SoundFile, max_seconds: float) -> Iterator[Samples]:
    """Yield the samples of a sound. Its header may say any number of them: what is read is counted."""
    left = int(max_seconds * sound.samplerate)
    while len(piece := sound.read(PIECE_SAMPLES, dtype="float32", always_2d=True)):
        left -= len(piece)
        if left < 0:
            raise Refused(f"is longer than {max_seconds:g} seconds")
        if not np.isfinite(piece).all():
            raise Refused("has samples that are not numbers")
        # In float64, since the sum of channels may be beyond float32.
        yield piece.mean(axis=1, dtype=np.float64).astype(np.float32)


def resampled(pieces: Iterable[Samples], rate: int, new_rate: int) -> Iterator[Samples]:
    """Yield the pieces of a sound of one `rate` at another one, so that only the result need be in memory."""
    if rate == new_rate:
        yield from pieces
        return
    stream = soxr.ResampleStream(rate, new_rate, num_channels=1, dtype="float32")
    for piece in pieces:
        yield stream.resample_chunk(piece)
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)


if __name__ == "__main__":
    rate, max_seconds = sys.argv[1:]
    sys.exit(
        decode_stdin(
            lambda content: samples_of(content, int(rate), float(max_seconds)).tobytes(), MOST_BYTES, MOST_CPU_SECONDS
        )
    )
