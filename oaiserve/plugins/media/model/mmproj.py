"""Reads the tower for images from the second GGUF file of a model, llama.cpp's mmproj, as transformers has it.

The package gguf has the names of most tensors. Of a file's metadata come the configuration of transformers' multimodal
model and its image processor, whose other values are those that the family's published models have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.gguf import GgufHead, GgufTensor, read_head
from oaiserve.checkpoints.load_errors import reported
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.sources.gguf.architecture import neighbours_as_halves
from oaiserve.engine.decoder.sources.gguf.file import GgufFile
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from oaiserve.plugins.media.model.families import Settings
from oaiserve.plugins.media.model.tower import tower_parameters


class Mmproj(NamedTuple):
    """A tower in a GGUF file: what `load_tower` and a `Form` take."""

    config: PreTrainedConfig  # The multimodal model's config; it says no more of the text model than its width.
    weights: dict[str, Tensor]
    settings: Settings


class NotRead(StartupError):
    """Images can't be read by such a file or model, but text can be served."""


class _Parts(NamedTuple):
    """The parts of a configuration that a family derives from the metadata, besides the common sizes."""

    vision: Fields = {}  # noqa: RUF012 - never written to
    wrapper: Fields = {}  # noqa: RUF012
    images: Fields = {}  # noqa: RUF012 - the image processor's
    settings: Fields = {}  # noqa: RUF012 - as in processor_config.json


class _Family(NamedTuple):
    type: str  # type of transformers' multimodal model
    vectors: tuple[str, ...]  # tokens: a vector comes in the place of the first one that the tokenizer has
    images: str  # the image processor
    parts: Callable[[Metadata, int], _Parts]  # given the width of the text model, too
    last: str = "mm.2.weight"  # the tensor that makes vectors of the text model's width, in its rows
    renames: tuple[tuple[str, str], ...] = ()  # (transformers' name, name in the package gguf or in the file) pairs
    unused: str = "$^"  # parameters that files lack, as nothing reads their outputs
    tokens: Fields = {}  # noqa: RUF012


def _side(metadata: Metadata) -> int:
    return int(metadata["image_size"] // metadata["patch_size"])


def _square(pixels: int) -> Fields:
    return {"height": pixels, "width": pixels}


def _gemma3(metadata: Metadata, _: int) -> _Parts:
    number = (_side(metadata) // metadata.get("projector.scale_factor", 4)) ** 2
    images = {"size": _square(metadata["image_size"])}
    return _Parts({"vision_use_head": False}, {"mm_tokens_per_image": number}, images, {"image_seq_length": number})


def _idefics3(metadata: Metadata, _: int) -> _Parts:
    scale = metadata["projector.scale_factor"]
    size = metadata["image_size"]
    edges = {"size": metadata.get("preproc_image_size", 4 * size), "max_image_size": size}
    images = {name: {"longest_edge": edge} for name, edge in edges.items()}
    return _Parts({}, {"scale_factor": scale}, images, {"image_seq_len": (_side(metadata) // scale) ** 2})


def _qwen(metadata: Metadata, vision: Fields, least_pixels: int = 56 * 56, most_pixels: int = 3584 * 3584) -> _Parts:
    merge = metadata.get("spatial_merge_size", 2)
    least = metadata.get("image_min_pixels", least_pixels)
    most = metadata.get("image_max_pixels", most_pixels)
    images = {"size": {"shortest_edge": least, "longest_edge": most}}
    images |= {"patch_size": metadata["patch_size"], "merge_size": merge}
    return _Parts({"spatial_merge_size": merge, **vision}, images=images)


def _qwen2(metadata: Metadata, width: int) -> _Parts:
    embedding = metadata["embedding_length"]
    ratio = _width_of_mlp(metadata) // embedding
    return _qwen(metadata, {"embed_dim": embedding, "hidden_size": width, "mlp_ratio": ratio})


def _qwen25(metadata: Metadata, width: int) -> _Parts:
    every = metadata["n_wa_pattern"]
    whole = list(range(every - 1, metadata["block_count"], every))
    vision = {"out_hidden_size": width, "fullatt_block_indexes": whole, "window_size": metadata.get("window_size", 112)}
    return _qwen(metadata, vision)


def _qwen3(metadata: Metadata, width: int) -> _Parts:
    deep = [layer for layer, is_deep in enumerate(metadata.get("is_deepstack_layers", [])) if is_deep]
    vision = {"out_hidden_size": width, "num_position_embeddings": _side(metadata) ** 2}
    return _qwen(metadata, vision | {"deepstack_visual_indexes": deep}, 2**16, 2**24)


def _pixtral(metadata: Metadata, _: int) -> _Parts:
    if "mm.patch_merger.weight" not in metadata.tensors:
        raise NotRead("it has no patch merger, as that of Mistral 3 has")
    patch = metadata["patch_size"]
    merge = metadata.get("spatial_merge_size", 2)
    wrapper = {"spatial_merge_size": merge, "vision_feature_layer": -1}
    wrapper["multimodal_projector_bias"] = metadata.has(r"^mm\.1\.bias$")
    vision = {"head_dim": metadata["embedding_length"] // metadata["attention.head_count"]}
    images = {"size": {"longest_edge": metadata["image_size"]}, "patch_size": patch}
    return _Parts(vision, wrapper, images, {"patch_size": patch, "spatial_merge_size": merge})


def _llava(metadata: Metadata, _: int) -> _Parts:
    if not metadata.has(r"^v\.class_embd$"):
        raise NotRead("its tower is not CLIP's")
    if metadata.get("image_grid_pinpoints") or metadata.has(r"^model\.image_newline$"):
        raise NotRead("images in tiles, of LLaVA 1.6, are read from a folder of safetensors only")
    size = metadata["image_size"]
    strategy = {"vision_feature_select_strategy": "default"}
    images = {"size": {"shortest_edge": size}, "crop_size": _square(size)}
    settings = {"patch_size": metadata["patch_size"], "num_additional_image_tokens": 1, **strategy}
    # The converter leaves out the last layer, which is not used: all that are there count.
    return _Parts({}, {"vision_feature_layer": -1, **strategy}, images, settings)


def _internvl(metadata: Metadata, _: int) -> _Parts:
    scale = metadata["projector.scale_factor"]
    size = metadata["image_size"]
    patch = metadata["patch_size"]
    number = (_side(metadata) // scale) ** 2
    vision = {
        "image_size": [size, size], "patch_size": [patch, patch],
        "attention_bias": metadata.has(r"attn_q\.bias$"), "use_qk_norm": metadata.has(r"attn_q_norm\.weight$"),
        "norm_type": "layer_norm" if metadata.has(r"ln1\.bias$") else "rms_norm",
    }  # fmt: skip
    wrapper = {"downsample_ratio": 1 / scale, "image_seq_length": number, "vision_feature_layer": -1}
    tiles = {"min_patches": metadata.get("preproc_min_tiles", 1), "max_patches": metadata.get("preproc_max_tiles", 12)}
    return _Parts(vision, wrapper, {"size": _square(size), **tiles}, {"image_seq_length": number})


# A minimal text model, because only the tower is used
_TEXT: Fields = {
    "vocab_size": 8, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
    "num_attention_heads": 1, "num_key_value_heads": 1,
}  # fmt: skip
_OF_SIGLIP = (r"^vision_tower\.", "vision_tower.vision_model.")
_NORM, _FIRST, _SECOND = (rf"^multi_modal_projector\.{part}" for part in ("layer_norm", "linear_1", "linear_2"))
_PADS = ("<|image_pad|>",)
_QWEN = "Qwen2VLImageProcessorPil"
_IN_QWEN3 = (
    (r"^visual\.merger\.norm", "v.post_ln"),
    (r"^visual\.merger\.linear_fc1", "mm.0"),
    (r"^visual\.merger\.linear_fc2", "mm.2"),
)
_BESIDE = ("v.token_embd.img_break", "v.post_ln.", "mm.a.")  # tensors that images do not need, or that are for sound
# keyed by the type of projector in the file
_FAMILIES = {
    "gemma3": _Family(
        "gemma3", ("<image_soft_token>", "<unused99>"),  # a file may have the tokens before the first of these alone
        "Gemma3ImageProcessorPil", _gemma3, "mm.input_projection.weight", (_OF_SIGLIP, ("_weight$", ".weight")),
        tokens={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "idefics3": _Family("idefics3", ("<image>",), "Idefics3ImageProcessorPil", _idefics3, "mm.model.fc.weight"),
    "qwen2vl_merger": _Family("qwen2_vl", _PADS, _QWEN, _qwen2),
    "qwen2.5vl_merger": _Family("qwen2_5_vl", _PADS, _QWEN, _qwen25),
    "qwen3vl_merger": _Family("qwen3_vl", _PADS, _QWEN, _qwen3, renames=_IN_QWEN3),
    "pixtral": _Family("mistral3", ("[IMG]",), "PixtralImageProcessorPil", _pixtral),
    "mlp": _Family(
        "llava", ("<image>",), "CLIPImageProcessorPil", _llava,
        renames=(_OF_SIGLIP, (_FIRST, "mm.0"), (_SECOND, "mm.2")), unused=r"post_layernorm",
    ),
    "internvl": _Family(
        "internvl", ("<IMG_CONTEXT>",), "GotOcr2ImageProcessorPil", _internvl, "mm.model.mlp.3.weight",
        ((_NORM, "mm.model.mlp.0"), (_FIRST, "mm.model.mlp.1"), (_SECOND, "mm.model.mlp.3")),
        tokens={"start_image_token": "<img>", "end_image_token": "</img>"},
    ),
}  # fmt: skip


def read_mmproj(path: Path, text: PreTrainedConfig, tokenizer: Tokenizer) -> Mmproj:
    """Read a tower for a text model. Raises StartupError for a wrong file, and NotRead for a kind that is not read."""
    with reported(f"'{path}' cannot be used"):
        try:
            head = read_head(path)
            values = {name: value for name, value in head.values.items() if not name.startswith("clip.audio.")}
            return _read(head, Metadata(values, head.tensors), values, text, tokenizer)
        except (BadFile, NotKnown) as error:
            raise StartupError(f"'{path}' cannot be used: {error}.") from error


def _read(
    head: GgufHead, metadata: Metadata, values: Mapping[str, Any], text: PreTrainedConfig, tokenizer: Tokenizer
) -> Mmproj:
    projector = values.get("clip.projector_type") or metadata.get("projector_type")
    family = _FAMILIES.get(str(projector))
    if family is None:
        raise NotRead(f"its projector is of the type {projector}, and those that are read are {', '.join(_FAMILIES)}")
    last = metadata.tensors.get(family.last)
    if last is None:
        raise BadFile(f"it has no tensor {family.last}")
    width = last.shape[-1 if family.type == "gemma3" else 0]
    if width != text.hidden_size:
        raise StartupError(
            f"'{head.paths[0]}' is not of this model: it makes vectors of {width} numbers, and the text model has "
            f"{text.hidden_size}. Name the right file by --mmproj, or serve text alone by --no-media."
        )
    added = {token.content: number for number, token in tokenizer.backend.get_added_tokens_decoder().items()}
    vector = next((token for token in family.vectors if token in added), None)
    if vector is None:
        raise NotRead(f"the model's tokenizer has no token {family.vectors[0]}")
    if family.images == _QWEN and not hasattr(text, "rope_axes"):
        raise NotRead("the text model has no positions by height and width")
    if text.model_type.startswith("qwen3_5"):  # These towers are Qwen3-VL's, without deep vectors.
        family = family._replace(type=text.model_type.removesuffix("_text"))
    parts = family.parts(metadata, width)
    config = _config(family, metadata, parts, width, added[vector], is_silu=bool(values.get("clip.use_silu")))
    colours = {name: metadata[name] for name in ("image_mean", "image_std")}
    try:
        processor = getattr(transformers, family.images)(**parts.images, **colours)
    except ImportError as error:  # Pillow
        raise NotRead(str(error).strip().partition("\n")[0]) from error
    weights = _weights(head, family, metadata, config)
    return Mmproj(config, weights, Settings(parts.settings, family.tokens, processor, vector))


def _config(
    family: _Family, metadata: Metadata, parts: _Parts, width: int, vector_id: int, *, is_silu: bool
) -> PreTrainedConfig:
    kind: Any = CONFIG_MAPPING[family.type]
    default = kind()
    heads = metadata["attention.head_count"]
    layers = metadata["block_count"]
    sizes = {
        "hidden_size": metadata["embedding_length"], "intermediate_size": _width_of_mlp(metadata),
        "num_hidden_layers": layers, "depth": layers, "num_attention_heads": heads, "num_heads": heads,
        "image_size": metadata["image_size"], "patch_size": metadata["patch_size"],
        "layer_norm_eps": metadata.get("attention.layer_norm_epsilon"), "hidden_act": "silu" if is_silu else None,
    }  # fmt: skip
    of_vision = type(default.vision_config)
    known = {name: value for name, value in sizes.items() if value is not None and hasattr(of_vision, name)}
    of_text = type(default.get_text_config(decoder=True))
    text = of_text(hidden_size=width, **_TEXT, head_dim=width)
    if hasattr(kind, "image_token_index"):
        token = "image_token_index"
    else:
        token = "image_token_id"
    vision = of_vision(**known | parts.vision)
    own = {"tie_word_embeddings": False, token: vector_id, **parts.wrapper}
    config: PreTrainedConfig = kind(vision_config=vision, text_config=text, **own)
    return config


def _width_of_mlp(metadata: Metadata) -> int:
    """Return the width within an MLP, which is wrong in the metadata of some files."""
    shape = metadata.shape(r"^v\.blk\.0\.ffn_up\.weight$") or (metadata["feed_forward_length"],)
    return prod(shape) // (metadata["embedding_length"] if len(shape) > 1 else 1)


def _weights(head: GgufHead, family: _Family, metadata: Metadata, config: Any) -> dict[str, Tensor]:
    """Return the tower's parameters, without those that the file lacks. Raises NotKnown, and NotRead for more."""
    file = GgufFile(head)
    tensors = dict(metadata.tensors)
    # Older converters swapped these names.
    if tensors["v.blk.0.ffn_down.weight"].shape[-1] == metadata["embedding_length"]:
        turned = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
        tensors = {re.sub("ffn_up|ffn_down", lambda m: turned[m[0]], name): one for name, one in tensors.items()}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(metadata["block_count"], 8))
    weights: dict[str, Tensor] = {}
    others = {name for name in tensors if name.startswith(("v.", "mm.")) and not name.startswith(_BESIDE)}
    for parameter, shape in tower_parameters(config).items():
        if re.search(family.unused, parameter):
            weights[parameter] = torch.zeros(shape)
            continue
        own = _tensors_of(_renamed(parameter, family, config), names, tensors)
        if not own:
            continue
        others -= {tensor.name for tensor in own}
        parts = [file.expanded(tensor) for tensor in own]
        if len(shape) == 5:
            value = torch.stack(parts, dim=2)
        else:
            value = torch.cat(parts)
        if "soft_emb_norm" in parameter:
            value = value.float() - 1
        if family.type == "mistral3" and re.search(r"\.[qk]_proj\.", parameter):
            heads = config.vision_config.num_attention_heads
            value = value[torch.from_numpy(neighbours_as_halves(heads, len(value) // heads))]
        if value.numel() == prod(shape):
            weights[parameter] = value.reshape(shape)
        else:
            weights[parameter] = value
    if others:
        raise NotRead(f"it has a tensor '{min(others)[:100]}', which is not known")
    return weights


def _renamed(parameter: str, family: _Family, config: Any) -> str:
    """Return a parameter's name as the package gguf knows it, or as the file has it."""
    name = parameter.removeprefix("model.")
    for pattern, new in family.renames:
        name = re.sub(pattern, new, name)
    if deep := re.search(r"^visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(.*)", name):
        return f"v.deepstack.{config.vision_config.deepstack_visual_indexes[int(deep[1])]}.{deep[2]}"
    return name


def _tensors_of(name: str, names: gguf.TensorNameMap, tensors: Mapping[str, GgufTensor]) -> list[GgufTensor]:
    """Return the tensors of a parameter, in their order; none if the file has none."""
    known = (names.get_name(one, try_suffixes=(".weight", ".bias")) for one in (f"model.{name}", name))
    known_name = next((one for one in known if one is not None), name)
    choices = [
        [known_name],
        [f"{known_name}.weight"],
        [known_name.replace("attn_qkv", f"attn_{part}") for part in "qkv"],
    ]
    if f"{known_name}.1" in tensors:  # weights for the two video frames that make one patch
        choices = [[known_name, f"{known_name}.1"]]
    return next(([tensors[one] for one in choice] for choice in choices if all(one in tensors for one in choice)), [])
