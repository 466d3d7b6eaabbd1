"""LFM2 and LFM3: short convolutions in place of attention in most layers."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family

_SMALL_LFM2_MOE = {
    "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
_SMALL = {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 6}
FAMILIES = (
    Family(
        type="lfm2",
        changes=(),
        mixer="Lfm2ShortConv",
        small={"layer_types": ["conv", "full_attention", "conv"]},
    ),
    Family(type="lfm2_moe", changes=(), mixer="Lfm2MoeShortConv", small=_SMALL_LFM2_MOE),
    Family(type="lfm3", mixer="Lfm3ShortConv", small=_SMALL),
)
