"""The limits of images and sounds, from the settings."""

from __future__ import annotations

from typing import NamedTuple

FILE_BYTES = 20 * 2**20  # limit for one image or sound
PROMPT_IMAGES = 16  # A prompt may have as many pixels as this many of the largest images.


class MediaLimits(NamedTuple):
    max_bytes: int = FILE_BYTES
    max_pixels: int = 16_000_000  # limit for one decoded image
    max_seconds: float = 600.0  # limit for one sound
    cache_bytes: int = 512 * 2**20  # limit for stored vectors

    @property
    def max_prompt_pixels(self) -> int:
        return PROMPT_IMAGES * self.max_pixels
