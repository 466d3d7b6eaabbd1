"""Configurations of small models by transformers' model type, in sizes that the native step takes."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig

from tests.models.decoders import SMALL, STATE_FAMILIES
from tests.models.wrappers import SHARED_KEYS

_SIZES = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # sizes that the native step takes
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
_DEEPSEEK = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_GROUPED = {key: value for key, value in _DEEPSEEK.items() if "rank" not in key and "head_dim" not in key} | {
    "num_experts": 4,
    "num_shared_experts": 1,
}
_HEADS_FOR_EACH = {"num_key_value_heads": 4}  # these have no grouped attention
_ROTARY_NAMES = {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8}
# What the code of a type needs beside the common sizes to run; None removes a size that it cannot have.
EXTRA = {
    "codegen": _ROTARY_NAMES,
    "falcon": {"head_dim": None},
    "gpt_neo": {
        "num_layers": 3,
        "num_heads": 4,
        "window_size": 6,
        "attention_types": [[["global", "local", "local"], 1]],
    },
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 128},
    "deepseek_v2": {**_DEEPSEEK, **_HEADS_FOR_EACH},
    "deepseek_v3": {**_DEEPSEEK, **_HEADS_FOR_EACH},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3n_text": {**SHARED_KEYS, "laurel_rank": 16, "altup_num_inputs": 2},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 6,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 97,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "gemma4_unified_text": {**SHARED_KEYS, "global_head_dim": 32},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "gpt_neox": _HEADS_FOR_EACH,
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 96, "no_rope_layer_interval": 2},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "jamba": {"num_hidden_layers": 4},
    "kimi_linear": {
        **_DEEPSEEK,
        **_HEADS_FOR_EACH,
        "q_lora_rank": None,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 6},
    "mamba2": {"head_dim": 32},
    "nemotron_h": {"num_hidden_layers": 5},
    "gptj": _ROTARY_NAMES,
    "persimmon": _HEADS_FOR_EACH,
    "phi": _HEADS_FOR_EACH,
    "stablelm": _HEADS_FOR_EACH,
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "granitemoeshared": {**_MOE, "shared_intermediate_size": 48},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "jetmoe": {**_MOE, "kv_channels": 16, "num_attention_heads": 4},
    **{name: {**_GROUPED, **_HEADS_FOR_EACH} for name in ("dots1", "exaone_moe", "glm4_moe")},
    **{name: {**_DEEPSEEK, **_HEADS_FOR_EACH} for name in ("axk1", "glm4_moe_lite", "longcat_flash", "minicpm3")},
    **dict.fromkeys(("afmoe", "flex_olmo", "gpt_oss", "granitemoe", "minimax_m2", "mixtral", "olmoe", "phimoe"), _MOE),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _MOE),
    "zamba2": {**_HEADS_FOR_EACH, "head_dim": None, "num_hidden_layers": 4},
}
_DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}  # heads that the native step takes
EXTRA |= dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _DELTA)
EXTRA |= {name: {"mamba_d_state": 16} for name in ("bamba", "falcon_h1", "granitemoehybrid")}
EXTRA["mamba2"] |= {"state_size": 16}
EXTRA |= {name: {"state_size": 16, "time_step_rank": 16} for name in ("mamba", "falcon_mamba")}
EXTRA["jamba"] |= {"mamba_d_state": 16, "mamba_dt_rank": 16}
EXTRA["nemotron_h"] |= {"ssm_state_size": 16}
# Types with the sizes of another one.
LIKE = {"lfm3": "lfm2", "qwen3_5_moe_text": "qwen3_next"}


def config_of(name: str) -> PreTrainedConfig:
    """Return the configuration of a small model of a type."""
    values = {**STATE_FAMILIES.get(LIKE.get(name, name), {}), **_SIZES, **EXTRA.get(name, {}), "model_type": None}
    found: PreTrainedConfig = AutoConfig.for_model(
        name, **{key: value for key, value in values.items() if value is not None}
    )
    return found
