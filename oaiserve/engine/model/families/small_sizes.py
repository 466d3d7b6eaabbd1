"""Sizes that small random models of several families share, beside those that all have (tests/models/small_configs.py).

A size of None is one that the configuration of a type must not have.
"""

from __future__ import annotations

HEADS_FOR_EACH = {"num_key_value_heads": 4}  # these have no grouped attention
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}  # fmt: skip
GROUPED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
WITH_SHARED_EXPERT = {**GROUPED_EXPERTS, **HEADS_FOR_EACH, "num_experts": 4, "num_shared_experts": 1}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
STATE_AND_ATTENTION = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {
    **STATE_AND_ATTENTION, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8,
}  # fmt: skip
SHARED_KEYS = {  # the last layers take their keys and values from those before
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 6, "hidden_size_per_layer_input": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 97,
}  # fmt: skip
