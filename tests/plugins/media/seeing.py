"""Makes small multimodal models with random weights, whole: with their processors, to be served with media."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from tokenizers import AddedToken
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerFast

from oaiserve.plugins.media.model.families import IMAGES, SOUNDS, Settings
from tests.models.decoders import byte_tokenizer, continued
from tests.models.wrappers import NONE, Values, random_wrapper

# A template as those of published models are: parts of messages in their order, and a placeholder for each image.
_TEMPLATE = (
    "{{% for message in messages %}}{{{{ message.role + ':' }}}}"
    "{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{{% for part in message.content %}}"
    "{{% if part.type == 'image' %}}{image}{{% elif part.type == 'audio' %}}{audio}"
    "{{% else %}}{{{{ part.text }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}{{{{ '\\n' }}}}{{% endfor %}}{{% if add_generation_prompt %}}assistant:{{% endif %}}"
)
_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
_VISION = ["<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]


class Kind(NamedTuple):
    """The tokens and sizes of a family's small model besides the common ones."""

    image: str  # the placeholder in the template
    vector: str  # the token in whose place a vector comes
    images: str  # the image processor
    tokens: Sequence[str] = ()  # further special ones
    of_images: Values = NONE
    settings: Values = NONE
    named: Mapping[str, str] = NONE  # special tokens that the tokenizer has as attributes
    config: Values = NONE
    vision: Values = NONE
    text: Values = NONE
    audio: str = ""  # the token in whose place a vector of a sound comes, in the template, too
    sounds: str = ""  # the feature extractor


def _size(pixels: int) -> dict[str, int]:
    return {"height": pixels, "width": pixels}


_QWEN = Kind(
    "<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>", "Qwen2VLImageProcessorPil", _VISION,
    {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
)  # fmt: skip
_IDEFICS = Kind(
    "<image>", "<image>", "", ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *_ROWS],
    {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}, {"image_seq_len": 1},
)  # fmt: skip
_IN_TURN = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GRID = [[28, 56], [56, 28], [56, 56]]
KINDS = {
    "smolvlm": _IDEFICS._replace(images="SmolVLMImageProcessorPil"),
    "idefics3": _IDEFICS._replace(images="Idefics3ImageProcessorPil"),
    "llava": Kind(
        "<image>", "<image>", "LlavaImageProcessorPil",
        of_images={"size": {"shortest_edge": 28}, "crop_size": _size(28)},
        settings={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": Kind(
        "<image>", "<image>", "LlavaNextImageProcessorPil",
        of_images={"size": {"shortest_edge": 28}, "crop_size": _size(28), "image_grid_pinpoints": _GRID},
        settings={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        config={"image_grid_pinpoints": _GRID},
    ),
    "llava_onevision": Kind(
        "<image>", "<image>", "LlavaOnevisionImageProcessorPil",
        of_images={"size": _size(28), "image_grid_pinpoints": _GRID},
        settings={
            "num_image_tokens": 4, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9",
        },
        config={"image_grid_pinpoints": _GRID},
    ),
    "gemma4": Kind(
        "<image_soft_token>", "<image_soft_token>", "Gemma4ImageProcessorPil",
        of_images={"patch_size": 14, "max_soft_tokens": 70, "pooling_kernel_size": 3},
        named={
            "boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>",
            "boa_token": "<start_of_audio>", "audio_token": "<audio_soft_token>", "eoa_token": "<end_of_audio>",
        },
        config={
            "vision_config": {
                "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 14,
                "position_embedding_size": 64, "pooling_kernel_size": 3,
            },
            "audio_config": {
                "model_type": "gemma4_audio", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                "subsampling_conv_channels": [128, 4], "output_proj_dims": 48,
            },
        },
        text={"vocab_size_per_layer_input": 384, "use_bidirectional_attention": "vision"},
        audio="<audio_soft_token>", sounds="Gemma4AudioFeatureExtractor",
    ),
    "gemma3": Kind(
        "<start_of_image>", "<image_soft_token>", "Gemma3ImageProcessorPil",
        of_images={"size": _size(28)}, settings={"image_seq_length": 4},
        named={"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"},
        config={"mm_tokens_per_image": 4}, text=_IN_TURN,
    ),
    "qwen2_vl": _QWEN._replace(vision={"hidden_size": 64}),
    "qwen2_5_vl": _QWEN,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _QWEN),
    "qwen3_5": _QWEN,
    "mistral3": Kind(
        "[IMG]", "[IMG]", "PixtralImageProcessorPil", ["[IMG_BREAK]", "[IMG_END]"],
        of_images={"size": {"longest_edge": 84}, "patch_size": 14},
        settings={"patch_size": 14, "spatial_merge_size": 2}, vision={"image_size": 84},
        text={"sliding_window": None},
    ),
    "internvl": Kind(
        "<IMG_CONTEXT>", "<IMG_CONTEXT>", "GotOcr2ImageProcessorPil",
        of_images={"size": _size(28), "min_patches": 1, "max_patches": 4}, settings={"image_seq_length": 1},
        named={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
}  # fmt: skip


HEARING = {
    "qwen2_audio": Kind("", "", "", audio="<|AUDIO|>", sounds="WhisperFeatureExtractor"),
    "gemma4": KINDS["gemma4"],
}


class SeeingModel(NamedTuple):
    model: PreTrainedModel
    images: BaseImageProcessor | None
    tokenizer: PreTrainedTokenizerFast
    sounds: Any = None


def save_seeing(name: str, folder: Path, kinds: Mapping[str, Kind] = KINDS) -> SeeingModel:
    """Save a small model of this family with its processor, and return both as transformers has them."""
    return save_whole(name, kinds[name], folder, torch.float32)


def save_whole(name: str, kind: Kind, folder: Path, dtype: torch.dtype, deviation: float = 0.3) -> SeeingModel:
    """Save a model of this family, with the sizes of `kind`."""
    tokenizer = byte_tokenizer(kind.text.get("vocab_size", 384) - 84)  # and a place for each special token
    specials = dict.fromkeys(filter(None, [kind.vector, kind.audio, *kind.named.values(), *kind.tokens]))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, special=True, normalized=False) for token in specials]}
    )
    if kind.named:
        tokenizer.save_pretrained(folder)  # with special tokens as attributes, as those of published models have them
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=kind.named)
    template = _TEMPLATE.format(image=kind.image, audio=kind.audio)
    tokenizer.chat_template = template
    images: BaseImageProcessor | None = getattr(transformers, kind.images)(**kind.of_images) if kind.images else None
    if images is not None:
        images.save_pretrained(folder)
    sounds = getattr(transformers, kind.sounds)(feature_size=128) if kind.sounds else None
    of_sounds = {"feature_extractor": json.loads(sounds.to_json_string())} if sounds else {}
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({**kind.settings, **of_sounds}))
    id_of = tokenizer.convert_tokens_to_ids
    of_wrapper = {}
    if sounds is not None:
        of_wrapper["audio_token_index" if name == "qwen2_audio" else "audio_token_id"] = id_of(kind.audio)
    if images is not None:
        is_index = name.startswith(("llava", "gemma3", "mistral3"))
        of_wrapper["image_token_index" if is_index else "image_token_id"] = id_of(kind.vector)
    if images is not None and name.startswith("qwen"):
        of_wrapper |= {"video_token_id": id_of("<|video_pad|>"), "vision_start_token_id": id_of("<|vision_start|>")}
    wrapper = random_wrapper(
        name,
        {**kind.config, **of_wrapper},
        {"vocab_size": 384, "max_position_embeddings": 256, **kind.text},
        kind.vision,
        deviation=deviation,
    )
    if name.startswith("gemma"):  # It multiplies the embedding by 8: next to it, images would not count.
        with torch.no_grad():
            wrapper.get_input_embeddings().weight *= 0.05
    wrapper.to(dtype).save_pretrained(folder)
    return SeeingModel(wrapper, images, tokenizer, sounds)


Media = Sequence[Image.Image | NDArray[np.float32]]


def expected_answer(name: str, seeing: SeeingModel, prompt: list[int], media: Media, number: int) -> list[int]:
    """Return transformers' own greedy answer of `number` tokens to the ids of a prompt with media, all at once."""
    ids = torch.tensor([prompt])
    fields = dict[str, Any]()
    unused = tuple[str, ...]()
    kind = {**KINDS, **HEARING}[name]
    id_of = seeing.tokenizer.convert_tokens_to_ids
    if images := [one for one in media if isinstance(one, Image.Image)]:
        assert seeing.images is not None
        family = IMAGES[name]
        settings = Settings(kind.settings, {}, seeing.images, kind.vector)
        nested: Any = [images] if name in ("idefics3", "smolvlm") else images
        fields = dict(seeing.images(images=nested, return_tensors="pt", **family.arguments(settings)))
        unused = family.unused
    if sounds := [one for one in media if not isinstance(one, Image.Image)]:
        of_sounds = seeing.sounds(sounds, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True)
        fields |= {SOUNDS[name].renamed.get(field, field): value for field, value in of_sounds.items()}
    if name.startswith(("gemma", "qwen")) and kind.vector:
        types = (ids == id_of(kind.vector)) + 3 * (ids == (id_of(kind.audio) if kind.audio else -1))
        fields["token_type_ids" if name == "gemma3" else "mm_token_type_ids"] = types
    inputs = {field: value for field, value in fields.items() if field not in unused}
    return continued(seeing.model, prompt, number, **inputs)
