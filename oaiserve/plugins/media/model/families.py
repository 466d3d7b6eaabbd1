"""The texts of media in each multimodal family: a placeholder in the template, and the text that takes its place.

transformers' processors say the same, but some of them need packages for videos, which are not read. The sizes of
images and the frames of sounds, and so the numbers of vectors, are those of transformers' processors of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import transformers

Fields = Mapping[str, Any]  # a processor's result for one medium


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a processor in the files of a model."""

    values: Fields  # values in processor_config.json and preprocessor_config.json
    tokens: Fields  # the texts of named special tokens
    processor: Any  # transformers' image processor, or its feature extractor
    vector: str  # the token that a vector replaces

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class Family(NamedTuple):
    """The texts of images, or sounds, of one family. `text` gets the settings and what the processor makes of one."""

    text: Callable[[Settings, Fields], str]
    placeholder: str = ""  # placeholder in the template's text; "": the token of a vector
    arguments: Callable[[Settings], Fields] = lambda _: {}  # arguments of the processor
    unused: tuple[str, ...] = ()  # fields from which only the text is made
    # Whether the tokens of an image see each other in both directions, by the text model's configuration.
    has_runs: Callable[[Any], bool] = lambda _: False
    shape: str = ""  # the field that determines the positions of its tokens, where these have three axes
    renamed: Mapping[str, str] = {}  # fields that have another name in the tower
    max_seconds: Callable[[Settings], float] = lambda _: 0.0  # The processor would cut off the rest of a longer sound.
    # Whether the processor resizes every image to the same length of its shorter side before it crops the longer one.
    fixes_shorter_side: bool = False


def _of_grid(settings: Settings, image: Fields) -> str:
    number: int = int(image["image_grid_thw"][0].prod()) // settings.processor.merge_size**2
    return settings.vector * number


def _of_tiles(settings: Settings, image: Fields) -> str:
    """Return the text of an image in tiles, row by row, and then of the whole image."""
    around = "<fake_token_around_image>"
    vectors = settings.vector * settings.values.get("image_seq_len", 169)
    rows = image["rows"][0][0]
    columns = image["cols"][0][0]
    whole = f"{around}<global-img>{vectors}{around}"
    if not rows and not columns:
        return whole
    lines = (
        "".join(f"{around}<row_{row}_col_{column}>{vectors}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    )
    return f"{''.join(lines)}\n{whole}"


def _of_patches(settings: Settings, image: Fields) -> str:
    height, width = image["pixel_values"].shape[-2:]
    number: int = (height // settings["patch_size"]) * (width // settings["patch_size"])
    number += settings.values.get("num_additional_image_tokens", 0)
    return settings.vector * (number - (settings.values.get("vision_feature_select_strategy") == "default"))


def _by_transformers(name: str) -> Callable[[Settings, Fields], str]:
    """Return a function that makes the text with this processor of transformers, which allows for cut-off sides."""

    def text(settings: Settings, image: Fields) -> str:
        kind: Any = getattr(transformers, name)
        processor = kind.__new__(kind)
        vars(processor).update(settings.values)
        processor.num_additional_image_tokens = settings.values.get("num_additional_image_tokens", 0)
        processor.image_processor = settings.processor
        processor.image_token = settings.vector
        return str(processor.replace_image_token(image, 0))

    return text


def _of_lines(settings: Settings, image: Fields) -> str:
    """Return the text of an image whose lines end with tokens of their own."""
    side: int = settings["patch_size"] * settings.values.get("spatial_merge_size", 1)
    height, width = (int(pixels) // side for pixels in image["image_sizes"][0])
    line: str = settings.vector * width + settings.values.get("image_break_token", "[IMG_BREAK]")
    end: str = settings.values.get("image_end_token", "[IMG_END]")
    return line * (height - 1) + settings.vector * width + end


def _with_crops(settings: Settings, image: Fields) -> str:
    begin = settings.tokens["boi_token"]
    end = settings.tokens["eoi_token"]
    one: str = f"\n\n{begin}{settings.vector * settings.values.get('image_seq_length', 256)}{end}\n\n"
    num_crops = int(image["num_crops"][0])
    if not num_crops:
        return one
    crops = " ".join([one] * num_crops)
    return f"Here is the original image {one} and here are some crops to help you see better {crops}"


def _of_soft_tokens(settings: Settings, image: Fields) -> str:
    vectors = settings.vector * int(image["num_soft_tokens_per_image"][0])
    return f"{settings.tokens['boi_token']}{vectors}{settings.tokens['eoi_token']}"


def _of_windows(settings: Settings, image: Fields) -> str:
    number = settings.values.get("image_seq_length", 256) * int(image["num_patches"][0])
    return f"{settings.tokens['start_image_token']}{settings.vector * number}{settings.tokens['end_image_token']}"


def _of_chunks(settings: Settings, image: Fields) -> str:
    """Return the text of an image in chunks, with separators, and then of the whole image."""
    height, width = image["pixel_values"][0].shape[-2:]
    side = settings.values.get("patch_size", 14)
    ratio = settings.values.get("pixel_shuffle_ratio", 0.5)
    vectors = settings.vector * int((height // side) * (width // side) // round(1 / ratio**2))
    rows, columns = (int(number) for number in image["aspect_ratios"][0])
    lines = ("<|tile_x_separator|>".join([vectors] * columns) + "<|tile_y_separator|>") * rows
    return f"<|image_start|>{lines if rows * columns > 1 else ''}<|image|>{vectors}<|image_end|>"


def _of_convolved(settings: Settings, sound: Fields) -> str:
    return settings.vector * ((((int(sound["attention_mask"].sum()) - 1) // 2 + 1) - 2) // 2 + 1)


def _of_fourth_frames(settings: Settings, sound: Fields) -> str:
    vectors = settings.vector * int(sound["input_features_mask"][0, ::4].sum())
    return f"{settings.tokens['boa_token']}{vectors}{settings.tokens['eoa_token']}"


_QWEN = Family(_of_grid, shape="image_grid_thw")
_IDEFICS = Family(_of_tiles, arguments=lambda _: {"return_row_col_info": True}, unused=("rows", "cols"))
_MISTRAL = Family(
    _of_lines,
    arguments=lambda settings: {"patch_size": settings["patch_size"] * settings.values.get("spatial_merge_size", 1)},
)
IMAGES: dict[str, Family] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    **dict.fromkeys(("idefics3", "smolvlm"), _IDEFICS),
    "llava": Family(_of_patches, fixes_shorter_side=True),
    "llava_next": Family(_by_transformers("LlavaNextProcessor")),
    "llava_onevision": Family(_by_transformers("LlavaOnevisionProcessor")),
    "mistral3": _MISTRAL,
    "gemma3": Family(_with_crops, placeholder="boi_token", unused=("num_crops",), has_runs=lambda _: True),
    "gemma4": Family(
        _of_soft_tokens,
        unused=("num_soft_tokens_per_image",),
        has_runs=lambda text: text.use_bidirectional_attention == "vision",
    ),
    "internvl": Family(_of_windows, arguments=lambda _: {"crop_to_patches": True}, unused=("num_patches",)),
    "llama4": Family(_of_chunks, placeholder="<|image|>", unused=("aspect_ratios",)),
}
SOUNDS: dict[str, Family] = {
    "gemma4": Family(_of_fourth_frames, max_seconds=lambda settings: 480_000 / settings.processor.sampling_rate),
    "qwen2_audio": Family(
        _of_convolved,
        arguments=lambda _: {"return_attention_mask": True, "padding": "max_length"},
        renamed={"attention_mask": "feature_attention_mask"},
        max_seconds=lambda settings: float(settings.processor.chunk_length),
    ),
}
