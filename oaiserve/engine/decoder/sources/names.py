"""The names of tensors in files on the hub, by their roles in a decoder.

A path such as `layers.3.experts.7.gate` has a role, `experts.{}.gate`, and the numbers of a layer and of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# For each role, the name of its module in transformers, and perhaps other names in files.
Names = Mapping[str, str | tuple[str, ...]]

_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")
# The names that most families use. Names within a layer are relative to the layer's name.
LLAMA: Names = {
    "embedding": "model.embed_tokens",
    "layers.{}": "model.layers.{}",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "qkv": "self_attn.qkv_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "q_down": "self_attn.q_a_proj",
    "q_down_norm": "self_attn.q_a_layernorm",
    "q_up": "self_attn.q_b_proj",
    "kv_down": "self_attn.kv_a_proj_with_mqa",
    "kv_down_norm": "self_attn.kv_a_layernorm",
    "kv_up": "self_attn.kv_b_proj",
    "sinks": "self_attn.sinks",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "choice_bias": "mlp.gate.e_score_correction_bias",
    "experts.gate_up": "mlp.experts.gate_up_proj",
    "experts.down": "mlp.experts.down_proj",
    "experts.{}.gate": "mlp.experts.{}.gate_proj",
    "experts.{}.up": "mlp.experts.{}.up_proj",
    "experts.{}.down": "mlp.experts.{}.down_proj",
    "shared.gate": "mlp.shared_experts.gate_proj",
    "shared.up": "mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
}


def split_path(path: str) -> tuple[str, list[str]]:
    """Split a path into its role, with `{}` for each number, and the numbers."""
    return _NUMBER.sub(".{}", path), _NUMBER.findall(path)


def names_of(path: str, names: Names) -> tuple[str, ...]:
    """Return the names of a module by its path; an empty tuple for a role that the family does not have."""
    role, numbers = split_path(path)
    layer, is_in_layer, inner = role.partition("layers.{}.")
    choices = names.get(inner if is_in_layer else layer)
    if choices is None:
        return ()
    if is_in_layer:
        prefixes = [f"{layers}." for layers in _all(names["layers.{}"])]
    else:
        prefixes = [""]
    return tuple(f"{prefix}{choice}".format(*numbers) for prefix in prefixes for choice in _all(choices))


def _all(choices: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(choices, str):
        return (choices,)
    return choices
