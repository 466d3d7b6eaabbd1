"""Dense models with unusual norms, or with norms in unusual places."""

from __future__ import annotations

from oaiserve.engine.decoder.sources.gguf.architecture import TURNED, Architecture
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata, rope, windows


def _exaone4(metadata: Metadata) -> Fields:
    slides = metadata.get("attention.sliding_window")
    return {"sliding_window": slides} | (
        windows(metadata) if slides else {"layer_types": ["full_attention"] * metadata.num_layers}
    )


def _gpt2(metadata: Metadata) -> Fields:
    return {
        "n_positions": metadata["context_length"],
        "n_embd": metadata["embedding_length"],
        "n_layer": metadata.num_layers,
        "n_head": metadata["attention.head_count"],
        "n_inner": metadata["feed_forward_length"],
    }


def _olmo2(metadata: Metadata) -> Fields:
    """Read the fields of OLMo 2, or of OLMo 3, which scales only the rotary tables of layers without a window."""
    if metadata.get("attention.sliding_window") is None:
        return {}
    of_full = rope(metadata, metadata.head_dim)
    of_windows = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", of_full["rope_theta"])}
    by_type = {"full_attention": of_full, "sliding_attention": of_windows}
    return {"model_type": "olmo3", "rope_parameters": by_type} | windows(metadata)


def _stablelm(metadata: Metadata) -> Fields:
    return {
        "use_qkv_bias": metadata.has(r"attn_q\.bias$"),
        "qk_layernorm": metadata.has("attn_q_norm"),
        "use_parallel_residual": metadata.get("use_parallel_residual", False),
        "partial_rotary_factor": metadata["rope.dimension_count"] / metadata.head_dim,
    }


ARCHITECTURES = (
    Architecture(name="command-r", type="cohere", fields=lambda metadata: {"use_qk_norm": metadata.has("attn_q_norm")}),
    Architecture(name="cohere2", type="cohere2"),
    Architecture(name="exaone4", type="exaone4", fields=_exaone4),
    Architecture(name="gpt2", type="gpt2", fields=_gpt2),
    Architecture(
        name="nemotron",
        type="nemotron",
        fields=lambda metadata: {"norm_eps": metadata["attention.layer_norm_epsilon"]},
    ),
    Architecture(
        name="olmo",
        type="olmo",
        fields=lambda metadata: {"clip_qkv": metadata.get("attention.clamp_kqv")},
        rows=TURNED,
    ),
    Architecture(name="olmo2", type="olmo2", fields=_olmo2),
    Architecture(name="stablelm", type="stablelm", fields=_stablelm),
    Architecture(name="starcoder2", type="starcoder2"),
)
