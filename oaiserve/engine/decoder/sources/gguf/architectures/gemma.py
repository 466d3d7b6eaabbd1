"""Gemma. In its files, 1 has already been added to the weights of norms."""

from __future__ import annotations

from oaiserve.engine.decoder.sources.gguf.architecture import Architecture
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata, rope, windows
from oaiserve.engine.decoder.sources.names import Names


def _scale(metadata: Metadata, layers_of_27b: int) -> Fields:
    """Return the scale of scores. Files don't state it: the 27B models have their own, and all others use 256."""
    if metadata.num_layers != layers_of_27b:
        return {}
    return {"query_pre_attn_scalar": metadata["embedding_length"] // metadata["attention.head_count"]}


def _gemma2(metadata: Metadata) -> Fields:
    return _scale(metadata, 46)


def _gemma3(metadata: Metadata) -> Fields:
    """Read the fields of Gemma 3. The factors of its rotary tables are only for layers without a window."""
    own = rope(metadata, metadata.head_dim)
    if own["rope_type"] == "default":
        scaling = None
    else:
        scaling = {"rope_type": own["rope_type"], "factor": own["factor"]}
    return (
        _scale(metadata, 62)
        | windows(metadata)
        | {
            "rope_parameters": None,
            "rope_theta": metadata.get("rope.freq_base", 1e6),
            "rope_local_base_freq": metadata.get("rope.freq_base_swa", 1e4),
            "rope_scaling": scaling,
        }
    )


def _gemma4(metadata: Metadata) -> Fields:
    """Read the fields of Gemma 4. All published models rotate a quarter of the numbers in wide heads."""
    slides = metadata.of_layers("attention.sliding_window_pattern")
    heads = metadata.of_layers("attention.head_count_kv")
    widths = metadata.of_layers("feed_forward_length")
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
    """Read the fields of EmbeddingGemma, whose tokens also see later tokens."""
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


_GEMMA4: Names = {
    "factor": "layer_output_scale.weight",
    "layer_embedding": "per_layer_token_embd",
    "layer_projection": "per_layer_model_proj",
    "layer_projection_norm": "per_layer_proj_norm",
    "input_gate": "inp_gate",
    "input_projection": "proj",
    "input_norm": "post_norm",
    "shared.gate": "ffn_gate",
    "shared.up": "ffn_up",
    "shared.down": "ffn_down",
    "shared_out_norm": "post_ffw_norm_1",
    "router_scale": "ffn_gate_inp.scale",
    "router_factors": "ffn_down_exps.scale",
    "experts_norm": "pre_ffw_norm_2",
    "experts_out_norm": "post_ffw_norm_2",
}
ARCHITECTURES = (
    Architecture(name="gemma", type="gemma"),
    Architecture(name="gemma2", type="gemma2", fields=_gemma2),
    Architecture(name="gemma3", type="gemma3_text", fields=_gemma3),
    Architecture(name="gemma-embedding", type="gemma3_text", fields=_embedding),
    Architecture(name="gemma4", type="gemma4_text", fields=_gemma4, names=_GEMMA4, unused=("rope_freqs.weight",)),
)
