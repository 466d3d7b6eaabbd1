"""Gemma: norms that store their weight minus 1; from Gemma 3n on, inputs of layers and caches that layers share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import NORMS_ADD_ONE, Change
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata, no_fields, windows
from oaiserve.engine.model.families.small_sizes import SHARED_KEYS


def _gemma3n(metadata: Metadata) -> Fields:
    sparsity = metadata["activation_sparsity_scale"]
    return windows(metadata) | {
        "intermediate_size": metadata.of_layers("feed_forward_length"),
        "num_kv_shared_layers": metadata["attention.shared_kv_layers"],
        "altup_num_inputs": metadata["altup.num_inputs"],
        "altup_active_idx": metadata["altup.active_idx"],
        "hidden_size_per_layer_input": metadata["embedding_length_per_layer_input"],
        "vocab_size_per_layer_input": _layer_inputs(metadata, 0),
        "laurel_rank": (metadata.shape(r"laurel_l\.weight$") or (64,))[0],
        # The file has what a normal distribution's inverse makes of the part of a layer's gates that are 0.
        "activation_sparsity_pattern": [
            0.5 * math.erfc(-scale / math.sqrt(2)) if math.isfinite(scale) else 0.0 for scale in sparsity
        ],
        "rope_parameters": _rope_by_layer(metadata, {"rope_type": "default"}),
    }


def _gemma4(metadata: Metadata) -> Fields:
    """Read the fields of Gemma 4. Of wide heads, a quarter is rotated in all published models."""
    slides = metadata.of_layers("attention.sliding_window_pattern")
    heads, widths = metadata.of_layers("attention.head_count_kv"), metadata.of_layers("feed_forward_length")
    shared = metadata.get("attention.shared_kv_layers", 0)
    wide = [layer for layer, own in enumerate(slides) if not own]
    with_values = [layer for layer in wide if layer < metadata.num_layers - shared]
    of_windows = [number for number, own in zip(heads, slides, strict=True) if own] or heads
    return windows(metadata) | {
        "head_dim": metadata["attention.key_length_swa"],
        "global_head_dim": metadata["attention.key_length"],
        "num_key_value_heads": of_windows[0],
        "num_global_key_value_heads": heads[wide[0]] if wide else None,
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in metadata.tensors for layer in with_values),
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": metadata.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": _layer_inputs(metadata, metadata.vocab_size),
        "enable_moe_block": metadata.has("ffn_gate_inp"),
        "top_k_experts": metadata.get("expert_used_count"),
        "rope_parameters": _rope_by_layer(metadata, {"rope_type": "proportional", "partial_rotary_factor": 0.25}),
    }


def _layer_inputs(metadata: Metadata, default: int) -> int:
    """Return the number of tokens with inputs of layers."""
    table = metadata.shape(r"^per_layer_token_embd")
    return default if table is None else table[0]


def _rope_by_layer(metadata: Metadata, of_all: Fields) -> Fields:
    return {
        "full_attention": of_all | {"rope_theta": metadata["rope.freq_base"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", 1e4)},
    }


def _one_of_stacked(config: Any, name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the matrix of a parameter's own number, of those that a file has as one tensor."""
    return tensors[0][int(name.split(".")[-2])]


_SMALL = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 6,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97, "enable_moe_block": True, "num_experts": 4,
    "top_k_experts": 2, "moe_intermediate_size": 16,
}  # fmt: skip
FAMILIES = (
    Family(type="gemma", architectures={"gemma": no_fields}, changes=(NORMS_ADD_ONE,)),
    Family(type="gemma2", weights_by_transformers=True, changes=(NORMS_ADD_ONE,), small={"query_pre_attn_scalar": 8}),
    Family(
        type="gemma3_text", weights_by_transformers=True, changes=(NORMS_ADD_ONE,), small={"query_pre_attn_scalar": 8}
    ),
    Family(
        type="gemma3n_text",
        architectures={"gemma3n": _gemma3n},
        changes=(Change(r"altup_(unembed_)?projections\.", joined=_one_of_stacked),),
        tensors=(
            (r"correct_output_scale$", (("altup_correct_scale.weight",),)),
            (r"altup_projections\.\d+\.weight$", (("altup_proj.weight",),)),
            (r"altup_unembed_projections\.\d+\.weight$", (("altup_unembd_proj.weight",),)),
        ),
        no_native_step="it has several hidden states of a token (AltUp)",
        small={**SHARED_KEYS, "laurel_rank": 16, "altup_num_inputs": 2},
    ),
    Family(
        type="gemma4_text",
        architectures={"gemma4": _gemma4},
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
