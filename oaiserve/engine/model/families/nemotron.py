"""Nemotron, and Nemotron-H: a state, attention, experts or an MLP in each layer."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import NORMS_ADD_ONE
from oaiserve.engine.model.families.own_attention import hand_over

_SMALL = {
    "num_hidden_layers": 5, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    "chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
}  # fmt: skip
FAMILIES = (
    Family(type="nemotron", changes=(NORMS_ADD_ONE,), attention={"NemotronAttention": hand_over}),
    Family(type="nemotron_h", mixer="NemotronHMamba2Mixer", small=_SMALL),
)
