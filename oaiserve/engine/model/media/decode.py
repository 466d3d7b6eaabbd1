"""Decodes clients' images and sounds. These may be anything: what is none, or is too much, is an InvalidRequest.

Decoders are imported with the first file, so that a server of a text model has none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oaiserve.engine.data_url import base64_decoded
from oaiserve.engine.media import MediaFile
from oaiserve.errors import InvalidRequest, invalid

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
LOW_DETAIL_PIXELS = 512  # of the longer side
# A JPEG may be sent in ever finer scans, each over all pixels. Usual are 10, and this many of the largest image.
MOST_SCANS = 16
SOUND_REFUSED = 3  # the exit code of a process that says why it has no samples
STRIP_ROWS = 64  # of a transparent image, put on white at once


def decode_image(file: MediaFile, max_pixels: int, max_bytes: int, *, on_white: bool = False) -> Image:
    """Return the image in RGB, as transformers' `load_image` does: upright by its EXIF data, and an animation's first
    frame. With `on_white`, transparent pixels become white, and otherwise they show the color that they hide. With
    the detail `low`, the image is made smaller. Raises InvalidRequest.
    """
    content = content_of(file, max_bytes)
    image_type, ops = _pillow()
    try:
        image: Image = image_type.open(BytesIO(content), formats=IMAGE_FORMATS)
        width, height = image.size
        if width * height > max_pixels:
            raise _wrong(file, f"the image has {width} x {height} pixels, but at most {max_pixels} are decoded")
        is_jpeg = image.format in ("JPEG", "MPO") or image.info.get("compression") == "jpeg"
        if is_jpeg and content.count(b"\xff\xda") * width * height > MOST_SCANS * max_pixels:
            raise _wrong(file, f"the image has too many scans for its {width} x {height} pixels")
        image = _rgb(ops.exif_transpose(image), on_white=on_white)
    except InvalidRequest:
        raise
    except image_type.DecompressionBombError:
        raise _wrong(file, f"the image has far more than {max_pixels} pixels") from None
    except Exception as error:  # of any type: decoders meet the unexpected with what they happen to do
        reason = "it is cut off, or damaged" if "cannot identify" not in str(error) else "it is none of these"
        names = ", ".join(IMAGE_FORMATS[:-1])
        raise _wrong(file, f"the image cannot be read as {names} or {IMAGE_FORMATS[-1]}: {reason}") from error
    if file.detail == "low" and max(image.size) > LOW_DETAIL_PIXELS:
        image.thumbnail((LOW_DETAIL_PIXELS, LOW_DETAIL_PIXELS))
    return image


def decode_sound(file: MediaFile, rate: int, max_seconds: float, max_bytes: int) -> NDArray[np.float32]:
    """Return the samples of a sound at this rate, the mean of its channels. Raises InvalidRequest.

    A process of its own decodes it: the library writes a line to stderr for each fault in an MP3, without end.
    """
    command = (sys.executable, "-m", "oaiserve.engine.model.media.sound_process", str(rate), str(max_seconds))
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # whose stacks would count as its memory
    content = content_of(file, max_bytes)
    done = subprocess.run(command, input=content, capture_output=True, env=environment, check=False)
    if done.returncode == SOUND_REFUSED:
        raise _wrong(file, f"the sound {done.stdout.decode()}")
    if done.returncode:
        raise _wrong(file, "the sound takes too much to decode")
    return np.frombuffer(done.stdout, np.float32)


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


def _rgb(image: Image, *, on_white: bool) -> Image:
    """Return the image in RGB. With `on_white`, the pixels are the same as those of transformers' `convert_to_rgb`,
    which needs twice the memory."""
    if not on_white or not image.has_transparency_data:
        return image.convert("RGB")
    image_type, _ = _pillow()
    image = image.convert("RGBA")
    opaque: Image = image_type.new("RGB", image.size)
    for top in range(0, image.height, STRIP_ROWS):
        strip = image.crop((0, top, image.width, min(top + STRIP_ROWS, image.height)))
        white = image_type.new("RGBA", strip.size, "white")
        opaque.paste(image_type.alpha_composite(white, strip).convert("RGB"), (0, top))
    return opaque


@cache
def _pillow() -> tuple[Any, Any]:
    from PIL import Image, ImageOps

    warnings.filterwarnings("ignore", module="PIL")  # of each fault in a file
    return Image, ImageOps


def _wrong(file: MediaFile, reason: str) -> InvalidRequest:
    return invalid(file.param, reason, file.where)
