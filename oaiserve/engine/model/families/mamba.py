"""Mamba 2, without attention; and beside attention: Bamba and Falcon-H1."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import RATES
from oaiserve.engine.model.families.small_sizes import MAMBA2

_SMALL_MAMBA2 = {"state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 2, "chunk_size": 8}
FAMILIES = (
    Family(type="mamba2", changes=(RATES,), mixer="Mamba2Mixer", small=_SMALL_MAMBA2),
    Family(type="bamba", mixer="BambaMixer", small={**MAMBA2, "attn_layer_indices": [1]}),
    Family(type="falcon_h1", mixer="FalconH1Mixer", small={**MAMBA2, "mamba_d_ssm": 64}),
)
