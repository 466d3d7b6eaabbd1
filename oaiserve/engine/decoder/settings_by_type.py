"""Derives settings of a text model from others, as its type requires."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Values = dict[str, Any]

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
LAYER_TYPES = {"attention": FULL, "mamba": LINEAR}  # keyed by the names in older files
_NEMOTRON_H_LAYERS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}  # keyed by their letters in a pattern
_NEMOTRON_H_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
KIMI_LINEAR_KEYS = {  # Values are the names in `linear_attn_config`.
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
_QWEN2 = ("qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text")


def _types(of_layer: Callable[[Values, int], str]) -> Callable[[Values], None]:
    """Make a rule that sets the type of each layer if the file doesn't."""

    def rule(values: Values) -> None:
        if values.get("layer_types") is None:
            values["layer_types"] = [of_layer(values, layer) for layer in range(values["num_hidden_layers"])]

    return rule


def _full_every(key: str, default: int, others: str = SLIDING, *, first: int = 1) -> Callable[[Values], None]:
    """Give every n-th layer full attention. A file may set another n under `key`; with 0 or null, no layer has it."""

    def of_layer(values: Values, layer: int) -> str:
        every = values.get(key, default)
        if every == 0 or (layer + first) % every:
            return others
        return FULL

    return _types(of_layer)


def _first_rule_then(*rules: Callable[[Values], None]) -> Callable[[Values], None]:
    def rule(values: Values) -> None:
        for one in rules:
            one(values)

    return rule


def _windows_if_used(unused: int | None) -> Callable[[Values], None]:
    def rule(values: Values) -> None:
        if not values["use_sliding_window"]:
            values["sliding_window"] = unused

    return rule


def _or(key: str, value: Callable[[Values], Any]) -> Callable[[Values], None]:
    """Make a rule that sets a key to this value if it is missing or null."""

    def rule(values: Values) -> None:
        if values.get(key) is None:
            values[key] = value(values)

    return rule


def _renamed(old: str, key: str) -> Callable[[Values], None]:
    def rule(values: Values) -> None:
        if (value := values.pop(old, ...)) is not ...:
            values[key] = value

    return rule


def _windows_from(key: str) -> Callable[[Values], None]:
    """Give layers a window, starting with layer `values[key]`, if the model has windows."""
    return _types(lambda v, layer: SLIDING if v["sliding_window"] is not None and layer >= v[key] else FULL)


def _gemma(values: Values) -> None:
    if values["hidden_act"] == "gelu":  # In these files, "gelu" means its tanh approximation.
        values["hidden_act"] = "gelu_pytorch_tanh"


def _gemma3(values: Values) -> None:
    if values["use_bidirectional_attention"]:
        values["sliding_window"] = values["sliding_window"] // 2 + 1
    _full_every("sliding_window_pattern", 6)(values)


def _gemma4(values: Values) -> None:
    if values["use_bidirectional_attention"] == "all":
        values["sliding_window"] = values["sliding_window"] // 2 + 1
    _full_every("", 6)(values)
    if values["layer_types"]:
        values["layer_types"][-1] = FULL
    values.setdefault("global_head_dim", 512)
    if values.get("attention_k_eq_v", True):
        own = values.get("num_global_key_value_heads")
    else:
        own = None
    if values.get("per_layer_config"):  # newer files have an entry per layer number here, instead of both lists
        of_layer = values["per_layer_config"].get(str(values["layer_types"].index(FULL)), {})
        values["global_head_dim"] = of_layer.get("head_dim", values["head_dim"])
        own = of_layer.get("num_key_value_heads")
    values["num_global_key_value_heads"] = own or values["num_key_value_heads"]


def _exaone4(values: Values) -> None:
    if values["sliding_window"] is None:
        values["sliding_window_pattern"] = 0
    _full_every("sliding_window_pattern", 4)(values)


def _smollm3(values: Values) -> None:
    every = values["no_rope_layer_interval"]
    _or("no_rope_layers", lambda v: [int((i + 1) % every != 0) for i in range(v["num_hidden_layers"])])(values)
    has_windows = values["use_sliding_window"] and values["sliding_window"] is not None
    _types(lambda v, i: SLIDING if has_windows and not v["no_rope_layers"][i] else FULL)(values)


def _ernie_moe(values: Values) -> None:
    if values["moe_layer_end_index"] == -1:
        values["moe_layer_end_index"] = values["num_hidden_layers"] - 1


def _olmo_hybrid(values: Values) -> None:
    missing = values.get("layer_types") is None
    heads = values["num_attention_heads"]
    _full_every("", 4, LINEAR)(values)
    if missing and FULL not in values["layer_types"]:
        values["layer_types"][-1] = FULL
    for kind in ("key", "value"):
        _or(f"linear_num_{kind}_heads", lambda _: heads)(values)
    _or("linear_key_head_dim", lambda v: int(0.75 * v["hidden_size"] / v["linear_num_key_heads"]))(values)
    _or("linear_value_head_dim", lambda v: 2 * v["linear_key_head_dim"])(values)


def _mamba_heads(values: Values) -> None:
    if values["mamba_d_head"] == "auto":
        values["mamba_d_head"] = values["mamba_expand"] * values["hidden_size"] // values["mamba_n_heads"]


def _bamba(values: Values) -> None:
    _mamba_heads(values)
    attend = values["attn_layer_indices"] or ()
    values["layer_types"] = [FULL if i in attend else LINEAR for i in range(values["num_hidden_layers"])]


def _mamba2(values: Values) -> None:
    values["layer_types"] = [LINEAR] * values["num_hidden_layers"]
    if values["time_step_rank"] == "auto":
        values["time_step_rank"] = math.ceil(values["hidden_size"] / 16)


def _lfm2(values: Values) -> None:
    if values.get("layer_types") is None:
        _or("full_attn_idxs", lambda v: list(range(v["num_hidden_layers"])))(values)
        attend = values["full_attn_idxs"]
        values["layer_types"] = [FULL if i in attend else "conv" for i in range(values["num_hidden_layers"])]
    _renamed("tie_embedding", "tie_word_embeddings")(values)
    _renamed("block_ff_dim", "intermediate_size")(values)


def _falcon_h1(values: Values) -> None:
    if values["mamba_d_head"] == "auto":
        numbers = values["mamba_d_ssm"]
        if numbers is None:
            numbers = values["mamba_expand"] * values["hidden_size"]
        values["mamba_d_head"] = numbers // values["mamba_n_heads"]
    _or("mlp_multipliers", lambda _: [1.0] * 2)(values)
    _or("ssm_multipliers", lambda _: [1.0] * 5)(values)
    values["layer_types"] = ["hybrid"] * values["num_hidden_layers"]


def _nemotron_h(values: Values) -> None:
    for old, key in _NEMOTRON_H_KEYS.items():
        _renamed(old, key)(values)
    kinds = values["layers_block_type"]
    pattern = values.get("hybrid_override_pattern")
    if kinds is None:
        kinds = [_NEMOTRON_H_LAYERS[one] for one in pattern or "ME*-"]
    values["layers_block_type"] = [LAYER_TYPES.get(kind, kind) for kind in kinds]
    values["num_hidden_layers"] = len(kinds)
    _or("mtp_layers_block_type", lambda _: [FULL, "moe"])(values)


def _lfm3_layer(_: Values, layer: int) -> str:
    if layer % 4 == 2:
        return FULL
    if layer % 4 == 0 and layer > 0:
        return SLIDING
    return "conv"


def _cohere2_moe(values: Values) -> None:
    dense = values.pop("first_k_dense_replace", 0)

    def of_layer(values: Values, layer: int) -> str:
        if layer < dense:
            name = "prefix_dense_"
            place = layer
        else:
            name = ""
            place = layer - dense
        if (place + 1) % values[f"{name}sliding_window_pattern"]:
            return SLIDING
        return FULL

    _types(of_layer)(values)
    _or("mlp_layer_types", lambda v: _dense_first(v, dense))(values)


def _gemma3n(values: Values) -> None:
    num_layers = values["num_hidden_layers"]
    if not isinstance(values["intermediate_size"], list):
        values["intermediate_size"] = [values["intermediate_size"]] * num_layers
    num_sparse = 10 if num_layers > 10 else 0
    _or("activation_sparsity_pattern", lambda _: [0.95] * num_sparse + [0.0] * (num_layers - num_sparse))(values)
    _full_every("", 5)(values)


def _kimi_linear(values: Values) -> None:
    own = values.get("linear_attn_config", {})
    for key, of_file in KIMI_LINEAR_KEYS.items():
        values[key] = own.get(of_file, values[key])
    if values.get("layer_types") is None and {"full_attn_layers", "kda_layers"} <= own.keys():
        kinds = dict.fromkeys(own["full_attn_layers"], FULL) | dict.fromkeys(own["kda_layers"], LINEAR)
        values["layer_types"] = [kinds.get(layer + 1) for layer in range(values["num_hidden_layers"])]
    _types(lambda _, layer: FULL if layer and layer % 4 == 0 else LINEAR)(values)
    _or("mlp_layer_types", lambda v: _dense_first(v, v.get("first_k_dense_replace", 1)))(values)


def _minicpm3(values: Values) -> None:
    _or("v_head_dim", lambda v: v["hidden_size"] // v["num_attention_heads"])(values)
    _or("scale_depth", lambda v: math.sqrt(v["num_hidden_layers"]))(values)
    _or("dim_model_base", lambda v: v["hidden_size"])(values)


def _cwm(values: Values) -> None:
    _full_every("", 4, first=0)(values)
    values["sliding_window"] = values["sliding_window"] or None


def _llama4(values: Values) -> None:
    every = values["no_rope_layer_interval"]
    if not values["no_rope_layers"]:
        values["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(values["num_hidden_layers"])]
    step = values["interleave_moe_layer_step"]
    _or("moe_layers", lambda v: list(range(step - 1, v["num_hidden_layers"], step)))(values)
    has_chunks = values["attention_chunk_size"] is not None
    _types(lambda v, i: "chunked_attention" if has_chunks and v["no_rope_layers"][i] else FULL)(values)


def _dense_first(values: Values, dense: int) -> list[str]:
    return ["dense" if layer < dense else "sparse" for layer in range(values["num_hidden_layers"])]


_NO_LAYERS = _or("mlp_only_layers", lambda _: [])
_EVERY_SECOND = _full_every("", 2)
_EVERY_FOURTH = _full_every("", 4)
_DELTA = _full_every("full_attention_interval", 4, LINEAR)
RULES: dict[str, Callable[[Values], None]] = {
    **dict.fromkeys(_QWEN2, _first_rule_then(_windows_if_used(None), _windows_from("max_window_layers"))),
    "qwen2_moe": _first_rule_then(
        _NO_LAYERS,
        _windows_if_used(0),
        _types(lambda v, i: SLIDING if i % 2 == 0 and i < v["max_window_layers"] and v["use_sliding_window"] else FULL),
    ),
    "qwen3_moe": _first_rule_then(_NO_LAYERS, _windows_if_used(None)),
    "qwen3_omni_moe_text": _NO_LAYERS,
    "qwen3_vl_moe_text": _first_rule_then(_NO_LAYERS, lambda values: values.update(sliding_window=None)),
    "qwen3_next": _first_rule_then(_NO_LAYERS, _DELTA),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _DELTA),
    "olmo_hybrid": _olmo_hybrid,
    "ministral": _types(lambda v, _: FULL if v["sliding_window"] is None else SLIDING),
    "mellum": _first_rule_then(
        _types(lambda *_: FULL), _or("mlp_layer_types", lambda v: ["sparse"] * v["num_hidden_layers"])
    ),
    "dots1": _windows_from("max_window_layers"),
    "smollm3": _smollm3,
    "exaone4": _exaone4,
    "exaone_moe": _first_rule_then(
        _or("mlp_layer_types", lambda v: _dense_first(v, v["first_k_dense_replace"])), _exaone4
    ),
    "cohere2": _full_every("sliding_window_pattern", 4),
    "cohere2_moe": _cohere2_moe,
    "gemma": _gemma,
    **dict.fromkeys(("gemma2", "gpt_oss", "vaultgemma"), _EVERY_SECOND),
    "gemma3_text": _gemma3,
    "gemma3n_text": _gemma3n,
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _gemma4),
    "olmo3": _EVERY_FOURTH,
    "cwm": _cwm,
    "llama4_text": _llama4,
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), _full_every("", 4, first=0)),
    "ernie4_5_moe": _ernie_moe,
    "glm4_moe_lite": _or("mlp_layer_types", lambda v: _dense_first(v, 1)),
    "kimi_linear": _kimi_linear,
    "minicpm3": _minicpm3,
    "glm_ocr_text": lambda values: values.update(attention_bias=False),  # replaces a file's value
    "opt": _or("word_embed_proj_dim", lambda v: v["hidden_size"]),
    "gpt_bigcode": lambda values: values.update(
        num_key_value_heads=1 if values["multi_query"] else values["num_attention_heads"]
    ),
    "granitemoehybrid": _first_rule_then(_mamba_heads, _types(lambda *_: LINEAR)),
    "bamba": _bamba,
    "mamba2": _mamba2,
    "lfm2": _lfm2,
    "lfm3": _types(_lfm3_layer),
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "lfm2_moe": _renamed("tie_embedding", "tie_word_embeddings"),
}
