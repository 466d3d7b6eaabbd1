"""Decodes one sound file: a process reads it from stdin, and writes its samples, or why there are none, to stdout."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from typing import IO

import av
from av.audio.resampler import AudioResampler
from av.error import FFmpegError

from oaiserve.plugins.speech.tokens import RATE, REFUSED

MOST_CHANNELS = 16
MOST_CPU_SECONDS = 60  # The longest sounds that are allowed take ten.
MOST_BYTES = 2**31  # limit of the address space
NICENESS = 5  # A core that the model needs, too, is shared with it 1 to 3.
# FFmpeg's readers by the beginning of a file. It may not choose one itself: some readers open other files, and URLs.
_READERS = ((b"RIFF", "wav"), (b"fLaC", "flac"), (b"OggS", "ogg"), (b"\x1aE\xdf\xa3", "matroska"), (b"ID3", "mp3"))
KNOWN = "FLAC, M4A, MP3, MP4, Ogg, WAV or WebM"


class Refused(Exception):
    """The file cannot be read. The reason completes the sentence 'the sound ...'."""


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
            frames = (piece for frame in file.decode(track) for piece in resampler.resample(frame))
            for each in _and_the_rest(frames, resampler):
                num_left -= each.samples
                if num_left < 0:
                    raise Refused(f"is longer than {max_seconds:g} seconds")
                yield each.to_ndarray().tobytes()
    except (FFmpegError, ValueError, OverflowError) as error:
        raise Refused(f"cannot be read as {KNOWN}: it is none of these, cut off, or damaged") from error


def _and_the_rest(frames: Iterator[av.AudioFrame], resampler: AudioResampler) -> Iterator[av.AudioFrame]:
    yield from frames
    yield from resampler.resample(None)


def main(stdin: IO[bytes], stdout: IO[bytes], max_seconds: float) -> int:
    try:
        # The reason stands alone in the output, so nothing is written before the end.
        samples = b"".join(pieces_of(stdin.read(), max_seconds))
        if not samples:
            raise Refused("has no samples")
    except Refused as error:
        stdout.write(str(error).encode())
        return REFUSED
    stdout.write(samples)
    return 0


def _limit(kind: int, most: int) -> None:
    _, allowed = resource.getrlimit(kind)
    wanted = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    with suppress(ValueError):  # macOS takes no limit of the address space
        resource.setrlimit(kind, (wanted, allowed))


if __name__ == "__main__":
    os.nice(NICENESS)
    _limit(resource.RLIMIT_AS, MOST_BYTES)
    _limit(resource.RLIMIT_CPU, MOST_CPU_SECONDS)
    av.logging.set_level(None)  # FFmpeg writes a line for each fault of a file.
    sys.exit(main(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1])))
