"""GLM-4, without and with experts."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata, no_fields
from oaiserve.engine.model.families.small_sizes import WITH_SHARED_EXPERT


def _with_experts(metadata: Metadata) -> Fields:
    return {"use_qk_norm": metadata.has("attn_q_norm"), "norm_topk_prob": metadata.get("expert_weights_norm", True)}


FAMILIES = (
    Family(type="glm4", architectures={"glm4": no_fields}, changes=()),
    Family(type="glm4_moe", architectures={"glm4moe": _with_experts}, changes=(), small=WITH_SHARED_EXPERT),
)
