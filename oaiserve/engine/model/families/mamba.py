"""Mamba, Falcon-Mamba and Mamba 2, without attention; and beside attention: Jamba, Bamba, Falcon-H1 and Zamba 2."""

from __future__ import annotations

from typing import Any

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import RATES
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata, mamba2_beside_attention
from oaiserve.engine.model.families.own_attention import Handed
from oaiserve.engine.model.families.small_sizes import HEADS_FOR_EACH, MAMBA2


def _alone(metadata: Metadata) -> Fields:
    return {
        "state_size": metadata["ssm.state_size"],
        "conv_kernel": metadata["ssm.conv_kernel"],
        "expand": metadata["ssm.inner_size"] // metadata["embedding_length"],
        "layer_norm_epsilon": metadata["attention.layer_norm_rms_epsilon"],
        "use_conv_bias": metadata.has(r"ssm_conv1d\.bias$"),
        "use_bias": metadata.has(r"ssm_(in|out)\.bias$"),
    }


def _mamba(metadata: Metadata) -> Fields:
    kind = {"model_type": "falcon_mamba"} if metadata.get("ssm.dt_b_c_rms") else {}
    return _alone(metadata) | kind | {"time_step_rank": metadata["ssm.time_step_rank"]}


def _mamba2(metadata: Metadata) -> Fields:
    return _alone(metadata) | {
        "num_heads": metadata["ssm.time_step_rank"],
        "head_dim": metadata["ssm.inner_size"] // metadata["ssm.time_step_rank"],
        "n_groups": metadata["ssm.group_count"],
    }


def _falcon_h1(metadata: Metadata) -> Fields:
    """Read the fields of Falcon-H1. Its multipliers are part of the weights in a file."""
    return mamba2_beside_attention(metadata) | {
        "mamba_d_ssm": metadata["ssm.inner_size"],
        "mamba_rms_norm": metadata.has(r"ssm_norm\.weight$"),
        "mamba_norm_before_gate": False,
    }


def _number_layer(layer: Any, _: Any, __: Handed) -> bool:
    """Tell Zamba 2's attention the number of its layer, which its own code does in each call only."""
    layer.shared_transformer.self_attn.layer_idx = layer.mamba_decoder.layer_idx
    return False


_SMALL_MAMBA = {"state_size": 16, "time_step_rank": 16}
_SMALL_MAMBA2 = {"state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 2, "chunk_size": 8}
_SMALL_JAMBA = {
    "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4,
    "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_dt_rank": 16,
}  # fmt: skip
_SMALL = {
    **HEADS_FOR_EACH, "head_dim": None, "num_hidden_layers": 4, "mamba_d_state": 8, "n_mamba_heads": 4,
    "mamba_ngroups": 2, "chunk_size": 8, "use_mem_rope": True,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
}  # fmt: skip
FAMILIES = (
    Family(
        type="mamba",
        architectures={"mamba": _mamba},
        changes=(RATES,),
        mixer="MambaMixer",
        scans_from_zeros=True,
        small=_SMALL_MAMBA,
    ),
    Family(type="falcon_mamba", changes=(RATES,), mixer="FalconMambaMixer", scans_from_zeros=True, small=_SMALL_MAMBA),
    Family(
        type="mamba2", architectures={"mamba2": _mamba2}, changes=(RATES,), mixer="Mamba2Mixer", small=_SMALL_MAMBA2
    ),
    Family(type="jamba", mixer="JambaMambaMixer", scans_from_zeros=True, small=_SMALL_JAMBA),
    Family(type="bamba", mixer="BambaMixer", small={**MAMBA2, "attn_layer_indices": [1]}),
    Family(
        type="falcon_h1",
        architectures={"falcon-h1": _falcon_h1},
        changes=(RATES,),
        mixer="FalconH1Mixer",
        small={**MAMBA2, "mamba_d_ssm": 64},
    ),
    Family(
        type="zamba2",
        mixer="Zamba2MambaMixer",
        attention={"Zamba2HybridLayer": _number_layer},
        no_native_step="its layers share blocks of attention, which read the embedding, too",
        small=_SMALL,
    ),
)
