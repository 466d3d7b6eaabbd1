"""Reads data URLs and base64 as the Fetch standard does, in pieces so that other threads can run. Stdlib only.

Base64 may have white space, escapes such as %2B or the URL-safe alphabet, and may lack its padding.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from collections.abc import Iterator
from typing import NamedTuple

PIECE_BYTES = 2**18  # decoded at once
_MOST_HEAD_CHARACTERS = 1000  # characters of a data URL before its comma
_START = re.compile(r"[\0- ]*data:", re.IGNORECASE)
_HEAD = re.compile(r"([^,;]*)([^,]*?)(; *base64)?", re.IGNORECASE | re.DOTALL)
_LINE_ENDS = dict.fromkeys(map(ord, "\t\n\r"))  # removed from URLs
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_CUT_ESCAPE = re.compile(rb"%[0-9A-Fa-f]?\Z")
_FOR_URLS = b"-_"
_PLAIN = b"+/"
_SPACE = b"\t\n\f\r "
_TABLE = bytes.maketrans(_FOR_URLS, _PLAIN)
# How the base64 of PNG, JPEG, GIF, WebP, TIFF and BMP begins.
_IMAGE = re.compile(r"iVBORw0KG|/9j/|R0lGOD|UklGR|SUkqA|TU0AK|Qk[0-3]")


class DataURL(NamedTuple):
    type: str  # such as image/png, or ""
    is_base64: bool
    data: str


def is_data_url(text: str) -> bool:
    return _START.match(text) is not None


def is_bare_image(text: str) -> bool:
    """Return whether a text that should be a URL is the base64 of an image instead."""
    return _IMAGE.match(text) is not None


def read_data_url(text: str) -> DataURL | None:
    """Return the parts of a data URL, or None for any other text."""
    start = _START.match(text)
    if start is None:
        comma = -1
    else:
        comma = text.find(",", start.end(), start.end() + _MOST_HEAD_CHARACTERS)
    if start is None or comma < 0:
        return None
    head = _HEAD.fullmatch(text[start.end() : comma].translate(_LINE_ENDS).strip())
    assert head is not None  # it matches any text without a comma
    fragment = text.find("#", comma)
    data = text[comma + 1 :] if fragment < 0 else text[comma + 1 : fragment]
    return DataURL(head[1].strip().lower(), head[3] is not None, data)


def is_for_urls(base64: str) -> bool:
    """Return whether base64 is in the URL-safe alphabet."""
    return "-" in base64 or "_" in base64


def percent_decoded(text: str) -> Iterator[bytes]:
    """Yield the bytes of a text with escapes such as %2B."""
    rest = b""
    for start in range(0, len(text), PIECE_BYTES):
        piece = rest + text[start : start + PIECE_BYTES].encode(errors="replace")
        if start + PIECE_BYTES < len(text):
            cut = _CUT_ESCAPE.search(piece)
        else:
            cut = None
        rest = b"" if cut is None else cut[0]
        piece = piece[: len(piece) - len(rest)]
        yield _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), piece) if b"%" in piece else piece


def base64_decoded(text: str) -> Iterator[bytes]:
    """Yield the bytes of a base64 text. Raises ValueError for any other."""
    rest = b""
    for encoded in percent_decoded(text):
        piece = rest + encoded.translate(_TABLE, _SPACE)
        # The end may have padding, so it is decoded last.
        end = max(0, len(piece) - 4) // 4 * 4
        rest = piece[end:]
        if b"=" in piece[:end]:
            raise ValueError("there is text after its end")
        yield a2b_base64(piece[:end], strict_mode=True)
    unpadded = rest.rstrip(b"=")
    if len(rest) - len(unpadded) > (3 if unpadded else 0):
        raise ValueError("it has too much padding")
    yield a2b_base64(unpadded + b"=" * (-len(unpadded) % 4), strict_mode=True)
