"""Granite with and without experts, and its hybrid with Mamba 2. All scale the embedding, residuals and logits."""

from __future__ import annotations

from oaiserve.engine.decoder.sources.gguf.architecture import TURNED, Architecture
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata
from oaiserve.engine.decoder.sources.names import Names


def _fields(metadata: Metadata) -> Fields:
    return {
        "attention_multiplier": metadata.get("attention.scale", 1.0),
        "embedding_multiplier": metadata.get("embedding_scale", 1.0),
        "residual_multiplier": metadata.get("residual_scale", 1.0),
        "logits_scaling": metadata.get("logit_scale", 1.0),
    }


def _with_experts(metadata: Metadata) -> Fields:
    shared = metadata.get("expert_shared_feed_forward_length")
    if shared is None:
        kind = {}
    else:
        kind = {"model_type": "granitemoeshared", "shared_intermediate_size": shared}
    return _fields(metadata) | kind


def _hybrid(metadata: Metadata) -> Fields:
    heads = metadata.of_layers("attention.head_count_kv")
    shared = metadata.get("expert_shared_feed_forward_length", metadata.get("feed_forward_length"))
    return _fields(metadata) | {
        "mamba_d_conv": metadata["ssm.conv_kernel"],
        "mamba_d_state": metadata["ssm.state_size"],
        "mamba_n_groups": metadata["ssm.group_count"],
        "mamba_n_heads": metadata["ssm.time_step_rank"],
        "mamba_d_head": metadata["ssm.inner_size"] // metadata["ssm.time_step_rank"],
        "mamba_conv_bias": metadata.has(r"ssm_conv1d\.bias$"),
        "mamba_proj_bias": metadata.has(r"ssm_(in|out)\.bias$"),
        "num_key_value_heads": max(heads) or metadata["attention.head_count"],
        "layer_types": ["full_attention" if number else "linear_attention" for number in heads],
        "num_local_experts": metadata.get("expert_count", 0),
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned") else None,
        "mamba_expand": metadata["ssm.inner_size"] // metadata["embedding_length"],
    }


# The shared MLP's tensors; in models without experts, it is a layer's only MLP.
_SHARED: Names = {"shared.down": ("ffn_down_shexp", "ffn_down")}
_JOINED = {"shared.gate_up": (("ffn_gate_shexp", "ffn_up_shexp"), ("ffn_gate", "ffn_up"))}
ARCHITECTURES = (
    Architecture(name="granite", type="granite", fields=_fields, rows=TURNED),
    Architecture(name="granitemoe", type="granitemoe", fields=_with_experts, rows=TURNED, joined=_JOINED),
    Architecture(
        name="granitehybrid", type="granitemoehybrid", fields=_hybrid, names=_SHARED, rows=TURNED, joined=_JOINED
    ),
)
