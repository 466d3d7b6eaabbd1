"""Families with experts compute transformers' logits in float32, with settings that no pinned model has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from tests.engine.executors.native.small_models import make_model
from tests.engine.model.steps import BLOCK_SIZE, CPU, batch_of_prompt
from tests.models.described import decoder_in
from tests.models.small_configs import config_of

TOLERANCE = 2e-5  # norm of the differences, relative to that of the logits
_NUM_TOKENS = 100
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_SMALL = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_GROUPS = {**_SMALL, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"hidden_act": "gelu"}),
    ("mixtral", {"sliding_window": 6}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen2_moe", {"mlp_only_layers": [0, 2]}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6}),
    ("mellum", {**_SMALL, **_WINDOWS, "num_experts": 4, "norm_topk_prob": False}),
    ("mellum", {**_SMALL, "num_experts": 4, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    ("olmoe", {"norm_topk_prob": True}),
    ("flex_olmo", {"norm_topk_prob": True}),
    ("hunyuan_v1_moe", {"moe_topk": [3, 3, 3]}),
    ("ernie4_5_moe", {"moe_layer_interval": 2}),
    ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_num_shared_experts": 0}),
    ("ernie4_5_moe", {"use_bias": True}),
    ("cohere2_moe", {"expert_selection_fn": "sigmoid", **_WINDOWS}),
    ("cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": False}),
    ("cohere2_moe", {"num_shared_experts": 2, "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-5}),
    ("cohere2_moe", {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 128}),
    (
        "cohere2_moe",
        {
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 128,
            "prefix_dense_sliding_window_pattern": 2,
            "sliding_window": 6,
        },
    ),
    ("minimax_m2", {"rotary_dim": 8}),
    ("glm4_moe", {**_GROUPS, "norm_topk_prob": False, "use_qk_norm": False}),
    ("glm4_moe", {"first_k_dense_replace": 2, "routed_scaling_factor": 2.0, "attention_bias": True}),
    ("glm4_moe", {"n_group": 1, "topk_group": 1}),
    ("dots1", {**_GROUPS, "norm_topk_prob": True, "routed_scaling_factor": 1.7}),
    ("dots1", {"max_window_layers": 1, "sliding_window": 6, "first_k_dense_replace": 0}),
    ("exaone_moe", _WINDOWS),
    ("exaone_moe", {"sliding_window": None, "norm_topk_prob": False}),
    ("exaone_moe", {"num_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2}),
    ("solar_open", {**_GROUPS, "norm_topk_prob": False, "routed_scaling_factor": 2.0}),
    ("granitemoe", {"attention_multiplier": 0.3}),
    ("granitemoeshared", {"shared_intermediate_size": 0, "attention_bias": True}),
    ("granitemoe_swa", {**_WINDOWS, "shared_intermediate_size": 48, "layer_rope_theta": [0.0, 10000.0, 50000.0]}),
    ("gpt_oss", {**_WINDOWS, "attention_bias": False, "swiglu_alpha": 1.5, "swiglu_limit": 0.5}),
    ("deepseek_v2", {**_GROUPS, "topk_method": "group_limited_greedy", "norm_topk_prob": True}),
    ("deepseek_v2", {**_GROUPS, "topk_method": "greedy", "routed_scaling_factor": 2.0}),
    ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 0, "attention_bias": True, "mlp_bias": True}),
    ("deepseek_v3", {**_GROUPS, "rope_interleave": False, "norm_topk_prob": False}),
    ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "attention_bias": True}),
    ("deepseek_v3", {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0}}),
    ("glm4_moe_lite", {"rope_interleave": False, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("glm4_moe_lite", {"n_routed_experts": 8, "n_group": 2}),
    ("llama4_text", {}),
    ("llama4_text", {"floor_scale": 8, "attn_scale": 0.5, "num_experts_per_tok": 2}),
    ("llama4_text", {"floor_scale": 8, "attn_temperature_tuning": False, "no_rope_layers": [1, 0, 0]}),
    ("llama4_text", {"use_qk_norm": False, "interleave_moe_layer_step": 2, "attention_bias": True}),
    ("llama4_text", {"moe_layers": [1, 2], "attention_chunk_size": None, "no_rope_layer_interval": 3}),
    ("minicpm3", {"scale_depth": None, "dim_model_base": None, "tie_word_embeddings": False}),
    ("youtu", {"q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": False, "attention_bias": True}),
    ("minicpm3", {"scale_emb": 3, "q_lora_rank": None, "mlp_bias": True}),
]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_logits_are_those_of_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert error(make_model(config_of(name, **changes)), tmp_path) < TOLERANCE


def error(model: PreTrainedModel, folder: Path) -> float:
    """Save a model, and return how far the logits of its description are from its own. Raises NotKnown."""
    model.save_pretrained(folder)
    return error_of_files(model, folder)


@torch.inference_mode()
def error_of_files(model: PreTrainedModel, folder: Path) -> float:
    """Return how far the logits of a description are from those of a model. Raises NotKnown."""
    decoder = decoder_in(folder, length=_NUM_TOKENS)
    executor = ReferenceExecutor(decoder, dtype=torch.float32, device=CPU, num_blocks=8, block_size=BLOCK_SIZE)
    batch = batch_of_prompt(_NUM_TOKENS)
    batch.logits_rows = torch.arange(_NUM_TOKENS)
    expected = model(batch.input_ids[None], use_cache=False).logits[0]
    return float((executor.forward(batch) - expected).norm() / expected.norm())
