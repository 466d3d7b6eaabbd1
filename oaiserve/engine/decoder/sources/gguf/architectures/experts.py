"""Mixtures of experts without latent attention and without states."""

from __future__ import annotations

from oaiserve.engine.decoder.sources.gguf.architecture import NORM_BEFORE_MLP, Architecture
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata


def _dots1(metadata: Metadata) -> Fields:
    return {"norm_topk_prob": metadata.get("expert_weights_norm", False), "sliding_window": None}


def _ernie4_5_moe(metadata: Metadata) -> Fields:
    return {
        "moe_num_experts": metadata["expert_count"],
        "moe_k": metadata["expert_used_count"],
        "moe_layer_start_index": metadata["leading_dense_block_count"],
        "moe_layer_interval": metadata.get("interleave_moe_layer_step", 1),
        "moe_num_shared_experts": metadata.get("expert_shared_count", 0),
    }


def _glm4_moe(metadata: Metadata) -> Fields:
    return {"use_qk_norm": metadata.has("attn_q_norm"), "norm_topk_prob": metadata.get("expert_weights_norm", True)}


def _gpt_oss(metadata: Metadata) -> Fields:
    rope: Fields = {"rope_type": "default", "rope_theta": metadata["rope.freq_base"]}
    if (factor := metadata.get("rope.scaling.factor")) is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": metadata["rope.scaling.original_context_length"],
            "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", 1.0),
            "truncate": False,
        }
    return {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": metadata["attention.key_length"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "sliding_window": metadata["attention.sliding_window"],
        "intermediate_size": metadata.get("expert_feed_forward_length") or metadata["feed_forward_length"],
        "rope_parameters": rope,
    }


ARCHITECTURES = (
    Architecture(name="dots1", type="dots1", fields=_dots1),
    Architecture(name="ernie4_5-moe", type="ernie4_5_moe", fields=_ernie4_5_moe),
    Architecture(name="glm4moe", type="glm4_moe", fields=_glm4_moe, names=NORM_BEFORE_MLP),
    Architecture(name="gpt-oss", type="gpt_oss", fields=_gpt_oss, names=NORM_BEFORE_MLP),
    Architecture(
        name="hunyuan-moe",
        type="hunyuan_v1_moe",
        fields=lambda metadata: {"moe_topk": metadata["expert_used_count"]},
    ),
    Architecture(name="minimax-m2", type="minimax_m2"),
    Architecture(name="olmoe", type="olmoe", fields=lambda _: {"norm_topk_prob": False}),
)
