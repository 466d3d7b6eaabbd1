"""Reads the configurations of encoders for embeddings and scores from GGUF files."""

from __future__ import annotations

from oaiserve.engine.decoder.sources.gguf.architecture import Architecture
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata, windows


def _bert(metadata: Metadata) -> Fields:
    types = metadata.shape(r"^token_types\.weight$")
    positions = metadata.shape(r"^position_embd\.weight$")
    fields = {"type_vocab_size": 1 if types is None else types[0], "hidden_act": "gelu"}
    return fields if positions is None else fields | {"max_position_embeddings": positions[0]}


def _jina_bert(metadata: Metadata) -> Fields:
    """Read the fields of BERT, and the names of the parts of its layers, which differ between files."""
    start = "blk.0."
    parts = {name.removeprefix(start).rpartition(".")[0] for name in metadata.tensors if name.startswith(start)}
    widened = metadata.shape(r"^blk\.0\.ffn_up\.weight$")
    is_fused = widened is not None and widened[0] != metadata["feed_forward_length"]
    return _bert(metadata) | {"layer_parts": sorted(parts), "gates_are_in_ups": is_fused, "use_alibi": True}


def _nomic_bert(metadata: Metadata) -> Fields:
    return {"type_vocab_size": (metadata.shape(r"^token_types\.weight$") or (1,))[0]}


def _modern_bert(metadata: Metadata) -> Fields:
    act = metadata.get("hidden_act", "gelu")
    theta = metadata.get("rope.freq_base", 160000.0)
    every = metadata.get("attention.sliding_window_pattern", 3)
    layers = windows(metadata) or {
        "layer_types": [
            "sliding_attention" if layer % every else "full_attention" for layer in range(metadata.num_layers)
        ]
    }
    return layers | {
        "norm_eps": metadata["attention.layer_norm_epsilon"],
        "hidden_activation": act,
        # This setting counts the tokens on each side; the file's number is for both sides.
        "sliding_window": metadata.get("attention.sliding_window", 2 * metadata["context_length"]) // 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", theta)},
        },
        "cls_token_id": metadata.token("bos"),
        "sep_token_id": metadata.token("eos"),
    }


ENCODERS = {
    one.name: one
    for one in (
        Architecture(name="bert", type="bert", fields=_bert),
        Architecture(name="jina-bert-v2", type="bert", fields=_jina_bert),
        Architecture(name="nomic-bert", type="nomic_bert", fields=_nomic_bert),
        Architecture(name="modern-bert", type="modernbert", fields=_modern_bert),
    )
}
