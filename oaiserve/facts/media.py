"""The part of a request's account that concerns images and sounds. Stdlib only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oaiserve.facts.fact import fact


def _media(name: str, meaning: str) -> Any:
    """Declare a fact that is omitted if the request has no images or sounds."""
    return fact(meaning, json=f"media.{name}", log=f"media_{name}", span=f"oaiserve.media.{name}", when="num")


@dataclass(slots=True)
class MediaAccount:
    num_images: int = _media("images", "Images in its prompts.")
    num_sounds: int = _media("sounds", "Sounds in its prompts.")
    image_tokens: int = _media("image_tokens", "Tokens of its prompts that are of images.")
    audio_tokens: int = _media("audio_tokens", "Tokens of its prompts that are of sounds.")
    num_cached: int = _media("cached", "Images and sounds whose vectors were in the cache.")
    encode_ns: int = fact(
        "Time of the engine to encode its images and sounds: in the phase `encode_media`, or later for later prompts.",
        json="media.encode_ns",
        log="media_encode_ms",
        log_when="num",
    )
    core_ns: int = 0  # CPU time spent on encoding

    @property
    def num(self) -> int:
        return self.num_images + self.num_sounds

    @property
    def num_tokens(self) -> int:
        return self.image_tokens + self.audio_tokens

    def note(self, kind: str, num_tokens: int) -> None:
        """Count an image or a sound that takes `num_tokens` of a prompt."""
        if kind == "image":
            self.num_images += 1
            self.image_tokens += num_tokens
        else:
            self.num_sounds += 1
            self.audio_tokens += num_tokens
