"""Has clients' images and sounds decoded by other processes. A file may be anything: if it cannot be decoded, or takes
too much, that is an InvalidRequest.

Processes are started with the first file, so that a server of a text model has none.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from oaiserve.engine.types.media import MediaFile
from oaiserve.errors import InvalidRequest, invalid
from oaiserve.http.data_url import base64_decoded
from oaiserve.plugins.shared.decoding_process import DecodingProcess, Refused

PIPE_BYTES = 2**20  # A reader that wakes for each 64 KiB takes the cores from the model.
TOO_LOUD = "is too loud to compute with: its samples must be finite, and should be from -1 to 1"
_IMAGES, _SOUNDS = (f"{__package__}.{kind}_process" for kind in ("image", "sound"))
# Allocations from this size on are given back to the system when they are freed, which a process that waits should do.
_GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "1"}
_idle: list[subprocess.Popen[bytes]] = []  # processes that wait for the next image


def image_size(file: MediaFile, max_pixels: int, max_bytes: int) -> tuple[int, int]:
    """Return the width and height to which an image would be decoded, by its header. Raises InvalidRequest."""
    size, _ = _ask(file, max_pixels, max_bytes, only_size=True)
    return size


def decode_image(file: MediaFile, max_pixels: int, max_bytes: int, *, on_white: bool = False) -> NDArray[np.uint8]:
    """Return the pixels of an image in RGB, upright [height, width, 3]. With `on_white`, transparent pixels become
    white. With the detail `low`, the image is made smaller. Raises InvalidRequest."""
    _, pixels = _ask(file, max_pixels, max_bytes, on_white=on_white)
    return pixels


def _ask(
    file: MediaFile, max_pixels: int, max_bytes: int, *, only_size: bool = False, on_white: bool = False
) -> tuple[tuple[int, int], NDArray[np.uint8]]:
    """Return the width and height of an image, and its pixels, or none with `only_size`. Raises InvalidRequest.

    Another process decodes it, since a decoder may crash, hold the interpreter's lock, or take any time and memory.
    """
    content = content_of(file, max_bytes)
    order = {
        "num_bytes": len(content),
        "max_pixels": max_pixels,
        "only_size": only_size,
        "on_white": on_white,
        "is_low": file.detail == "low",
    }
    process = _taken()
    assert process.stdin is not None
    assert process.stdout is not None
    pixels = np.empty((0, 0, 3), np.uint8)
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.write(content)
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        if "size" in answer and not only_size:
            width, height = answer["size"]
            pixels = np.empty((height, width, 3), np.uint8)
            # The system writes them into the array without the interpreter's lock.
            if process.stdout.readinto(pixels.data) < pixels.nbytes:  # type: ignore[attr-defined]
                raise ValueError("its pixels are cut off")
    except (OSError, ValueError):  # it was killed by its limits, or has crashed
        _end(process)
        reason = "the image takes too much time or memory to decode. Send it as a plain PNG or JPEG"
        raise _wrong(file, reason) from None
    except BaseException:
        _end(process)
        raise
    _idle.append(process)
    if "refused" in answer:
        raise _wrong(file, answer["refused"])
    width, height = answer["size"]
    return (width, height), pixels


def _taken() -> subprocess.Popen[bytes]:
    """Return a process that decodes images, which waits or is started."""
    with suppress(IndexError):
        while (process := _idle.pop()).poll() is not None:
            _end(process)
        return process
    return subprocess.Popen(
        (sys.executable, "-m", _IMAGES),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **_GIVEN_BACK},
        pipesize=PIPE_BYTES,
        # Without a process group of its own, Ctrl-C would end the process before the requests whose images it decodes.
        # In a session of its own, its niceness would have no effect: Linux gives each session an equal share of a core
        # (sched_autogroup_enabled).
        process_group=0,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(BrokenPipeError):
        process.communicate()


@atexit.register
def _end_all() -> None:
    while _idle:
        _end(_idle.pop())


def decode_sound(file: MediaFile, rate: int, max_seconds: float, max_bytes: int) -> NDArray[np.float32]:
    """Return the samples of a sound at this rate, the mean of its channels. Raises InvalidRequest.

    A separate process decodes it: the library writes a line to stderr for each fault in an MP3, without end.
    """
    content = content_of(file, max_bytes)
    try:
        output = DecodingProcess().output(content, _SOUNDS, str(rate), str(max_seconds))
    except Refused as refused:
        raise _wrong(file, f"the sound {refused}") from None
    return np.frombuffer(output, np.float32)


def content_of(file: MediaFile, max_bytes: int) -> bytes:
    """Return the bytes of a file. Raises InvalidRequest for too many, and for wrong base64."""
    too_large = _wrong(file, f"the file has more than {max_bytes} bytes")
    if isinstance(file.content, bytes):
        if len(file.content) > max_bytes:
            raise too_large
        return file.content
    content = bytearray()
    try:
        for piece in base64_decoded(file.content):
            content += piece
            if len(content) > max_bytes:
                raise too_large
    except ValueError as error:  # not ASCII, or not base64
        raise _wrong(file, f"the file is not valid base64: {error}") from None
    return bytes(content)


def _wrong(file: MediaFile, reason: str) -> InvalidRequest:
    return invalid(file.param, reason, file.where)
