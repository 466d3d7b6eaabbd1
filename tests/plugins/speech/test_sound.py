"""Sound files of every form are decoded within limits, and cut into windows where they are quiet."""

import io

import numpy as np
import pytest

from oaiserve.errors import InvalidRequest
from oaiserve.plugins.shared.decoding_process import Refused
from oaiserve.plugins.speech.sound import SoundProcess, windows_of
from oaiserve.plugins.speech.tokens import RATE
from tests.plugins.speech.spoken import wav

av = pytest.importorskip("av")

from oaiserve.plugins.speech.model.sound_process import pieces_of, reader_of  # noqa: E402 - needs av


def written(container: str, codec: str, rate: int = 48_000) -> bytes:
    """Return a sound of a second in another form."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        track = output.add_stream(codec, rate=rate)
        with av.open(io.BytesIO(wav(1.0, rate))) as source:
            for frame in source.decode(audio=0):
                output.mux(track.encode(frame))
        output.mux(track.encode(None))
    return file.getvalue()


def samples_of(content: bytes, max_seconds: float = 60.0) -> np.ndarray:
    return np.frombuffer(b"".join(pieces_of(content, max_seconds)), "<i2")


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [
        ("wav", "pcm_s16le", 22_050),
        ("flac", "flac", 44_100),
        ("mp3", "libmp3lame", 44_100),
        ("ogg", "libopus", 48_000),
        ("webm", "libopus", 48_000),
        ("mp4", "aac", 44_100),
        ("adts", "aac", 44_100),
    ],
)
def test_files_of_the_apis_forms_are_decoded(container: str, codec: str, rate: int) -> None:
    samples = samples_of(written(container, codec, rate)).astype(float)
    assert len(samples) == pytest.approx(RATE, rel=0.12)  # Codecs add a little at the ends.
    middle = samples[RATE // 4 : RATE * 3 // 4]
    spectrum = np.abs(np.fft.rfft(middle))
    assert spectrum.argmax() / (len(middle) / RATE) == pytest.approx(440, abs=4)


def test_channels_become_one() -> None:
    assert len(samples_of(wav(0.5, channels=2))) == RATE // 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "must be FLAC"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "must be FLAC"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "must be FLAC"),
        (b"RIFF" + bytes(100), "cannot be read"),
        (b"OggS" + bytes(100), "cannot be read"),
        (b"\x00\x00\x00\x18ftypmp42" + bytes(100), "cannot be read"),
        (wav(3.0), "is longer than 2 seconds"),
        (wav(0.1, channels=17), "at most 16 channels"),
    ],
)
def test_other_files_are_refused_with_the_reason(content: bytes, says: str) -> None:
    with pytest.raises(Refused, match=says):
        samples_of(content, 2.0)


def test_the_reader_never_depends_on_more_than_the_first_bytes() -> None:
    assert [reader_of(content) for content in (b"ID3", b"\xff\xfb", b"\xff\xf1", b"\x1aE\xdf\xa3")] == [
        "mp3",
        "mp3",
        "aac",
        "matroska",
    ]


def test_a_process_decodes_and_refuses() -> None:
    assert len(SoundProcess().samples(wav(0.5))) == RATE // 2
    with pytest.raises(InvalidRequest, match=r"the sound must be FLAC") as refused:
        SoundProcess().samples(b"<html>")
    assert refused.value.param == "file"


def test_a_sound_that_is_too_short_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must last at least 0.1 seconds"):
        SoundProcess().samples(wav(0.05))


def test_a_long_sound_is_cut_where_it_is_quiet() -> None:
    samples = np.full(70 * RATE, 1000, np.int16)
    samples[int(27.2 * RATE) : int(27.4 * RATE)] = 0
    windows = windows_of(samples)
    assert [start / RATE for start, _ in windows] == pytest.approx([0, 27.3, 57.3], abs=0.1)
    assert sum(len(each) for _, each in windows) == len(samples)
    assert max(len(each) for _, each in windows) <= 30 * RATE
    assert np.array_equal(np.concatenate([each for _, each in windows]), samples)


def test_a_sound_of_one_window_is_not_cut() -> None:
    samples = np.ones(30 * RATE, np.int16)
    ((start, only),) = windows_of(samples)
    assert start == 0
    assert only is not None
    assert len(only) == len(samples)
