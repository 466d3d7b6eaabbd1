"""Makes small multimodal models with random weights, whose text models oaiserve serves."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from tools.random_models import SMALL, STATE_FAMILIES

_TEXT = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # sizes that the native step takes
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "image_size": 28, "patch_size": 14, "out_hidden_size": 64, "projection_dim": 32, "vocab_size": 97,
    "depth": 1, "embed_dim": 32, "num_heads": 2, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QUARTER_MROPE = {**_MROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25}


def _of_states(name: str) -> dict[str, Any]:
    """Return what a family with states needs beside the common sizes."""
    return {key: value for key, value in STATE_FAMILIES[name].items() if key not in {*SMALL, "model_type"}}


# What the text model of a wrapper needs beside the common sizes to run.
_EXTRA: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 6},
    "glm4v_moe_text": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "first_k_dense_replace": 1,
        "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
    },
    "glm4v_text": {"rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    "lfm2": _of_states("lfm2"),
    "mistral": {"sliding_window": 6},
    "qwen2_5_vl_text": {"rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}},
    "qwen2_vl_text": {"rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}},
    "qwen3_5_moe_text": {**_of_states("qwen3_next"), "rope_parameters": _QUARTER_MROPE},
    "qwen3_5_text": {**_of_states("qwen3_5_text"), "rope_parameters": _QUARTER_MROPE},
    "qwen3_vl_text": {"rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3], "mrope_interleaved": True}},
}  # fmt: skip


def wrapper_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a small multimodal model of this type."""
    kind = CONFIG_MAPPING[name]
    defaults = kind()
    text_type = defaults.get_text_config(decoder=True).model_type
    parts: dict[str, Any] = {"text_config": {"model_type": text_type, **_TEXT, **_EXTRA.get(text_type, {})}}
    for part in set(kind.sub_configs) - {"text_config"}:
        of_part = getattr(defaults, part)
        sizes = {key: value for key, value in _VISION.items() if key in of_part.to_dict()}
        parts[part] = {"model_type": of_part.model_type, **sizes}
    if hasattr(defaults, "vision_feature_layer"):
        parts["vision_feature_layer"] = -1
    return kind(**parts)


def random_wrapper(name: str) -> PreTrainedModel:
    """Return a small multimodal model of this type, whose answers to texts differ."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        wrapper_config(name), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            else:
                parameter += 0.4 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None
    return model.eval()  # type: ignore[no-any-return]
