"""Kimi Linear: delta nets with a decay of each row, beside latent attention."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.small_sizes import GROUPED_EXPERTS, HEADS_FOR_EACH, LATENT, STATE_AND_ATTENTION

_SMALL = {
    **LATENT, **GROUPED_EXPERTS, **HEADS_FOR_EACH, **STATE_AND_ATTENTION, "q_lora_rank": None, "linear_head_dim": 16,
    "linear_num_heads": 4,
}  # fmt: skip
FAMILIES = (Family(type="kimi_linear", mixer="KimiLinearDeltaAttention", small=_SMALL),)
