"""Mamba 2, without attention; and beside attention: Bamba and Falcon-H1."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import RATES
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata
from oaiserve.engine.model.families.small_sizes import MAMBA2


def _mamba2(metadata: Metadata) -> Fields:
    return {
        "state_size": metadata["ssm.state_size"],
        "conv_kernel": metadata["ssm.conv_kernel"],
        "expand": metadata["ssm.inner_size"] // metadata["embedding_length"],
        "layer_norm_epsilon": metadata["attention.layer_norm_rms_epsilon"],
        "use_conv_bias": metadata.has(r"ssm_conv1d\.bias$"),
        "use_bias": metadata.has(r"ssm_(in|out)\.bias$"),
        "num_heads": metadata["ssm.time_step_rank"],
        "head_dim": metadata["ssm.inner_size"] // metadata["ssm.time_step_rank"],
        "n_groups": metadata["ssm.group_count"],
    }


_SMALL_MAMBA2 = {"state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 2, "chunk_size": 8}
FAMILIES = (
    Family(
        type="mamba2", architectures={"mamba2": _mamba2}, changes=(RATES,), mixer="Mamba2Mixer", small=_SMALL_MAMBA2
    ),
    Family(type="bamba", mixer="BambaMixer", small={**MAMBA2, "attn_layer_indices": [1]}),
    Family(
        type="falcon_h1",
        mixer="FalconH1Mixer",
        no_native_step="it multiplies what its matrices give by factors of its own",
        small={**MAMBA2, "mamba_d_ssm": 64},
    ),
)
