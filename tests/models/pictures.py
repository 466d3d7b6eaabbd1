"""Makes pictures and sounds, and their files."""

from io import BytesIO

import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image


def picture(number: int, width: int = 60, height: int = 40) -> Image.Image:
    """Return a picture of random colours, in areas of ten pixels a side."""
    colours = np.random.default_rng(number).integers(0, 256, (-(-height // 10), -(-width // 10), 3), np.uint8)
    return Image.fromarray(colours.repeat(10, 0).repeat(10, 1)[:height, :width])


def png(image: Image.Image) -> bytes:
    content = BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def sine(frequency: float, seconds: float) -> NDArray[np.float32]:
    """Return the samples of a tone that becomes louder, at 16 kHz."""
    times = np.arange(int(16_000 * seconds)) / 16_000
    loud = np.sin(2 * np.pi * frequency * times) * np.linspace(0.1, 0.9, len(times))
    return (loud * 2**15).astype(np.int16).astype(np.float32) / np.float32(2**15)  # as in a file


def wav(samples: NDArray[np.float32]) -> bytes:
    content = BytesIO()
    soundfile.write(content, (samples * 2**15).astype(np.int16), 16_000, format="WAV")
    return content.getvalue()
