"""Gemma: norms that store their weight minus 1; from Gemma 3n on, inputs of layers and caches that layers share."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import NORMS_ADD_ONE
from oaiserve.engine.model.families.small_sizes import SHARED_KEYS

_SMALL = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 6,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97, "enable_moe_block": True, "num_experts": 4,
    "top_k_experts": 2, "moe_intermediate_size": 16,
}  # fmt: skip
FAMILIES = (
    Family(type="gemma", changes=(NORMS_ADD_ONE,)),
    Family(type="gemma2", changes=(NORMS_ADD_ONE,), small={"query_pre_attn_scalar": 8}),
    Family(type="gemma3_text", changes=(NORMS_ADD_ONE,), small={"query_pre_attn_scalar": 8}),
    Family(type="gemma3n_text", small={**SHARED_KEYS, "laurel_rank": 16, "altup_num_inputs": 2}),
    Family(
        type="gemma4_text",
        changes=(),
        tensors=(
            (r"router\.scale$", (("ffn_gate_inp.scale",),)),
            (r"router\.per_expert_scale$", (("ffn_down_exps.scale",),)),
        ),
        has_rope_factors=False,
        looks_ahead_in_windows=True,
        small=_SMALL,
    ),
)
