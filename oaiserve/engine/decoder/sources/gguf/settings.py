"""Derives the settings of a GGUF file's model, in the form of a config.json, from its metadata.

Most keys are the same in all architectures; each architecture adds the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oaiserve.checkpoints.gguf import GgufTensor
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.settings import Settings, keys_of, settings_of
from oaiserve.engine.decoder.sources.gguf.architectures import ARCHITECTURES
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata, rope

# Keys of a config.json, and the metadata that hold their values. A key whose metadata are missing gets its default.
_FIELDS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "logit_scale": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "conv_L_cache": "shortconv.l_cache",
}


def settings_of_gguf(values: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> Settings:
    """Return the settings that follow from a file's metadata and tensors.

    Raises NotKnown for an unknown architecture, and BadFile if required metadata are missing.
    """
    metadata = Metadata(values, tensors)
    if metadata.architecture not in ARCHITECTURES:
        raise NotKnown(f"the architecture of its GGUF file is '{metadata.architecture[:100]}'")
    architecture = ARCHITECTURES[metadata.architecture]
    own = architecture.fields(metadata)
    name = own.pop("model_type", architecture.type)
    keys = keys_of(name) | {"head_dim"}  # Types that don't list it use it, too.
    known = {key: value for key, value in common_fields(metadata).items() if key in keys}
    return settings_of({"model_type": name, **known, **own})


def common_fields(metadata: Metadata) -> Fields:
    """Return the fields of a config.json that all architectures share. Each type uses some of them."""
    fields = {field: metadata.get(name) for field, name in _FIELDS.items()}
    fields |= {
        "vocab_size": metadata.vocab_size,
        "num_hidden_layers": metadata.num_layers,
        "rope_parameters": rope(metadata, metadata.head_dim),
        "attention_bias": metadata.has(r"attn_(q|qkv)\.bias$"),
        "attention_out_bias": metadata.has(r"attn_output\.bias$"),
        "mlp_bias": metadata.has(r"ffn_up\.bias$"),
        "use_bias": metadata.has(r"ffn_up\.bias$"),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": metadata.token("eos"),
        "pad_token_id": metadata.token("padding"),
    }
    if (downs := metadata.shape(r"ffn_down_exps\.weight$")) is not None:
        fields["moe_intermediate_size"] = downs[-1]
    if (downs := metadata.shape(r"ffn_down_shexp\.weight$")) is not None:
        fields["shared_expert_intermediate_size"] = downs[-1]
    return {field: value for field, value in fields.items() if value is not None}
