"""Attacks by images."""

from __future__ import annotations

from base64 import b64encode

from tools.attack.attack import CHAT, FULL, Family, Number, Sent, outcomes, post
from tools.attack.media_files import IMAGES, plain

MEDIA = Family("media", "media bombs")
DONE = outcomes(200, 400) | FULL


def url_of(content: bytes) -> str:
    return f"data:;base64,{b64encode(content).decode()}"


def of_image(url: str) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return post(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1})


@MEDIA.burst("images that are small, or of 19 MiB, and cost much to decode", DONE, 4, server="images",
             answer_seconds=240, limit_seconds=300, is_work=True)  # fmt: skip
def bombs(number: Number) -> list[Sent]:
    urls = [url_of(make()) for make in IMAGES.values()]
    return [of_image(url) for url in urls] * number(2, 1)


def sixteen(url: str) -> bytes:
    image = {"type": "image_url", "image_url": url}
    return post(CHAT, {"messages": [{"role": "user", "content": [image] * 16}], "max_tokens": 1})


def few_pixels(data: bytes) -> bytes:
    """Return a request with images of the size in which the model reads all images."""
    return sixteen(url_of(plain("WEBP", side=512, lossless=True)))


@MEDIA.burst("one color, 4,000 x 4,000, 16 times in each of 8 requests", DONE, 8, server="images", is_work=True,
             answer_seconds=60, limit_seconds=120, harmless=few_pixels, most_ratio_to_harmless=2.0,
             rounds=3)  # fmt: skip
def many_pixels(number: Number) -> list[Sent]:
    return [sixteen(url_of(IMAGES["WebP of one color"]()))] * number(8, 4)
