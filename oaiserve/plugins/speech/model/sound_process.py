"""Decodes one sound file: a process reads it from stdin, and writes its samples, or why there are none, to stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import BytesIO
from itertools import chain

import av
from av.audio.resampler import AudioResampler
from av.error import FFmpegError

from oaiserve.plugins.shared.decoding_process import Refused, decode_stdin
from oaiserve.plugins.speech.tokens import RATE

MOST_CHANNELS = 16
MOST_CPU_SECONDS = 60  # The longest sounds that are allowed take ten.
MOST_BYTES = 2**31  # limit of the address space
# FFmpeg's readers by the beginning of a file. It may not choose one itself: some readers open other files, and URLs.
_READERS = ((b"RIFF", "wav"), (b"fLaC", "flac"), (b"OggS", "ogg"), (b"\x1aE\xdf\xa3", "matroska"), (b"ID3", "mp3"))
KNOWN = "FLAC, M4A, MP3, MP4, Ogg, WAV or WebM"


def reader_of(content: bytes) -> str:
    """Return the name of FFmpeg's reader for a file. Raises Refused."""
    if content[4:8] == b"ftyp":
        return "mov"
    for begin, name in _READERS:
        if content.startswith(begin):
            return name
    if len(content) > 1 and content[0] == 0xFF and content[1] >= 0xE0:
        return "aac" if content[1] & 0xF6 == 0xF0 else "mp3"  # The layer of AAC is 0.
    raise Refused(f"must be {KNOWN}")


def pieces_of(content: bytes, max_seconds: float) -> Iterator[bytes]:
    """Yield the samples of a file as 16-bit integers, of one channel. A header may promise any length: what is decoded
    is counted. Raises Refused."""
    reader = reader_of(content)
    num_left = int(max_seconds * RATE)
    try:
        with av.open(BytesIO(content), "r", format=reader, metadata_errors="ignore") as file:
            if not file.streams.audio:
                raise Refused("has no audio track")
            track = file.streams.audio[0]
            if track.codec_context.channels > MOST_CHANNELS:
                raise Refused(f"must have at most {MOST_CHANNELS} channels, got {track.codec_context.channels}")
            resampler = AudioResampler(format="s16", layout="mono", rate=RATE)
            frames = chain(file.decode(track), [None])  # None yields the samples that the resampler still holds.
            for each in chain.from_iterable(map(resampler.resample, frames)):
                num_left -= each.samples
                if num_left < 0:
                    raise Refused(f"is longer than {max_seconds:g} seconds")
                yield each.to_ndarray().tobytes()
    except (FFmpegError, ValueError, OverflowError) as error:
        raise Refused(f"cannot be read as {KNOWN}: it is none of these, cut off, or damaged") from error


def samples_of(content: bytes, max_seconds: float) -> bytes:
    # The reason of a refusal stands alone in the output, so nothing is written before the end.
    samples = b"".join(pieces_of(content, max_seconds))
    if not samples:
        raise Refused("has no samples")
    return samples


if __name__ == "__main__":
    av.logging.set_level(None)  # FFmpeg writes a line for each fault of a file.
    max_seconds = float(sys.argv[1])
    sys.exit(decode_stdin(lambda content: samples_of(content, max_seconds), MOST_BYTES, MOST_CPU_SECONDS))
