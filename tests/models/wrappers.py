"""Makes small multimodal models with random weights, whose text models oaiserve serves."""

import copy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.models.decoders import SMALL
from tests.models.small_sizes import OF_TYPE, SHARED_KEYS

Values = Mapping[str, Any]
NONE: Values = MappingProxyType({})
_TEXT = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # sizes that the native step takes
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "image_size": 28, "patch_size": 14, "out_hidden_size": 64, "projection_dim": 32, "vocab_size": 97,
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 64,
    "downsample_hidden_size": 16,
    "depth": 1, "embed_dim": 32, "num_heads": 2, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*section], **more}}


_HALF = _mrope(1, 1, 2, partial_rotary_factor=0.5)
_QUARTER = _mrope(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.25)
_INTERLEAVED = _mrope(2, 3, 3, mrope_interleaved=True)
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# Settings besides the common sizes that the text model of a wrapper needs.
_EXTRA: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    **{key: {"query_pre_attn_scalar": 8, "sliding_window": 6} for key in ("gemma2", "gemma3_text")},
    "gemma3n_text": {
        **SHARED_KEYS, "laurel_rank": 16, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    **{key: {**SHARED_KEYS, "global_head_dim": 32} for key in ("gemma4_text", "gemma4_unified_text")},
    "glm4v_moe_text": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "first_k_dense_replace": 1, **_HALF,
    },
    **dict.fromkeys(("glm4v_text", "glm_ocr_text"), _HALF),
    **{name: OF_TYPE[name] for name in ("lfm2", "lfm3", "llama4_text")},
    "mistral": {"sliding_window": 6},
    **dict.fromkeys(("qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text"), _mrope(2, 3, 3)),
    "qwen3_5_moe_text": {**OF_TYPE["qwen3_next"], **_QUARTER},
    "qwen3_5_text": {**OF_TYPE["qwen3_5_text"], **_QUARTER},
    **{key: {**_EXPERTS, **_INTERLEAVED} for key in ("qwen3_omni_moe_text", "qwen3_vl_moe_text")},
    "qwen3_vl_text": _INTERLEAVED,
}  # fmt: skip

# Settings of a wrapper besides its parts': their sizes, and the id of a token that published configurations have.
_OF_WRAPPER: dict[str, dict[str, Any]] = {
    **{key: {"hidden_size": 64, "vocab_size": 97} for key in ("ovis2", "paligemma")},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652},
}


def wrapper_config(name: str, own: Values = NONE, of_text: Values = NONE, of_vision: Values = NONE) -> PreTrainedConfig:
    """Return the configuration of a small multimodal model of this type, with these values of its own and its parts."""
    kind = CONFIG_MAPPING[name]
    defaults = kind()
    text_type = defaults.get_text_config(decoder=True).model_type
    parts: dict[str, Any] = {
        "text_config": {"model_type": text_type, **_TEXT, **copy.deepcopy(_EXTRA.get(text_type, {})), **of_text}
    }
    for part in set(kind.sub_configs) - {"text_config"}:
        of_part = getattr(defaults, part)
        if of_part is None:
            continue
        sizes = {key: value for key, value in _VISION.items() if key in of_part.to_dict()}
        parts[part] = {"model_type": of_part.model_type, **sizes, **(of_vision if part == "vision_config" else {})}
    if hasattr(defaults, "vision_feature_layer"):
        parts["vision_feature_layer"] = -1
    return kind(**parts, **{**_OF_WRAPPER.get(name, {}), **own})


def save_wrapper(name: str, folder: Path) -> PreTrainedModel:
    """Save a small multimodal model of this type, and return a model that answers texts as it does.

    Gemma 3n reads images with code of another package. Its text model alone is made, and saved as that of a wrapper.
    Llama 4's wrapper cannot compute texts in some versions of transformers, so its text model answers.
    """
    config = wrapper_config(name)
    if name != "gemma3n":
        wrapper = random_wrapper(name)
        wrapper.save_pretrained(folder)
        return wrapper.language_model if name == "llama4" else wrapper
    text = _with_random_weights(AutoModelForCausalLM, config.get_text_config(decoder=True))
    config.save_pretrained(folder)
    own = {key: tensor for key, tensor in text.state_dict().items() if key != "lm_head.weight"}  # the embedding
    wrapped = {f"model.language_{key}": tensor for key, tensor in own.items()}
    save_file(wrapped, folder / "model.safetensors", {"format": "pt"})
    return text


def random_wrapper(name: str, *more: Values, deviation: float = 0.3) -> PreTrainedModel:
    """Return a small multimodal model of this type, whose answers to texts differ; `more` is as in `wrapper_config`."""
    return _with_random_weights(AutoModelForMultimodalLM, wrapper_config(name, *more), deviation)


def _with_random_weights(kind: Any, config: PreTrainedConfig, deviation: float = 0.3) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, deviation)
            else:
                parameter += 4 / 3 * deviation * torch.randn_like(parameter)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    return model.eval()
