"""Hunyuan, without and with experts."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_metadata import no_fields

FAMILIES = (
    Family(type="hunyuan_v1_dense", architectures={"hunyuan-dense": no_fields}, changes=()),
    Family(
        type="hunyuan_v1_moe",
        architectures={"hunyuan-moe": lambda metadata: {"moe_topk": metadata["expert_used_count"]}},
        changes=(),
        small={"num_experts": 4, "moe_topk": 2},
    ),
)
