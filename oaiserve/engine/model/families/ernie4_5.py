"""ERNIE 4.5, without and with experts."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata, no_fields


def _with_experts(metadata: Metadata) -> Fields:
    return {
        "moe_num_experts": metadata["expert_count"],
        "moe_k": metadata["expert_used_count"],
        "moe_layer_start_index": metadata["leading_dense_block_count"],
        "moe_layer_interval": metadata.get("interleave_moe_layer_step", 1),
        "moe_num_shared_experts": metadata.get("expert_shared_count", 0),
    }


_SMALL = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
FAMILIES = (
    Family(type="ernie4_5", architectures={"ernie4_5": no_fields}, changes=()),
    Family(type="ernie4_5_moe", architectures={"ernie4_5-moe": _with_experts}, changes=(), small=_SMALL),
)
