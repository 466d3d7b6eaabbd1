"""Images and sounds that are small or plain for their bytes, and cost much to decode: bombs. All are within
the largest file."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from io import BytesIO

from PIL import Image

SIDE = 4000  # side of an image at the default of --max-image-pixels
FULL_BYTES = 19 * 2**20
_BASIC_TAGS = {256: 1, 257: 1, 258: 8, 259: 1, 262: 1, 277: 1}  # tags of a TIFF: one pixel of one byte


def plain(form: str, mode: str = "RGB", side: int = SIDE, **more: object) -> bytes:
    """Return an image of one color."""
    file = BytesIO()
    Image.new(mode, (side, side)).save(file, form, **more)
    return file.getvalue()


def png(*before: tuple[bytes, bytes], data: bytes = b"", kind: int = 2, side: int = SIDE, interlaced: int = 0) -> bytes:
    """Return a PNG with these chunks before its pixels."""
    head = struct.pack(">IIBBBBB", side, side, 8, kind, 0, 0, interlaced)
    chunks = [(b"IHDR", head), *before, (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, chunks))


def _chunk(chunk: tuple[bytes, bytes]) -> bytes:
    name, data = chunk
    return len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)


def tiff(tags: dict[int, int | bytes], data: bytes = b"") -> bytes:
    """Return a TIFF; a value of bytes is a list of integers of 32 bits."""
    entries = b""
    lists = b""
    tags = dict(sorted((_BASIC_TAGS | tags).items()))
    start = 14 + 12 * len(tags)
    for tag, value in tags.items():
        if isinstance(value, bytes):
            entries += struct.pack("<HHII", tag, 4, len(value) // 4, start + len(lists))
            lists += value
        else:
            entries += struct.pack("<HHII", tag, 4, 1, value)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + lists + data


def bmp(run: bytes) -> bytes:
    """Return a BMP in run lengths, which repeats `run`."""
    data = run * (FULL_BYTES // len(run))
    start = 54 + 1024
    info = struct.pack("<IiiHHIIiiII", 40, SIDE, SIDE, 1, 8, 1, len(data), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + info + bytes(1024) + data


def gif(extension: bytes) -> bytes:
    """Return a GIF with something before its pixels."""
    whole = plain("GIF", "L", 9)
    start = 13 + (3 << (whole[10] & 7) + 1) * (whole[10] >> 7)
    return whole[:start] + extension + whole[start:]


def _after_start_of_jpeg(inserted: bytes) -> bytes:
    whole = plain("JPEG", side=9)
    return whole[:2] + inserted + whole[2:]


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def _strips() -> dict[int, int | bytes]:
    number = FULL_BYTES // 16
    return {257: number, 278: 1, 273: struct.pack("<I", 8) * number, 279: struct.pack("<I", 1) * number}


def _wide_tile(compression: int) -> bytes:
    side = 20_000
    return tiff({259: compression, 322: side, 323: side, 324: 14 + 12 * 10, 325: 2**19}, zlib.compress(bytes(side**2)))


IMAGES: dict[str, Callable[[], bytes]] = {
    "WebP of one color": lambda: plain("WEBP", lossless=True),
    "WebP with a canvas of 100 million pixels": lambda: plain("WEBP", side=10_000, lossless=True),
    "PNG of one color, turned": lambda: plain("PNG", "RGBA", exif=_turned()),
    "PNG in seven passes": lambda: png(data=zlib.compress(bytes(SIDE * (8 + 4 * SIDE)), 9), kind=6, interlaced=1),
    "PNG of empty chunks": lambda: png(*[(b"aaAa", b"")] * (FULL_BYTES // 12), side=9),
    "PNG of zipped texts": lambda: png(*[(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**20 - 1)))] * 200, side=9),
    "PNG with a zipped profile": lambda: png((b"iCCP", b"k\0\0" + zlib.compress(bytes(2**28))), side=9),
    "JPEG of fill bytes": lambda: _after_start_of_jpeg(b"\xff" * FULL_BYTES),
    "JPEG of empty comments": lambda: _after_start_of_jpeg(b"\xff\xfe\0\2" * (FULL_BYTES // 4)),
    "JPEG of 178 million pixels": lambda: plain("JPEG", "L", 13_000),
    "GIF of long comments": lambda: gif(b"!\xfe" + (b"\xff" + 255 * b"c") * (FULL_BYTES // 256) + b"\0"),
    "GIF of short blocks": lambda: gif(b"!\xff" + b"\1c" * (FULL_BYTES // 2) + b"\0"),
    "BMP of short runs": lambda: bmp(b"\1\7"),
    "BMP of jumps": lambda: bmp(b"\0\2\1\0"),
    "TIFF of one color": lambda: plain("TIFF", "F", compression="tiff_adobe_deflate"),
    "TIFF of a million strips": lambda: tiff(_strips()),
    "TIFF with a wide tile": lambda: _wide_tile(8),
    "TIFF with a wide tile, packed": lambda: _wide_tile(32773),
}
