"""Texts like those that coding agents send: Python's own source code, and a picture."""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import struct
import textwrap
import zlib
from base64 import b64encode

SOURCES = (argparse, inspect, json, random, statistics, textwrap)
CHARACTERS_PER_TOKEN = 3  # approximately, in source code
PICTURE_SIDE = 224  # pixels


class Excerpts:
    """Pieces of source code. None is repeated before all have been taken."""

    def __init__(self, rng: random.Random) -> None:
        self._source = "".join(inspect.getsource(module) for module in SOURCES)
        self._at = rng.randrange(len(self._source))

    def take(self, num_tokens: int) -> str:
        """Return a piece of approximately this length."""
        length = num_tokens * CHARACTERS_PER_TOKEN
        self._at %= len(self._source)
        piece = self._source[self._at : self._at + length]
        self._at += len(piece)
        return piece if len(piece) == length else piece + self.take(num_tokens - len(piece) // CHARACTERS_PER_TOKEN)


def picture(rng: random.Random) -> str:
    """Return a data URL of a picture: grey noise that is different each time."""
    rows = b"".join(b"\0" + rng.randbytes(PICTURE_SIDE) for _ in range(PICTURE_SIDE))
    head = struct.pack(">IIBBBBB", PICTURE_SIDE, PICTURE_SIDE, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return f"data:image/png;base64,{b64encode(png).decode()}"
