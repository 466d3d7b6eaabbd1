"""The limits of images and sounds, from the settings."""

from __future__ import annotations

from typing import NamedTuple

FILE_BYTES = 20 * 2**20  # of one image or sound
PROMPT_IMAGES = 16  # A prompt may have as many pixels as this many of the largest images.


class MediaLimits(NamedTuple):
    max_bytes: int = FILE_BYTES
    max_pixels: int = 16_000_000  # of one image, decoded
    max_seconds: float = 600.0  # of one sound
    cache_bytes: int = 512 * 2**20  # of the vectors that are kept

    @property
    def max_prompt_pixels(self) -> int:
        """Return the most pixels of all images of a prompt together."""
        return PROMPT_IMAGES * self.max_pixels
