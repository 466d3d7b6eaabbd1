"""GLM-4, without and with experts."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata, no_fields
from oaiserve.engine.model.families.small_sizes import GROUPED_EXPERTS, HEADS_FOR_EACH


def _with_experts(metadata: Metadata) -> Fields:
    return {"use_qk_norm": metadata.has("attn_q_norm"), "norm_topk_prob": metadata.get("expert_weights_norm", True)}


_SMALL = {
    **GROUPED_EXPERTS, **HEADS_FOR_EACH, "num_experts": 4, "num_shared_experts": 1,
}  # fmt: skip
FAMILIES = (
    Family(type="glm4", architectures={"glm4": no_fields}, changes=()),
    Family(type="glm4_moe", architectures={"glm4moe": _with_experts}, changes=(), small=_SMALL),
)
