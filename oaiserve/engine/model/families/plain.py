"""Families with only a row: the metadata of a GGUF file, and the changes of its conversion."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import TURNED
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata, no_fields
from oaiserve.engine.model.families.small_sizes import (
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


FAMILIES = (
    Family(
        type="apertus",
        architectures={"apertus": no_fields},
        changes=(),
        in_metadata=(r"\.layers\.(\d+)\..*\.act_fn\.(\w+)$", "xielu."),
    ),
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
    Family(type="phi3", weights_by_transformers=True, changes=()),
    Family(type="seed_oss", architectures={"seed_oss": no_fields}, changes=()),
    Family(type="smollm3", architectures={"smollm3": no_fields}, changes=(TURNED,)),
    Family(type="starcoder2", architectures={"starcoder2": no_fields}, changes=()),
    Family(
        type="doge",
        not_split="transformers' plan for models of type 'doge' gives a part the keys of its own heads, and the masks "
        "of all",
    ),
)
