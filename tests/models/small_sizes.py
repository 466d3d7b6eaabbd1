"""Sizes of small random models by transformers' model type, in addition to those that all have: see small_configs.py.

A size of None is one that the configuration of a type must not have.
"""

from typing import Any

HEADS_FOR_EACH = {"num_key_value_heads": 4}  # these have no grouped attention
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}  # fmt: skip
_GROUPED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
_WITH_SHARED_EXPERT = {**_GROUPED_EXPERTS, **HEADS_FOR_EACH, "num_experts": 4, "num_shared_experts": 1}
_LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
_STATE_AND_ATTENTION = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {
    **_STATE_AND_ATTENTION, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8,
}  # fmt: skip
SHARED_KEYS = {  # the last layers take their keys and values from those before
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 6, "hidden_size_per_layer_input": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 97,
}  # fmt: skip
_NO_LAYER_INPUTS = dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input"))
_DELTA_AND_EXPERTS = {
    **DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
_GEMMA = {"query_pre_attn_scalar": 8}
_LATENT_AND_EXPERTS = {**_LATENT, **_GROUPED_EXPERTS, **HEADS_FOR_EACH}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_WITH_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "youtu")
_WITH_EXPERTS = (
    *("afmoe", "flex_olmo", "gpt_oss", "granitemoe", "mellum", "minimax_m2", "mixtral", "olmoe", "phimoe"),
    *("qwen2_moe", "qwen3_moe"),
)
OF_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gpt_neox", "persimmon", "phi", "stablelm"), HEADS_FOR_EACH),
    **dict.fromkeys(_WITH_EXPERTS, EXPERTS),
    **dict.fromkeys(("dots1", "exaone_moe", "glm4_moe"), _WITH_SHARED_EXPERT),
    **dict.fromkeys(_WITH_LATENT, _LATENT_AND_EXPERTS),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), _DELTA_AND_EXPERTS),
    **dict.fromkeys(("qwen3_5_text", "olmo_hybrid"), DELTA),
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
    "gemma3n_text": {**SHARED_KEYS, "laurel_rank": 16, "altup_num_inputs": 2},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 6,
        "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
    },
    "gemma4_unified_text": {**SHARED_KEYS, **_NO_LAYER_INPUTS, "global_head_dim": 32},
    "granitemoehybrid": {
        **MAMBA2, **_STATE_AND_ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 48},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "jetmoe": {**EXPERTS, "kv_channels": 16, "num_attention_heads": 4},
    "kimi_linear": {
        **_LATENT_AND_EXPERTS, **_STATE_AND_ATTENTION, "q_lora_rank": None, "n_routed_experts": None,
        "num_experts": 4, "linear_head_dim": 16, "linear_num_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 6},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 96, "no_rope_layer_interval": 2},
    "mamba2": {"state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 2, "chunk_size": 8},
    "minicpm3": {**_LATENT, **HEADS_FOR_EACH},
    "ministral3": {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    "nemotron_h": {
        "num_hidden_layers": 5, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
        "chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    },
    "solar_open": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}  # fmt: skip
