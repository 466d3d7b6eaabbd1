"""Encoders that GGUF files hold for embeddings and scores."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedConfig

from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata, windows
from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import Change, Order


def _bert(metadata: Metadata) -> Fields:
    types = metadata.shape(r"^token_types\.weight$")
    positions = metadata.shape(r"^position_embd\.weight$")
    fields = {"type_vocab_size": 1 if types is None else types[0], "hidden_act": "gelu"}
    return fields if positions is None else fields | {"max_position_embeddings": positions[0]}


def _jina_bert(metadata: Metadata) -> Fields:
    """Read the fields of BERT, and the names of what its layers have, which differs between its files."""
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
        # Tokens on each side, of both of which the file has the number.
        "sliding_window": metadata.get("attention.sliding_window", 2 * metadata["context_length"]) // 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", theta)},
        },
        "cls_token_id": metadata.token("bos"),
        "sep_token_id": metadata.token("eos"),
    }


def _third(config: PreTrainedConfig, name: str) -> Order:
    """Return the rows of queries, keys or values in a matrix of all three."""
    place = next(place for place, part in enumerate("qkv") if f".{part}_proj." in name)
    return np.arange(place * config.hidden_size, (place + 1) * config.hidden_size)


FAMILIES = (
    Family(type="bert", architectures={"bert": _bert, "jina-bert-v2": _jina_bert}, changes=()),
    Family(
        type="nomic_bert",
        architectures={"nomic-bert": _nomic_bert},
        changes=(Change(r"self_attn\.[qkv]_proj\.", rows=_third),),
        tensors=(
            (r"self_attn\.[qkv]_proj\.weight$", (("attn_qkv.weight",),)),
            (r"post_attention_layernorm\.weight$", (("attn_output_norm.weight",),)),
            (r"post_attention_layernorm\.bias$", (("attn_output_norm.bias",),)),
            (r"post_mlp_layernorm\.weight$", (("layer_output_norm.weight",),)),
            (r"post_mlp_layernorm\.bias$", (("layer_output_norm.bias",),)),
        ),
    ),
    Family(type="modernbert", architectures={"modern-bert": _modern_bert}, changes=()),
)
