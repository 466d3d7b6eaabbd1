"""Families with only a row: the metadata of a GGUF file, and the changes of its conversion."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import TURNED
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata, no_fields, windows
from oaiserve.engine.model.families.own_attention import hand_over
from oaiserve.engine.model.families.small_sizes import (
    DELTA,
    EXPERTS,
    GROUPED_EXPERTS,
    HEADS_FOR_EACH,
    LATENT,
    STATE_AND_ATTENTION,
    WITH_SHARED_EXPERT,
)

_KIMI = {
    **LATENT, **GROUPED_EXPERTS, **HEADS_FOR_EACH, **STATE_AND_ATTENTION, "q_lora_rank": None, "linear_head_dim": 16,
    "linear_num_heads": 4,
}  # fmt: skip


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


def _exaone4(metadata: Metadata) -> Fields:
    slides = metadata.get("attention.sliding_window")
    return {"sliding_window": slides} | (
        windows(metadata) if slides else {"layer_types": ["full_attention"] * metadata.num_layers}
    )


def _glm4_moe(metadata: Metadata) -> Fields:
    return {"use_qk_norm": metadata.has("attn_q_norm"), "norm_topk_prob": metadata.get("expert_weights_norm", True)}


def _olmo2(metadata: Metadata) -> Fields:
    if metadata.get("attention.sliding_window") is None:
        return {}
    return {"model_type": "olmo3"} | windows(metadata)


def _stablelm(metadata: Metadata) -> Fields:
    return {
        "use_qkv_bias": metadata.has(r"attn_q\.bias$"),
        "qk_layernorm": metadata.has("attn_q_norm"),
        "use_parallel_residual": metadata.get("use_parallel_residual", False),
        "partial_rotary_factor": metadata["rope.dimension_count"] / metadata.head_dim,
    }


FAMILIES = (
    Family(type="arcee", architectures={"arcee": no_fields}, changes=(TURNED,)),
    Family(type="dots1", architectures={"dots1": _dots1}, changes=(), small=WITH_SHARED_EXPERT),
    Family(
        type="cohere",
        architectures={"command-r": lambda metadata: {"use_qk_norm": metadata.has("attn_q_norm")}},
        changes=(),
    ),
    Family(type="cohere2", architectures={"cohere2": no_fields}, changes=(), rotates_in_windows=True),
    Family(type="hunyuan_v1_dense", architectures={"hunyuan-dense": no_fields}, changes=()),
    Family(
        type="hunyuan_v1_moe",
        architectures={"hunyuan-moe": lambda metadata: {"moe_topk": metadata["expert_used_count"]}},
        changes=(),
        small={"num_experts": 4, "moe_topk": 2},
    ),
    Family(type="kimi_linear", mixer="KimiLinearDeltaAttention", small=_KIMI),
    Family(type="minimax_m2", architectures={"minimax-m2": no_fields}, changes=(), small=EXPERTS),
    Family(type="phi3", changes=()),
    Family(type="seed_oss", architectures={"seed_oss": no_fields}, changes=()),
    Family(type="smollm3", architectures={"smollm3": no_fields}, changes=(TURNED,)),
    Family(type="starcoder2", architectures={"starcoder2": no_fields}, changes=()),
    Family(type="doge"),
    Family(type="ernie4_5", architectures={"ernie4_5": no_fields}, changes=()),
    Family(
        type="ernie4_5_moe",
        architectures={"ernie4_5-moe": _ernie4_5_moe},
        changes=(),
        small={"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    ),
    Family(type="exaone4", architectures={"exaone4": _exaone4}, changes=(), rotates_in_windows=True),
    Family(type="exaone_moe", rotates_in_windows=True, small=WITH_SHARED_EXPERT),
    Family(type="glm4", architectures={"glm4": no_fields}, changes=()),
    Family(type="glm4_moe", architectures={"glm4moe": _glm4_moe}, changes=(), small=WITH_SHARED_EXPERT),
    Family(
        type="olmo",
        architectures={"olmo": lambda metadata: {"clip_qkv": metadata.get("attention.clamp_kqv")}},
        changes=(TURNED,),
    ),
    Family(type="olmo2", architectures={"olmo2": _olmo2}, changes=()),
    Family(type="olmo3", changes=()),
    Family(type="olmoe", architectures={"olmoe": lambda _: {"norm_topk_prob": False}}, changes=(), small=EXPERTS),
    Family(type="olmo_hybrid", mixer="OlmoHybridGatedDeltaNet", small=DELTA),
    Family(
        type="stablelm",
        architectures={"stablelm": _stablelm},
        changes=(),
        attention={"StableLmAttention": hand_over},
        small=HEADS_FOR_EACH,
    ),
)
