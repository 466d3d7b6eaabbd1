"""Families with only a row, such as the changes of a GGUF file's conversion."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import TURNED
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


FAMILIES = (
    Family(type="arcee", changes=(TURNED,)),
    Family(type="dots1", changes=(), small=WITH_SHARED_EXPERT),
    Family(type="cohere", changes=()),
    Family(type="cohere2", changes=()),
    Family(type="hunyuan_v1_dense", changes=()),
    Family(type="hunyuan_v1_moe", changes=(), small={"num_experts": 4, "moe_topk": 2}),
    Family(type="kimi_linear", mixer="KimiLinearDeltaAttention", small=_KIMI),
    Family(type="minimax_m2", changes=(), small=EXPERTS),
    Family(type="phi3", changes=()),
    Family(type="seed_oss", changes=()),
    Family(type="smollm3", changes=(TURNED,)),
    Family(type="starcoder2", changes=()),
    Family(type="doge"),
    Family(type="ernie4_5", changes=()),
    Family(type="ernie4_5_moe", changes=(), small={"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    Family(type="exaone4", changes=()),
    Family(type="exaone_moe", small=WITH_SHARED_EXPERT),
    Family(type="glm4", changes=()),
    Family(type="glm4_moe", changes=(), small=WITH_SHARED_EXPERT),
    Family(type="olmo", changes=(TURNED,)),
    Family(type="olmo2", changes=()),
    Family(type="olmo3", changes=()),
    Family(type="olmoe", changes=(), small=EXPERTS),
    Family(type="olmo_hybrid", mixer="OlmoHybridGatedDeltaNet", small=DELTA),
    Family(type="stablelm", changes=(), attention={"StableLmAttention": hand_over}, small=HEADS_FOR_EACH),
)
