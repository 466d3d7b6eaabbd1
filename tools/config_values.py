"""Other values of the keys of a config.json, for tools.config_mutants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from oaiserve.engine.decoder.keys import effective
from oaiserve.engine.decoder.settings import table

Values = dict[str, Any]
REMOVED = "(removed)"  # in place of a value: the file doesn't have the key
# Settings that have an effect only together with others, by the names "TYPE, WORDS".
_SHORT = {"sliding_window": 6}
_MIXED = {**_SHORT, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_WINDOWS = {**_SHORT, "use_sliding_window": True, "max_window_layers": 1, "layer_types": REMOVED}
_GROUPED = ("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "nemotron_h", "solar_open")
_FEW = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_GROUPS = {**_FEW, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
VARIANTS: dict[str, Values] = {
    **{f"{name}, windows": _WINDOWS for name in ("qwen2", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_moe")},
    **{f"{name}, windows": _SHORT for name in ("cwm", "exaone_moe", "granite_swa", "granitemoe_swa", "vaultgemma")},
    **{f"{name}, groups": _GROUPS for name in _GROUPED},
    "cohere2_moe, windows": {**_MIXED, "expert_selection_fn": "sigmoid"},
    "dots1, windows": {**_SHORT, "max_window_layers": 1, "layer_types": REMOVED},
    "exaone4, derived": {**_SHORT, "layer_types": REMOVED},
    "gemma4_text, keys as values": {"attention_k_eq_v": True, "num_kv_shared_layers": 0},
    "granitemoehybrid, rotated": {"position_embedding_type": "rope"},
    "llama4_text, scaled": {"floor_scale": 8, "layer_types": REMOVED},
    "mellum": {**_FEW, "num_local_experts": 4},
    "mellum, windows": {**_FEW, "num_local_experts": 4, **_MIXED},
    "smollm3, windows": {**_WINDOWS, "no_rope_layers": REMOVED, "no_rope_layer_interval": 2},
    "solar_open": {**_FEW, "n_routed_experts": 4},
    "youtu": {"num_experts_per_tok": REMOVED},
}
# Keys that say what a file is, keys of rotary tables, whose values are below, and `rescale_prenorm_residual`, which is
# for new weights, though some models scale those that they load by it.
_LEFT_OUT = {
    *("architectures", "dtype", "model_type", "rescale_prenorm_residual", "rope_parameters", "rope_scaling"),
    "transformers_version",
}
_FUNCTIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "sigmoid")
_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "attention", "mamba")
# Values that are neither like the original's nor defaults of other types.
_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"), _FUNCTIONS),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), (6, 33)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (64, 256)),
    **dict.fromkeys(("original_max_position_embeddings", "max_window_layers"), (32, 1, 2)),
    **dict.fromkeys(("full_attention_interval", "sliding_window_pattern"), (2,)),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), (500.0,)),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (0.5,)),
    **dict.fromkeys(("scoring_func", "expert_selection_fn"), ("softmax", "sigmoid")),
    "floor_scale": (8,),
    "hybrid_override_pattern": ("M-*", "MEM"),
    "mamba_hidden_act": _FUNCTIONS,
    "position_embedding_type": ("rope", "nope", "alibi"),
    "shared_expert_combination_strategy": ("sum", "average"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "use_bidirectional_attention": ("all", "vision"),
}
_PART = {"partial_rotary_factor": 0.5}
_NO_LENGTH = {"original_max_position_embeddings": REMOVED}
_LONG = [{"short_factor": [1.0 + i / 8 for i in range(pairs)], "long_factor": [4.0] * pairs} for pairs in (2, 4, 8)]
_OF_KINDS: dict[str, tuple[Values, ...]] = {
    "default": ({"rope_theta": 500.0}, _PART, {"mrope_section": [2, 3, 3]}),
    "dynamic": ({}, _NO_LENGTH, {"factor": 1.0, "alpha": 50.0}),
    "linear": ({}, _PART),
    "llama3": ({}, _PART),
    "longrope": (*_LONG, {**_LONG[2], "attention_factor": 1.5}, {**_LONG[2], "factor": None}),
    "ntk": ({},),
    "proportional": (_PART,),
    "yarn": (
        *(_PART, _NO_LENGTH, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.5}, {"factor": None}),
        *({"mscale": 0.7}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"truncate": False}, {"llama_4_scaling_beta": 0.1}),
        {},
    ),
}
_OF_ALL_KINDS = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def applied(values: Values, changes: Values) -> Values:
    """Return the values with these changes."""
    return {key: value for key, value in {**values, **changes}.items() if value != REMOVED}


# Other numbers of rotary tables.
_ROPES = [
    applied({**_OF_ALL_KINDS, "rope_type": kind}, numbers) for kind, found in _OF_KINDS.items() for numbers in found
]


def mutants(stated: Values, *, with_others: bool) -> Iterator[Values]:
    """Return the changes of each key that a file states, that its type has or, maybe, that another family reads."""
    values = {**table()["types"][stated["model_type"]]["keys"], **stated}
    others = effective() | _VALUES.keys() if with_others else set()
    for key in sorted({*values, *others} - _LEFT_OUT):
        distinct = {json.dumps(value): value for value in _others(key, stated, values)}
        yield from ({key: value} for value in distinct.values() if value != values.get(key, REMOVED))
    for key in ("rope_theta", "rotary_emb_base", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct"):
        yield {key: _VALUES[key][0], "rope_parameters": REMOVED}
    ropes = stated.get("rope_parameters") or {}
    kinds = [kind for kind, one in ropes.items() if isinstance(one, dict)]
    for rope in _ROPES:
        yield {"rope_scaling": rope, "rope_parameters": REMOVED, "rope_theta": 300.0}  # as in older files
        yield {"rope_parameters": {"rope_theta": 10_000.0, **({} if kinds else ropes), **rope}}
        yield from ({"rope_parameters": {**ropes, kind: {"rope_theta": 10_000.0, **rope}}} for kind in kinds)
    yield {"rope_scaling": _ROPES[-1]}
    yield {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 500.0} for kind in _KINDS[:2]}}


def _others(key: str, stated: Values, values: Values) -> Iterator[Any]:
    """Return other values of a key."""
    yield from _VALUES.get(key, ())
    if key == "layer_types" or key.endswith("block_type"):
        layers = range(values.get("num_hidden_layers") or 3)
        yield from ([kind for _ in layers] for kind in _KINDS)
        yield from ([kind if layer % 2 else "full_attention" for layer in layers] for kind in _KINDS)
    if key in values:
        yield from _like(values[key])
    of_types = {name: row["keys"].get(key) for name, row in table()["types"].items()}
    different = [value for value in of_types.values() if value not in (None, values.get(key))]
    yield from [value for value in (*different, True, 8) if not _is_large(key, value)][:3]
    if key in stated and not _is_large(key, of_types[stated["model_type"]]):
        yield REMOVED


def _is_large(key: str, value: Any) -> bool:
    """Return whether the model would be large. In many layers of random weights, differences of rounding grow."""
    return isinstance(value, int | float) and value > (6 if key == "num_hidden_layers" else 256)


def _like(value: Any) -> Iterator[Any]:
    """Return other values of the same kind, and none."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value * 2 or 1, value // 2 if value > 1 else value + 2)
    elif isinstance(value, float):
        yield from (0.1, 0.5) if 0 < value < 1e-2 else (value * 2 or 1.0, value / 2 or 0.3)
    elif isinstance(value, list) and value:
        yield from (value[1:] + value[:1], value[::-1], value[:-1], value[-1:] * len(value), value[:1] * len(value), [])
        yield [next(_like(one), one) for one in value]
    elif isinstance(value, dict):
        yield from ({**value, inner: other} for inner, one in value.items() for other in _like(one))
        yield {}
    yield from (True, 8, 0.5) if value is None else (None,)
