"""Compares the settings in a config.json with those that its family has read, so that none is ignored by mistake."""

from __future__ import annotations

from typing import Any

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import Settings, default_of, known_keys

# Keys that say whether certain tensors exist, by the roles of these tensors.
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
    ("nemotron_h", "use_bias"),  # this one is for mixers
}
_WITHOUT_EFFECT_ON_MIXERS = {("nemotron_h", "mamba_proj_bias")}
_NORMS = ("use_qk_norm", "qk_layernorm")
_WITHOUT_WEIGHTS = {"llama4_text"}  # types whose norms of queries and keys have none
# The keys that at least one family computes with. A test compares them with what all families read.
EFFECTIVE = frozenset(
    {
        *("_remove_final_layer_norm", "activation_function", "activation_sparsity_pattern", "add_cross_attention"),
        *("altup_active_idx", "altup_correct_scale", "altup_num_inputs", "attention_chunk_size"),
        *("attention_in_multiplier", "attention_k_eq_v", "attention_multiplier", "attention_out_multiplier"),
        *("attn_layer_indices", "attn_logit_softcapping", "attn_scale", "attn_temperature_tuning", "block_ff_dim"),
        *("clip_qkv", "decoder_sparse_step", "dim_model_base", "do_layer_norm_before", "embedding_multiplier"),
        *("enable_moe_block", "expert_selection_fn", "final_logit_softcapping", "first_k_dense_replace", "floor_scale"),
        *("global_head_dim", "hidden_act", "hidden_activation", "hidden_size_per_layer_input"),
        *("hybrid_override_pattern", "interleave_moe_layer_step", "key_multiplier", "kv_lora_rank"),
        *("layer_norm_elementwise_affine", "layer_norm_eps", "layer_norm_epsilon", "layer_rope_theta", "layer_types"),
        *("linear_allow_neg_eigval", "linear_attn_config", "linear_head_dim", "linear_key_head_dim"),
        *("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"),
        *("lm_head_multiplier", "logit_scale", "logits_scaling", "mamba_d_head", "mamba_d_state", "mamba_head_dim"),
        *("mamba_hidden_act", "mamba_n_groups", "mamba_n_heads", "mamba_norm_before_gate", "mamba_num_heads"),
        *("mamba_rms_norm", "mla_use_nope", "mlp_hidden_act", "mlp_layer_types", "mlp_multipliers", "mlp_only_layers"),
        *("moe_k", "moe_latent_size", "moe_layer_end_index", "moe_layer_interval", "moe_layer_start_index"),
        *("moe_layers", "moe_norm_min", "moe_num_shared_experts", "moe_router_activation_func", "moe_topk"),
        *("multi_query", "n_group", "n_groups", "no_rope_layer_interval", "no_rope_layers", "norm_eps", "norm_epsilon"),
        *("norm_topk_prob", "num_dense_layers", "num_experts", "num_experts_per_tok", "num_global_key_value_heads"),
        *("num_heads", "num_kv_shared_layers", "num_local_experts", "num_shared_experts"),
        *("original_max_position_embeddings", "partial_rotary_factor", "per_layer_config", "position_embedding_type"),
        *("prefix_dense_sliding_window_pattern", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("query_pre_attn_scalar", "residual_multiplier", "rms_norm_eps", "rope_interleave", "rope_parameters"),
        *("rope_scaling", "rope_theta", "routed_scaling_factor", "scale_attn_by_inverse_layer_idx"),
        *("scale_attn_weights", "scale_depth", "scale_emb", "shared_intermediate_size", "sliding_window"),
        *("ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier", "ssm_state_size", "state_size", "swiglu_alpha"),
        *("swiglu_limit", "tie_embedding", "time_step_limit", "time_step_min", "time_step_rank", "top_k_experts"),
        *("topk_group", "topk_method", "use_attention_gate", "use_bidirectional_attention", "use_expert_bias"),
        *("use_parallel_residual", "use_sandwich_norm", "use_sliding_window", "v_head_dim"),
        *_FLAGS,
        *_FLAGS_OF_MLPS,
        *_FLAGS_OF_MIXERS,
        *_NORMS,
    }
)
# Tensors show how many experts there are, and rows of the embedding of layers, if layers have inputs of their own.
_COUNTED = frozenset(
    {"moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts", "vocab_size_per_layer_input"}
)
# Keys of any config.json, also by names in older files.
_OF_ALL_TYPES = frozenset(
    {
        *("architectures", "auto_map", "dtype", "id2label", "label2id", "model_type"),
        *("partial_rotary_factor", "quantization_config", "rope_local_base_freq"),
        *("tokenizer_class", "torch_dtype", "transformers_version"),
    }
)
# Values without an effect, though they are not 0, 1, false or null.
_NEUTRAL = {"do_layer_norm_before": True, "rope_theta": 10_000, "scale_attn_weights": True}
# Names of the same setting. Files state several of them, and each family reads one.
_SYNONYMS = (
    {"activation_function", "hidden_act", "hidden_activation"},
    {"first_k_dense_replace", "mlp_layer_types"},
    {"layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_eps"},
    {"num_attention_heads", "num_heads"},
)
_UNUSED = {"time_step_rank"}  # has a default that follows from other settings, but no layer computes with it


def refuse_ignored(settings: Settings) -> None:
    """Raise NotKnown for a key that the file states, that other families compute with, and that nothing has read."""
    for key in sorted(settings.stated.keys() & EFFECTIVE - settings.read - _COUNTED):
        value = settings.stated[key]
        if value != default_of(settings["model_type"], key) and not _is_without_effect(settings, key):
            raise NotKnown(f"its config.json sets {key} to {value!r}, which models of its type don't have")


def unknown(settings: Settings) -> list[str]:
    """Return the keys that the file states, but that nothing has read and no type is known to have.

    Those with an underscore in front are notes of the program that wrote the file.
    """
    known = known_keys() | _OF_ALL_TYPES | settings.read
    others = (key for key in settings.stated if key not in known and not key.startswith("_"))
    return sorted(key for key in others if not _is_neutral(settings.stated[key]))


def refuse_other_tensors(settings: Settings, layers: list[Reader], attending: list[Reader]) -> None:
    """Raise NotKnown if layers have tensors that the settings exclude, or lack those that they ask for.

    transformers makes its modules by the settings, and ignores tensors that these have no place for. `attending` are
    the layers with attention.
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
        return  # models of some types have biases though their files have such a key, which transformers doesn't read
    if bool(settings[key]) != has_tensors:
        has = "has such tensors" if has_tensors else "has no such tensors"
        raise NotKnown(f"its config.json sets {key} to {settings[key]!r}, but a layer {has}")


def _is_without_effect(settings: Settings, key: str) -> bool:
    """Return whether a stated key that nothing has read changes nothing."""
    value = settings.stated[key]
    if (settings["model_type"], key) in _WITHOUT_EFFECT:
        return True
    if key in _FLAGS | _FLAGS_OF_MLPS and default_of(settings["model_type"], key) is not None:
        return True  # it says which layers have biases, and so do their tensors
    has_other_name = any(key in names and names & settings.read for names in _SYNONYMS)
    return has_other_name or key in _UNUSED or _is_neutral(value) or value == _NEUTRAL.get(key)


def _is_neutral(value: Any) -> bool:
    """Return whether a setting has no effect at this value, judged without its name."""
    if isinstance(value, list):
        return all(kind == "full_attention" for kind in value)
    if isinstance(value, bool) or value is None or isinstance(value, dict):
        return not value
    return value in (0, 1)
