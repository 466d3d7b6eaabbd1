"""Reads the processors of images and sounds in a model's files, and the tokens that stand for these."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoFeatureExtractor, AutoImageProcessor

from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.engine.types.media import MediaFile, MediaKind, MediaLimits
from oaiserve.errors import StartupError, invalid
from oaiserve.plugins.media.model.decode import decode_image, decode_sound
from oaiserve.plugins.media.model.families import IMAGES, SOUNDS, Family, Fields, Settings

NOUNS: dict[MediaKind, str] = {"image": "Images", "audio": "Sounds"}


@dataclass(frozen=True, slots=True)
class Form:
    """How prompts of a model represent media of one kind."""

    kind: MediaKind
    family: Family
    settings: Settings
    vector_id: int

    @property
    def placeholder(self) -> str:
        named = self.family.placeholder
        return self.settings.tokens.get(named, named) or self.settings.vector

    def fields(self, file: MediaFile, limits: MediaLimits) -> Fields:
        """Decode a file, and return what the processor makes of it. Raises InvalidRequest."""
        processor = self.settings.processor
        arguments = dict(self.family.arguments(self.settings))
        try:
            if self.kind == "image":
                on_white = bool(getattr(processor, "do_convert_rgb", False))
                image = decode_image(file, limits.max_pixels, limits.max_bytes, on_white=on_white)
                self._check_resized(file, image.shape[1], image.shape[0], limits.max_pixels)
                # As an array: converting one of Pillow's images into it would hold the interpreter's lock.
                layout = {"input_data_format": "channels_last"}
                return dict(processor(images=[image], return_tensors="pt", **layout, **arguments))
            rate: int = processor.sampling_rate
            seconds = min(limits.max_seconds, self.family.max_seconds(self.settings))
            samples = decode_sound(file, rate, seconds, limits.max_bytes)
            with np.errstate(over="ignore", invalid="ignore"):  # The reader refuses features that aren't finite.
                return dict(processor([samples], sampling_rate=rate, return_tensors="pt", **arguments))
        except ValueError as error:  # such as an image that is far longer than wide
            noun = NOUNS[self.kind].lower()
            raise invalid(file.param, f"the model's processor of {noun} refuses one: {error}", file.where) from error

    def _check_resized(self, file: MediaFile, width: int, height: int, max_pixels: int) -> None:
        """Refuse an image that the processor would enlarge beyond all memory, because it is far longer than wide."""
        if not self.family.fixes_shorter_side or not (edge := self.settings.processor.size.shortest_edge):
            return
        longer = edge * max(width, height) // min(width, height)
        if edge * longer > max_pixels:
            raise invalid(
                file.param,
                f"the image has {width} x {height} pixels, and the model's processor would resize it to {edge} on its "
                f"shorter side and {longer} on its longer one, more than {max_pixels} pixels (--max-image-pixels). "
                "Crop it first",
                file.where,
            )


def kinds_of(config: Any) -> list[MediaKind]:
    """Return the kinds of media for which a model has a tower, and for which its family's texts are known."""
    has_images = config.model_type in IMAGES and getattr(config, "vision_config", None) is not None
    has_sounds = config.model_type in SOUNDS and getattr(config, "audio_config", None) is not None
    return [*(["image"] if has_images else []), *(["audio"] if has_sounds else [])]  # type: ignore[list-item]


def form_of(kind: MediaKind, config: Any, settings: Settings) -> Form:
    return Form(kind, (IMAGES if kind == "image" else SOUNDS)[config.model_type], settings, _vector_id(kind, config))


def read_settings(kind: MediaKind, folder: Path, config: Any, tokenizer: Tokenizer) -> Settings:
    """Read the settings in a model's folder. Raises StartupError if the tokenizer lacks the token of vectors, and
    ImportError or OSError without what the processor needs."""
    if kind == "audio":
        _check_packages_of_sounds()
    vector_id = _vector_id(kind, config)
    vector = tokenizer.backend.id_to_token(vector_id)
    if vector is None:
        raise StartupError(f"The tokenizer has no token {vector_id}, in whose place config.json puts {kind}s.")
    of_kind: Any = AutoImageProcessor if kind == "image" else AutoFeatureExtractor
    return Settings(_values(folder), _tokens(folder), of_kind.from_pretrained(folder, local_files_only=True), vector)


def _check_packages_of_sounds() -> None:
    """Raise ImportError without the packages that the processes that decode sounds import."""
    try:
        import soundfile  # noqa: F401
        import soxr  # noqa: F401
    except ImportError as error:
        raise ImportError(f"the packages for them are missing; pip install 'oaiserve[audio]' ({error})") from error


def _vector_id(kind: MediaKind, config: Any) -> int:
    token_id = getattr(config, f"{kind}_token_id", None)
    return int(getattr(config, f"{kind}_token_index") if token_id is None else token_id)


def _values(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            fields = json.loads((folder / name).read_text(encoding="utf-8"))
            values |= {key: value for key, value in fields.items() if not isinstance(value, dict)}
    return values


def _tokens(folder: Path) -> dict[str, str]:
    fields = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    for group in ("extra_special_tokens", "model_specific_special_tokens"):
        fields |= fields[group] if isinstance(fields.get(group), dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in fields.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
