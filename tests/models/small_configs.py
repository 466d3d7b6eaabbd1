"""Configurations of small models by transformers' model type, in sizes that the native step takes."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from oaiserve.engine.model.families import FAMILIES, family_of
from oaiserve.engine.model.families.small_sizes import EXPERTS, GROUPED_EXPERTS, HEADS_FOR_EACH, LATENT, SHARED_KEYS
from tests.models.decoders import SMALL

_SIZES = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # sizes that the native step takes
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_NO_LAYER_INPUTS = dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input"))
# What the code of a type without a family of its own needs beside the common sizes to run.
_OTHERS: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma4_unified_text": {**SHARED_KEYS, **_NO_LAYER_INPUTS, "global_head_dim": 32},
    "jetmoe": {**EXPERTS, "kv_channels": 16, "num_attention_heads": 4},
    "ministral3": {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    **dict.fromkeys(("gpt_neox", "persimmon", "phi"), HEADS_FOR_EACH),
    **{
        name: {**LATENT, **GROUPED_EXPERTS, **HEADS_FOR_EACH}
        for name in ("axk1", "glm4_moe_lite", "longcat_flash", "youtu")
    },
    "minicpm3": {**LATENT, **HEADS_FOR_EACH},
    **dict.fromkeys(("afmoe", "flex_olmo", "phimoe"), EXPERTS),
}
STATE_FAMILIES = [name for name, family in FAMILIES.items() if family.mixer is not None]


def sizes_of(name: str) -> dict[str, Any]:
    """Return the sizes of a small model of a type; None for one that its configuration must not have."""
    return {**_SIZES, **family_of(name).small, **_OTHERS.get(name, {})}


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    """Return the configuration of a small model of a type."""
    sizes = {key: value for key, value in (sizes_of(name) | changes).items() if value is not None}
    found: PreTrainedConfig = AutoConfig.for_model(name, **sizes)
    return found
