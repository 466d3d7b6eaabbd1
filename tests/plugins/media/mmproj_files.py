"""Writes the two GGUF files of a small multimodal model, as llama.cpp's conversion does."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from tests.models.gguf_files import finish, write_gguf
from tests.plugins.media.seeing import KINDS, SeeingModel, save_whole

_OF_TEXT = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?|^lm_head")
_PROJECTORS = {
    "gemma3": "gemma3", "smolvlm": "idefics3", "idefics3": "idefics3", "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger", "mistral3": "pixtral", "llava": "mlp", "internvl": "internvl",
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5"), "qwen3vl_merger"),
}  # fmt: skip
# What files do not say of a text model.
_TEXT = {"gemma3": {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 256}}
FAMILIES = tuple(_PROJECTORS.keys() - {"qwen3_5"})


def save_folder(name: str, folder: Path, **text: int) -> SeeingModel:
    """Save a small model of this family, of which files can be made, with these values of its text model."""
    kind = KINDS[name]
    kind = kind._replace(text={**kind.text, **_TEXT.get(name, {}), **text})
    return save_whole(name, kind, folder, torch.float32)


def write_pair(name: str, seeing: SeeingModel, folder: Path, kind: Kind = Kind.F32) -> Path:
    """Write a model and its tower next to it, whose matrices have this format. Return the path of the model."""
    config = seeing.model.config
    tokenizer = seeing.tokenizer
    path = folder / "model.gguf"
    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    text = config.get_text_config(decoder=True)
    special = set(tokenizer.get_added_vocab())
    tokens = [vocabulary.get(number, f"<{number}>") for number in range(text.vocab_size)]
    fields = {
        "model": "gpt2", "tokens": tokens, "token_type": [3 if token in special else 1 for token in tokens],
        "merges": ["a a"], "chat_template": tokenizer.chat_template,
    }  # fmt: skip
    parameters = {key: tensor.numpy() for key, tensor in seeing.model.state_dict().items()}
    of_text = {
        _OF_TEXT.sub(lambda match: "lm_head" if match[0] == "lm_head" else "model.", key): values
        for key, values in parameters.items()
        if _OF_TEXT.search(key) and not (key.startswith("lm_head") and config.tie_word_embeddings)
    }
    write_gguf(path, text, of_text.items(), lambda _: Kind.F32, fields)
    write_tower(name, seeing, folder / "mmproj-model-f16.gguf", kind)
    return path


def write_tower(name: str, seeing: SeeingModel, path: Path, kind: Kind = Kind.F32) -> None:
    """Write the second file of a model."""
    config = seeing.model.config
    images = seeing.images
    vision = config.vision_config
    writer = gguf.GGUFWriter(path, "clip")
    first = {key: one[0] if isinstance(one, list | tuple) else one for key, one in vision.to_dict().items()}
    depth = first.get("depth") or first["num_hidden_layers"]
    patch = first["patch_size"]
    size = first.get("image_size") or int(first.get("num_position_embeddings", 4) ** 0.5) * patch
    writer.add_clip_projector_type(_PROJECTORS[name])
    writer.add_vision_image_size(size)
    writer.add_vision_patch_size(patch)
    writer.add_vision_embedding_length(first.get("embed_dim", vision.hidden_size))
    writer.add_vision_feed_forward_length(first.get("intermediate_size", vision.hidden_size))
    writer.add_vision_block_count(depth)
    writer.add_vision_head_count(first.get("num_heads") or first["num_attention_heads"])
    writer.add_vision_attention_layernorm_eps(first.get("layer_norm_eps", 1e-6))
    writer.add_vision_projection_dim(config.get_text_config(decoder=True).hidden_size)
    writer.add_vision_image_mean(list(images.image_mean))
    writer.add_vision_image_std(list(images.image_std))
    if merge := first.get("spatial_merge_size") or getattr(config, "spatial_merge_size", None):
        writer.add_vision_spatial_merge_size(merge)
    if name == "gemma3":
        writer.add_vision_projector_scale_factor(size // patch // int(config.mm_tokens_per_image**0.5))
    if name in ("smolvlm", "idefics3"):
        writer.add_vision_projector_scale_factor(config.scale_factor)
        writer.add_vision_preproc_image_size(images.size["longest_edge"])
    if name == "internvl":
        writer.add_vision_projector_scale_factor(int(1 / config.downsample_ratio))
        writer.add_vision_preproc_max_tiles(images.max_patches)
    if name == "qwen2_5_vl":
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision.fullatt_block_indexes[0] + 1)
    if name.startswith("qwen"):
        deep = getattr(vision, "deepstack_visual_indexes", [])
        writer.add_vision_is_deepstack_layers([layer in deep for layer in range(depth)])
        writer.add_vision_min_pixels(images.size["shortest_edge"])
        writer.add_vision_max_pixels(images.size["longest_edge"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    for key, tensor in seeing.model.state_dict().items():
        if _OF_TEXT.search(key):
            continue
        for own, values in _as_converted(name, key, tensor.numpy(), vision):
            result = names.get_name(own, try_suffixes=(".weight", ".bias")) or own
            is_whole = values.ndim != 2 or values.shape[-1] % 32 != 0 or "embd" in result
            own_kind = Kind.F32 if is_whole else kind
            writer.add_tensor(result, gguf.quantize(np.ascontiguousarray(values), own_kind), raw_dtype=own_kind)
    finish(writer)


def _as_converted(
    name: str, key: str, values: NDArray[np.float32], vision: Any
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield a parameter under the names that published checkpoints or files have, with the changes of llama.cpp."""
    own = key.removeprefix("model.")
    if name in ("smolvlm", "idefics3"):
        yield key, values
    elif "vision_tower.head." in own:
        return
    elif own.endswith("patch_embed.proj.weight"):
        yield from (("v.patch_embd.weight", values[:, :, 0]), ("v.patch_embd.weight.1", values[:, :, 1]))
    elif ".qkv." in own and not name.startswith("qwen3"):
        yield from ((own.replace("qkv", part), one) for part, one in zip("qkv", np.split(values, 3), strict=True))
    elif name.startswith("qwen3") and (deep := re.search(r"deepstack_merger_list\.(\d+)\.(linear_)?(.*)", own)):
        yield f"v.deepstack.{vision.deepstack_visual_indexes[int(deep[1])]}.{deep[3]}", values
    elif name.startswith("qwen3") and ".merger." in own:
        last = own.rpartition("merger.")[2]
        for old, new in (("norm", "v.post_ln"), ("linear_fc1", "mm.0"), ("linear_fc2", "mm.2")):
            last = last.replace(old, new)
        yield last, values
    elif name == "gemma3":
        own = own.replace("vision_tower.", "vision_tower.vision_model.").replace("_weight", ".weight")
        yield own, values + 1 if "soft_emb_norm" in own else values
    elif name == "mistral3":
        if re.search(r"\.[qk]_proj\.", own):
            values = values.reshape(vision.num_attention_heads, 2, -1, values.shape[1]).swapaxes(1, 2)
            values = values.reshape(-1, values.shape[-1])
        yield own, values
    elif name == "llava":
        if "post_layernorm" in own:
            return
        own = own.replace("vision_tower.", "vision_tower.vision_model.")
        for old, new in (("multi_modal_projector.linear_1", "mm.0"), ("multi_modal_projector.linear_2", "mm.2")):
            own = own.replace(old, new)
        # This converter had these names the wrong way.
        own = re.sub(r"mlp\.fc([12])", lambda match: f"mlp.fc{3 - int(match[1])}", own)
        yield own, values
    elif name == "internvl":
        for old, new in (("layer_norm", 0), ("linear_1", 1), ("linear_2", 3)):
            own = own.replace(f"multi_modal_projector.{old}", f"mlp1.{new}")
        is_named = ".lambda_" in own or "position_embedding" in own
        own = f"model.{own}" if own.startswith("vision_tower") else own
        yield f"{own}.weight" if is_named else own, values
    else:
        yield own, values
