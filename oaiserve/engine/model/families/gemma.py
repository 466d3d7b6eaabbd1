"""Gemma: norms that store their weight minus 1; from Gemma 3n on, inputs of layers and caches that layers share."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import NORMS_ADD_ONE
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata, no_fields, windows
from oaiserve.engine.model.families.small_sizes import SHARED_KEYS


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
        "vocab_size_per_layer_input": (metadata.shape(r"^per_layer_token_embd") or (metadata.vocab_size,))[0],
        "enable_moe_block": metadata.has("ffn_gate_inp"),
        "top_k_experts": metadata.get("expert_used_count"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": metadata["rope.freq_base"],
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", 1e4)},
        },
    }


def _embedding(metadata: Metadata) -> Fields:
    """Read the fields of EmbeddingGemma, whose tokens see those after them."""
    every = metadata.get("attention.sliding_window_pattern", 6)
    theta = {"full_attention": metadata["rope.freq_base"], "sliding_attention": metadata.get("rope.freq_base_swa", 1e4)}
    layers = windows(metadata) or {
        "layer_types": [
            "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(metadata.num_layers)
        ]
    }
    return layers | {
        "use_bidirectional_attention": True,
        "query_pre_attn_scalar": metadata.head_dim,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in theta.items()},
    }


_SMALL = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 6,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97, "enable_moe_block": True, "num_experts": 4,
    "top_k_experts": 2, "moe_intermediate_size": 16,
}  # fmt: skip
FAMILIES = (
    Family(type="gemma", architectures={"gemma": no_fields}, changes=(NORMS_ADD_ONE,)),
    Family(type="gemma2", changes=(NORMS_ADD_ONE,), small={"query_pre_attn_scalar": 8}),
    Family(
        type="gemma3_text",
        architectures={"gemma-embedding": _embedding},
        changes=(NORMS_ADD_ONE,),
        small={"query_pre_attn_scalar": 8},
    ),
    Family(
        type="gemma3n_text",
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
