"""Gemma: norms that store their weight minus 1; from Gemma 3n on, inputs of layers and caches that layers share."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import NORMS_ADD_ONE

FAMILIES = (
    Family(type="gemma", changes=(NORMS_ADD_ONE,)),
    Family(type="gemma2", changes=(NORMS_ADD_ONE,)),
    Family(type="gemma3_text", changes=(NORMS_ADD_ONE,)),
    Family(
        type="gemma4_text",
        changes=(),
        tensors=(
            (r"router\.scale$", (("ffn_gate_inp.scale",),)),
            (r"router\.per_expert_scale$", (("ffn_down_exps.scale",),)),
        ),
        has_rope_factors=False,
    ),
)
