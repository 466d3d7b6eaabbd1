"""Makes small multimodal models with random weights, whole: with their processors, to be served with images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerFast

from oaiserve.engine.model.media.families import IMAGES, Settings
from tests.models.decoders import byte_tokenizer
from tests.models.wrappers import NONE, Values, random_wrapper

# A template as those of published models are: parts of messages in their order, and a placeholder for each image.
_TEMPLATE = (
    "{{% for message in messages %}}{{{{ message.role + ':' }}}}"
    "{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{{% for part in message.content %}}"
    "{{% if part.type == 'image' %}}{image}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}{{{{ '\\n' }}}}{{% endfor %}}{{% if add_generation_prompt %}}assistant:{{% endif %}}"
)
_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
_VISION = ["<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]


class Kind(NamedTuple):
    """What a family's small model has beside the common sizes."""

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
        named={"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"},
        config={
            "vision_config": {
                "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 14,
                "position_embedding_size": 64, "pooling_kernel_size": 3,
            }
        },
        text={"vocab_size_per_layer_input": 384, "use_bidirectional_attention": "vision"},
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


class SeeingModel(NamedTuple):
    model: PreTrainedModel
    images: BaseImageProcessor
    tokenizer: PreTrainedTokenizerFast


def save_seeing(name: str, folder: Path) -> SeeingModel:
    """Save a small model of this family with its processor, and return both as transformers has them."""
    return save_whole(name, KINDS[name], folder, torch.float32)


def save_whole(name: str, kind: Kind, folder: Path, dtype: torch.dtype, deviation: float = 0.3) -> SeeingModel:
    """Save a model of this family, with the sizes of `kind`."""
    tokenizer = byte_tokenizer(kind.text.get("vocab_size", 384) - 84)  # and a place for each special token
    specials = dict.fromkeys([kind.vector, *kind.named.values(), *kind.tokens])
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, special=True, normalized=False) for token in specials]}
    )
    if kind.named:
        tokenizer = _with_attributes(tokenizer, kind.named, folder)
    template = _TEMPLATE.format(image=kind.image)
    tokenizer.chat_template = template
    images: BaseImageProcessor = getattr(transformers, kind.images)(**kind.of_images)
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({**kind.settings}))
    id_of = tokenizer.convert_tokens_to_ids
    of_wrapper = {
        "image_token_index" if name.startswith(("llava", "gemma3", "mistral3")) else "image_token_id": id_of(
            kind.vector
        )
    }
    if name.startswith("qwen"):
        of_wrapper |= {"video_token_id": id_of("<|video_pad|>"), "vision_start_token_id": id_of("<|vision_start|>")}
    wrapper = random_wrapper(
        name,
        {**kind.config, **of_wrapper},
        {"vocab_size": 384, "max_position_embeddings": 256, **kind.text},
        kind.vision,
        deviation=deviation,
    )
    if name.startswith("gemma"):  # which multiplies it by 8: next to it, images would not count
        with torch.no_grad():
            wrapper.get_input_embeddings().weight *= 0.05
    wrapper.to(dtype).save_pretrained(folder)
    return SeeingModel(wrapper, images, tokenizer)


def _with_attributes(tokenizer: PreTrainedTokenizerFast, named: dict[str, str], folder: Path) -> Any:
    """Return the tokenizer with special tokens as attributes, as those of published models have them."""
    tokenizer.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=named)


def picture(number: int, width: int = 60, height: int = 40) -> Image.Image:
    """Return a picture of random colours, in areas of ten pixels a side."""
    colours = np.random.default_rng(number).integers(0, 256, (-(-height // 10), -(-width // 10), 3), np.uint8)
    return Image.fromarray(colours.repeat(10, 0).repeat(10, 1)[:height, :width])


def png(image: Image.Image) -> bytes:
    content = BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def expected_answer(
    name: str, seeing: SeeingModel, prompt: list[int], images: list[Image.Image], number: int
) -> list[int]:
    """Return transformers' own greedy answer of `number` tokens to the ids of a prompt with images, all at once."""
    family, vector = IMAGES[name], seeing.tokenizer.convert_tokens_to_ids(KINDS[name].vector)
    settings = Settings(KINDS[name].settings, {}, seeing.images, KINDS[name].vector)
    nested: Any = [images] if name in ("idefics3", "smolvlm") else images
    fields = dict(seeing.images(images=nested, return_tensors="pt", **family.arguments(settings)))
    ids = torch.tensor([prompt])
    types = {"token_type_ids" if name == "gemma3" else "mm_token_type_ids": (ids == vector).long()}
    if not name.startswith(("gemma", "qwen")):
        types = {}
    with torch.inference_mode():
        out = seeing.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **{field: value for field, value in fields.items() if field not in family.unused},
            **types,
            max_new_tokens=number,
            min_new_tokens=number,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
