"""DeepSeek V2 and V3, with latent attention. GLM-4.7 Flash and Kimi K2 use the same files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oaiserve.engine.decoder.sources.gguf.architecture import Architecture
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata, rope


def _fields(metadata: Metadata) -> Fields:
    rotated = metadata["rope.dimension_count"]
    width = metadata.get("attention.key_length_mla")
    values = metadata.get("attention.value_length_mla")
    if width is None or values is None:  # Older files have the widths of heads in these keys.
        width = metadata["attention.key_length"]
        values = metadata["attention.value_length"]
    has_bias = metadata.has(r"exp_probs_b")
    own_rope = rope(metadata, head_dim=rotated)
    if (log_factor := metadata.get("rope.scaling.yarn_log_multiplier")) is not None:
        own_rope |= dict.fromkeys(("mscale", "mscale_all_dim"), round(log_factor * 10, 6))
    groups = metadata.get("expert_group_count", 1)
    kind = {"model_type": "deepseek_v3"}
    if not has_bias:
        kind = {"model_type": "deepseek_v2", "topk_method": "greedy" if groups == 1 else "group_limited_greedy"}
    return {
        **kind,
        "num_key_value_heads": metadata["attention.head_count"],
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": values,
        "kv_lora_rank": metadata["attention.kv_lora_rank"],
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "rope_parameters": own_rope,
        "norm_topk_prob": metadata.get("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": metadata.get("expert_group_used_count", 1),
    }


def _of_latent(tensors: Sequence[Tensor]) -> Tensor:
    """Join the two tensors that compute keys and values from latent vectors. Each head's key matrix is transposed."""
    keys, values = tensors
    return torch.cat([keys.mT, values], dim=1).flatten(0, 1)


ARCHITECTURES = (
    Architecture(
        name="deepseek2",
        type="deepseek_v2",
        fields=_fields,
        joined={"kv_up": (("attn_k_b", "attn_v_b"),)},
        make={"kv_up": _of_latent},
    ),
)
