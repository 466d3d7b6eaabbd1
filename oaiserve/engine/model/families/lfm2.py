"""LFM2 and LFM3: short convolutions in place of attention in most layers."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata


def _fields(metadata: Metadata) -> Fields:
    """Read the fields: layers without keys are short convolutions."""
    heads = metadata.of_layers("attention.head_count_kv")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "conv_bias": metadata.has(r"shortconv\.in_proj\.bias$"),
        "block_auto_adjust_ff_dim": False,  # the file has the width that the configuration would be adjusted to
        "use_expert_bias": metadata.has(r"exp_probs_b"),
    }


_SMALL_LFM2_MOE = {
    "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
_SMALL = {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 6}
FAMILIES = (
    Family(
        type="lfm2",
        architectures={"lfm2": _fields},
        changes=(),
        mixer="Lfm2ShortConv",
        small={"layer_types": ["conv", "full_attention", "conv"]},
    ),
    Family(
        type="lfm2_moe", architectures={"lfm2moe": _fields}, changes=(), mixer="Lfm2MoeShortConv", small=_SMALL_LFM2_MOE
    ),
    Family(type="lfm3", mixer="Lfm3ShortConv", small=_SMALL),
)
