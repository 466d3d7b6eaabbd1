"""Nemotron, and Nemotron-H: a state, attention, experts or an MLP in each layer."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import NORMS_ADD_ONE, RATES, TURNED
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata
from oaiserve.engine.model.families.own_attention import hand_over


def _hybrid(metadata: Metadata) -> Fields:
    heads, widths = metadata.of_layers("attention.head_count_kv"), metadata.of_layers("feed_forward_length")
    is_mixture = [f"blk.{layer}.ffn_gate_inp.weight" in metadata.tensors for layer in range(len(heads))]
    has_mlp = [f"blk.{layer}.ffn_up.weight" in metadata.tensors for layer in range(len(heads))]
    kinds = [
        "full_attention" if of_keys else "moe" if mixture else "mlp" if mlp else "linear_attention"
        for of_keys, mixture, mlp in zip(heads, is_mixture, has_mlp, strict=True)
    ]
    inner = metadata.shape(r"ffn_up\.weight$")
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads) or metadata["attention.head_count"],
        "intermediate_size": max(widths) if inner is None else inner[0],
        "ssm_state_size": metadata["ssm.state_size"],
        "n_groups": metadata["ssm.group_count"],
        "mamba_num_heads": metadata["ssm.time_step_rank"],
        "mamba_head_dim": metadata["ssm.inner_size"] // metadata["ssm.time_step_rank"],
        "conv_kernel": metadata["ssm.conv_kernel"],
        "layer_norm_epsilon": metadata.get("attention.layer_norm_rms_epsilon")
        or metadata["attention.layer_norm_epsilon"],
        "moe_shared_expert_intermediate_size": metadata.get("expert_shared_feed_forward_length", 0),
        "moe_latent_size": metadata.get("moe_latent_size"),
        "use_conv_bias": metadata.has(r"ssm_conv1d\.bias$"),
        "attention_bias": metadata.has(r"attn_q\.bias$"),
        "mlp_bias": metadata.has(r"ffn_up\.bias$"),
        "use_bias": metadata.has(r"ssm_(in|out)\.bias$"),
        "norm_topk_prob": metadata.get("expert_weights_norm", False),
    }


_SMALL = {
    "num_hidden_layers": 5, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    "chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
}  # fmt: skip
FAMILIES = (
    Family(
        type="nemotron",
        architectures={"nemotron": lambda metadata: {"norm_eps": metadata["attention.layer_norm_epsilon"]}},
        changes=(NORMS_ADD_ONE,),
        attention={"NemotronAttention": hand_over},
    ),
    Family(
        type="nemotron_h",
        architectures={"nemotron_h": _hybrid, "nemotron_h_moe": _hybrid},
        changes=(TURNED, RATES),
        base="backbone",
        mixer="NemotronHMamba2Mixer",
        small=_SMALL,
    ),
)
