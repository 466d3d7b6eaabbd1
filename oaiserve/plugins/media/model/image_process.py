"""Decodes images in a separate process, one after the other, with limits on the memory and CPU time of each.

An order is a line of JSON on stdin, and the bytes of a file. The answer on stdout is a line of JSON with the size of
the image, and its pixels if these are wanted, or with the reason why there are none.
"""

from __future__ import annotations

import json
import resource
import sys
import warnings
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from oaiserve.plugins.shared.decoding_process import limit, yield_to_the_model

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
LOW_DETAIL_PIXELS = 512  # pixels of the longer side
LARGER_JPEG = 4  # A JPEG may have this many times the maximum pixels: it is decoded at a fraction of its size.
STRIP_ROWS = 64  # put on white, or written, at once
# A large image takes half a second here. Files made for it, such as a JPEG with a megabyte of markers, take any time.
LEAST_CPU_SECONDS = 1
PIXELS_IN_SECOND = 8_000_000
# Memory for a pixel while it is decoded: the format's own buffers, and two or three copies.
BYTES_OF_PIXEL = 24
OPENING_BYTES = 2**31  # A decoder of WebP reserves memory for any size before that can be compared with the limit.
SPARE_BYTES = 2**28


class Refused(Exception):
    """The file can't be read as an image. The reason is a whole sentence without its full stop."""


def opened(content: bytes, max_pixels: int) -> Image.Image:
    """Return an image that is not decoded yet, and will not have more pixels. Raises Refused, or whatever a damaged
    header leads to."""
    image: Image.Image = Image.open(BytesIO(content), formats=FORMATS)
    width, height = image.size
    if max_pixels < width * height <= LARGER_JPEG * max_pixels and _has_one_scan(image, content):
        fraction = next(each for each in (2, 4) if -(-width // each) * -(-height // each) <= max_pixels)
        image.draft(None, (max(1, width // fraction), max(1, height // fraction)))
    if image.width * image.height > max_pixels:
        raise Refused(
            f"the image has {width} x {height} pixels, but at most {max_pixels} are decoded (--max-image-pixels). "
            "Send a smaller one"
        )
    return image


def decoded(image: Image.Image, *, on_white: bool, is_low: bool) -> Image.Image:
    """Return the image in RGB, as transformers' `load_image` does: upright by its EXIF data, and an animation's first
    frame. With `on_white`, transparent pixels become white, and otherwise they show the color that they hide."""
    ImageOps.exif_transpose(image, in_place=True)
    if on_white and image.has_transparency_data:
        image = _on_white(image)
    elif image.mode != "RGB":
        image = image.convert("RGB")
    image.load()
    if is_low and max(image.size) > LOW_DETAIL_PIXELS:
        image.thumbnail((LOW_DETAIL_PIXELS, LOW_DETAIL_PIXELS))
    return image


def reason_of(error: Exception, max_pixels: int) -> str:
    """Return the client's message about an error. Decoders raise errors of any type."""
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, Image.DecompressionBombError):
        return f"the image has far more than {max_pixels} pixels (--max-image-pixels). Send a smaller one"
    if isinstance(error, MemoryError):
        return "the image takes too much memory to decode"
    if "cannot identify" not in str(error):
        reason = "it is cut off, or damaged"
    else:
        reason = "it is none of these"
    return f"the image cannot be read as {', '.join(FORMATS[:-1])} or {FORMATS[-1]}: {reason}"


def _has_one_scan(image: Image.Image, content: bytes) -> bool:
    """Return whether an image is a JPEG with all its components in one scan. For others, libjpeg keeps all
    coefficients, whatever the size that they are decoded at."""
    if image.format not in ("JPEG", "MPO") or image.info.get("progressive"):
        return False
    jpeg = JpegImageFile(BytesIO(content))
    assert jpeg.fp is not None
    length = 6 + 2 * jpeg.layers
    start = jpeg.fp.tell() - length - 2  # Pillow has just read the head of the scan
    return content[start : start + 5] == b"\xff\xda\0" + bytes([length, jpeg.layers])


def _on_white(image: Image.Image) -> Image.Image:
    """Return the pixels of transformers' `convert_to_rgb`, which needs twice the memory."""
    image = image.convert("RGBA")
    opaque = Image.new("RGB", image.size)
    for strip in _strips(image):
        white = Image.new("RGBA", strip.size, "white")
        opaque.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, strip.info["top"]))
    return opaque


def _strips(image: Image.Image) -> Iterator[Image.Image]:
    for top in range(0, image.height, STRIP_ROWS):
        strip = image.crop((0, top, image.width, min(top + STRIP_ROWS, image.height)))
        strip.info["top"] = top
        yield strip


def _limit_seconds(max_pixels: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = 1 + int(used.ru_utime + used.ru_stime) + LEAST_CPU_SECONDS + max_pixels // PIXELS_IN_SECOND
    limit(resource.RLIMIT_CPU, seconds)


def _limit_bytes(num_bytes: int) -> None:
    limit(resource.RLIMIT_AS, SPARE_BYTES + num_bytes)


def main() -> None:
    yield_to_the_model()
    warnings.filterwarnings("ignore", module="PIL")  # Pillow warns of each fault in a file.
    Image.init()  # all formats that there are, which must not count as the first image's
    while line := sys.stdin.buffer.readline():
        order = json.loads(line)
        max_pixels: int = order["max_pixels"]
        _limit_seconds(0 if order["only_size"] else max_pixels)
        _limit_bytes(OPENING_BYTES)
        content = sys.stdin.buffer.read(order["num_bytes"])
        image: Image.Image | None = None
        try:
            image = opened(content, max_pixels)
            if not order["only_size"]:
                _limit_bytes(BYTES_OF_PIXEL * max_pixels + 4 * len(content))
                image = decoded(image, on_white=order["on_white"], is_low=order["is_low"])
            answer: dict[str, Any] = {"size": image.size}
        except Exception as error:
            answer = {"refused": reason_of(error, max_pixels)}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        if image is not None and "size" in answer and not order["only_size"]:
            for strip in _strips(image):
                sys.stdout.buffer.write(strip.tobytes())
        sys.stdout.buffer.flush()
        del image, content


if __name__ == "__main__":
    main()
