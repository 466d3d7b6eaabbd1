"""The configuration of a GGUF file's model, as transformers has it for a checkpoint.

Most fields are the same metadata in all families; the others are the family's own. Transformers reads the files of some
families itself, except for their experts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, MixtralConfig, PreTrainedConfig

from oaiserve.engine.model.families import BY_ARCHITECTURE
from oaiserve.engine.model.families.gguf_metadata import Metadata, rope
from oaiserve.engine.text.gguf_head import without_vocabulary
from oaiserve.errors import StartupError
from oaiserve.files.bad_file import BadFile
from oaiserve.files.gguf import READ_BY_TRANSFORMERS, GgufTensor, architecture, read_tensors, read_values

# Fields of configurations, and the metadata that are all of each. A field whose metadata are missing has its default.
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


def read_config(path: Path) -> PreTrainedConfig:
    """Return the configuration of a file's model. Raises StartupError for missing metadata."""
    try:
        values, tensors = read_values(path), read_tensors(path)
        if architecture(values) in BY_ARCHITECTURE:
            return config_of(values, tensors)
        config = _with_experts(_of_transformers(path, architecture(values)), values, tensors)
        config.tie_word_embeddings = "output.weight" not in tensors  # transformers looks into the first file alone
        width = values.get(f"{architecture(values)}.attention.key_length")
        if width is not None and hasattr(config, "head_dim"):  # which it takes from its defaults for some types
            config.head_dim = width
        return config
    except BadFile as error:
        raise StartupError(f"'{path}' cannot be used: {error}.") from error


def config_of(values: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> PreTrainedConfig:
    """Return the configuration by metadata. Raises BadFile for a file without all required ones."""
    metadata = Metadata(values, tensors)
    family = BY_ARCHITECTURE[metadata.architecture]
    own = family.architectures[metadata.architecture](metadata)
    kind: Any = CONFIG_MAPPING[own.pop("model_type", family.type)]
    fields = {field: metadata.get(name) for field, name in _FIELDS.items()}
    fields |= {
        "vocab_size": metadata.vocab_size,
        "num_hidden_layers": metadata.num_layers,
        "rope_parameters": rope(metadata, metadata.head_dim),
        "attention_bias": metadata.has(r"attn_(q|qkv)\.bias$"),
        "attention_out_bias": metadata.has(r"attn_output\.bias$"),
        "mlp_bias": metadata.has(r"ffn_up\.bias$"),
        "use_bias": metadata.has(r"ffn_up\.bias$"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": metadata.token("eos"),
        "pad_token_id": metadata.token("padding"),
    }
    if (downs := metadata.shape(r"ffn_down_exps\.weight$")) is not None:
        fields["moe_intermediate_size"] = downs[-1]
    if (downs := metadata.shape(r"ffn_down_shexp\.weight$")) is not None:
        fields["shared_expert_intermediate_size"] = downs[-1]
    known = {field: value for field, value in fields.items() if value is not None and hasattr(kind, field)}
    if "head_dim" in known:
        known["head_dim"] = metadata.head_dim
    config: PreTrainedConfig = kind(**known | own)
    return config


def _of_transformers(path: Path, name: str | None) -> PreTrainedConfig:
    try:
        with without_vocabulary():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                path.parent, gguf_file=path.name, trust_remote_code=False
            )
    except ValueError as error:
        if "is not supported" not in str(error):
            raise
        known = ", ".join(sorted({*READ_BY_TRANSFORMERS, *BY_ARCHITECTURE}))
        raise BadFile(f"its architecture is '{name}', and those that can be read are {known}") from error
    return config


def _with_experts(config: PreTrainedConfig, values: dict[str, Any], tensors: dict[str, GgufTensor]) -> PreTrainedConfig:
    """Return a configuration with the metadata of experts that transformers does not read."""
    gates = tensors.get("blk.0.ffn_gate_exps.weight")
    if config.model_type in ("llama", "mistral") and gates is not None:
        sizes = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
        if (top_k := values.get("llama.expert_used_count")) is None:
            raise BadFile("it has no number llama.expert_used_count")
        return MixtralConfig(**sizes, num_local_experts=gates.shape[0], num_experts_per_tok=top_k)
    found = copy.deepcopy(config)
    for name, field in (("exps", "moe_intermediate_size"), ("shexp", "shared_expert_intermediate_size")):
        if (downs := tensors.get(f"blk.0.ffn_down_{name}.weight")) is not None and hasattr(config, field):
            setattr(found, field, downs.shape[-1])
    return found
