"""Compares the settings in a config.json with those that its family has read, to find any that would be ignored."""

from __future__ import annotations

from functools import cache
from typing import Any

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import Settings, default_of, known_keys, table

# Keys that say whether tensors exist, with the roles of these tensors.
_BIASES = ("q", "k", "v", "qkv", "q_down", "kv_down")
_FLAGS = {
    "attention_bias": _BIASES,
    "qkv_bias": _BIASES,
    "use_qkv_bias": _BIASES,
    "attention_out_bias": ("out",),
    "enable_bias": (*_BIASES, "out", "up", "down"),
    "use_bias": (*_BIASES, "out", "up", "down"),
}
_FLAGS_OF_MLPS = {"mlp_bias": ("up", "down", "gate_up", "shared.up")}
_FLAGS_OF_MIXERS = {
    "conv_bias": ("conv",),
    "mamba_conv_bias": ("conv",),
    "mamba_proj_bias": ("in",),
    "projectors_bias": ("out",),
    "use_bias": ("in",),
    "use_conv_bias": ("conv",),
}
_WITHOUT_EFFECT = {
    ("deepseek_v2", "norm_topk_prob"),
    ("glm_ocr_text", "attention_bias"),
    ("nemotron_h", "attention_bias"),
    ("nemotron_h", "use_bias"),  # In this family, the key is for mixers.
}
_WITHOUT_EFFECT_ON_MIXERS = {("nemotron_h", "mamba_proj_bias")}
_NORMS = ("use_qk_norm", "qk_layernorm")
_WITHOUT_WEIGHTS = {"llama4_text"}  # The query and key norms of these types have no weights.
# Keys of the table that no family needs to read: tensors show their values, other keys follow from them, or all types
# have them.
_SHOWN = {
    *("block_auto_adjust_ff_dim", "conv_L_cache", "conv_kernel", "eos_token_id", "expand", "full_attn_idxs"),
    *("head_dim", "hidden_size", "intermediate_size", "layers_block_type", "linear_conv_kernel_dim", "mamba_d_conv"),
    *("mamba_d_ssm", "mamba_expand", "max_position_embeddings", "max_window_layers", "moe_intermediate_size"),
    *("moe_num_experts", "mtp_layers_block_type", "n_embd", "n_head", "n_inner", "n_layer", "n_positions"),
    *("n_routed_experts", "n_shared_experts", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    *("num_mtp_layers", "num_nextn_predict_layers", "pad_token_id", "sep_token_id"),
    *("shared_expert_combination_strategy", "shared_expert_intermediate_size", "sliding_window_pattern"),
    *("tie_word_embeddings", "use_double_wide_mlp", "vocab_size", "vocab_size_per_layer_input"),
    "word_embed_proj_dim",
}
# Keys that families read but the table doesn't have: older names, and settings that the config classes write but don't
# read.
_UNLISTED = {
    *("block_ff_dim", "global_head_dim", "hybrid_override_pattern", "linear_attn_config", "mla_use_nope"),
    *("moe_router_activation_func", "num_global_key_value_heads", "partial_rotary_factor", "per_layer_config"),
    "tie_embedding",
}
# Counts that the shapes of tensors also show: numbers of experts, and rows of the embedding for per-layer inputs.
_COUNTED = frozenset(
    {"moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts", "vocab_size_per_layer_input"}
)
# Keys of every config.json, including their names in older files.
_OF_ALL_TYPES = frozenset(
    {
        *("architectures", "auto_map", "dtype", "id2label", "label2id", "model_type"),
        *("partial_rotary_factor", "quantization_config", "rope_local_base_freq"),
        *("tokenizer_class", "torch_dtype", "transformers_version"),
    }
)
# Values that have no effect, in addition to 0, 1, false and null.
_NEUTRAL = {"do_layer_norm_before": True, "rope_theta": 10_000, "scale_attn_weights": True}
# Synonyms: a file may use several names for a setting, and each family reads one of them.
_SYNONYMS = (
    {"activation_function", "hidden_act", "hidden_activation"},
    {"first_k_dense_replace", "mlp_layer_types"},
    {"layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_eps"},
    {"num_attention_heads", "num_heads"},
)
_UNUSED = {"time_step_rank"}  # its default follows from other settings, but no layer computes with it


@cache
def effective() -> frozenset[str]:
    """Return the keys that at least one family computes with."""
    keys = {key for row in table()["types"].values() for key in row["keys"]}
    return frozenset(keys - _SHOWN | _UNLISTED)


def refuse_ignored(settings: Settings) -> None:
    """Raise NotKnown for a key in the file that other families compute with but that nothing has read."""
    for key in sorted(settings.stated.keys() & effective() - settings.read - _COUNTED):
        value = settings.stated[key]
        if value != default_of(settings["model_type"], key) and not _is_without_effect(settings, key):
            raise NotKnown(f"its config.json sets {key} to {value!r}, which models of its type don't have")


def unknown(settings: Settings) -> list[str]:
    """Return the keys in the file that nothing has read and that no known type has.

    Keys with a leading underscore are notes of the program that wrote the file.
    """
    known = known_keys() | _OF_ALL_TYPES | settings.read
    others = (key for key in settings.stated if key not in known and not key.startswith("_"))
    return sorted(key for key in others if not _is_neutral(settings.stated[key]))


def refuse_other_tensors(settings: Settings, layers: list[Reader], attending: list[Reader]) -> None:
    """Raise NotKnown if layers have tensors that the settings exclude, or lack tensors that the settings require.

    transformers makes modules from the settings, and ignores tensors without a module. `attending` are the layers with
    attention.
    """
    for flags, parts in ((_FLAGS, attending), (_FLAGS_OF_MLPS, layers)):
        for key, roles in flags.items():
            if (settings["model_type"], key) not in _WITHOUT_EFFECT:
                _compare_biases(settings, key, parts, roles)
    mixers = [layer.at("mixer") for layer in layers]
    for key, roles in _FLAGS_OF_MIXERS.items():
        if (settings["model_type"], key) not in _WITHOUT_EFFECT_ON_MIXERS:
            _compare_biases(settings, key, mixers, roles)
    first = _first_with(attending, _BIASES)
    for key in _NORMS:
        if key in settings and first is not None and settings["model_type"] not in _WITHOUT_WEIGHTS:
            _compare(settings, key, first.has("q_norm"))


def _compare_biases(settings: Settings, key: str, parts: list[Reader], roles: tuple[str, ...]) -> None:
    part = _first_with(parts, roles) if key in settings else None
    if part is not None:
        _compare(settings, key, any(part.has_bias(role) for role in roles))


def _first_with(parts: list[Reader], roles: tuple[str, ...]) -> Reader | None:
    return next((part for part in parts if any(part.has(role) for role in roles)), None)


def _compare(settings: Settings, key: str, has_tensors: bool) -> None:
    is_known = default_of(settings["model_type"], key) is not None
    if not settings[key] and not is_known:
        return  # Some types have biases although their files have such a key. transformers doesn't read it.
    if bool(settings[key]) != has_tensors:
        has = "has such tensors" if has_tensors else "has no such tensors"
        raise NotKnown(f"its config.json sets {key} to {settings[key]!r}, but a layer {has}")


def _is_without_effect(settings: Settings, key: str) -> bool:
    """Return whether ignoring a key of the file makes no difference. Nothing has read the key."""
    value = settings.stated[key]
    if (settings["model_type"], key) in _WITHOUT_EFFECT:
        return True
    if key in _FLAGS | _FLAGS_OF_MLPS and default_of(settings["model_type"], key) is not None:
        return True  # The key says which layers have biases, but so do their tensors.
    has_other_name = any(key in names and names & settings.read for names in _SYNONYMS)
    return has_other_name or key in _UNUSED or _is_neutral(value) or value == _NEUTRAL.get(key)


def _is_neutral(value: Any) -> bool:
    """Return whether a setting with this value has no effect, judged by the value alone."""
    if isinstance(value, list):
        return all(kind == "full_attention" for kind in value)
    if isinstance(value, bool) or value is None or isinstance(value, dict):
        return not value
    return value in (0, 1)
