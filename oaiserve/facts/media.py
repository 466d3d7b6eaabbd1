"""The limits on images and sounds, as the settings have them."""

from __future__ import annotations

from typing import NamedTuple


class MediaLimits(NamedTuple):
    max_bytes: int = 20 * 2**20  # of one file
    max_pixels: int = 64_000_000  # of one image, decoded
    max_seconds: float = 600.0  # of one sound
    cache_bytes: int = 512 * 2**20  # of the vectors that are kept
