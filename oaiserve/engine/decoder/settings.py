"""The settings of a text model, read from its config.json.

A file leaves out what is the default of its type, so these defaults are kept in a table. Some keys have had several
names and forms over the years, and some follow from others. The result has one name and one form of each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

Values = dict[str, Any]
DEFAULTS = Path(__file__).with_name("defaults.json")  # written by tools/config_defaults.py

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_LAYER_TYPES = {"attention": _FULL, "mamba": _LINEAR}  # by the names that older files have
# Types whose own frequencies of rotation are these if the file has none.
_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
_ROPE: dict[str, Values] = {
    "cwm": {
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "gpt_oss": {**_YARN, "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    "ministral3": {
        **_YARN,
        "rope_theta": 1_000_000.0,
        "type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "mellum": {
        _FULL: {"rope_type": "default", "rope_theta": 500_000.0},
        _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "gemma4_text": {
        _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
_ROPE["lfm3"] = {**_ROPE["gemma4_text"], _FULL: {**_ROPE["gemma4_text"][_FULL], "partial_rotary_factor": 0.5}}
_ROPE["gemma4_unified_text"] = _ROPE["gemma4_text"]
_WITHOUT_DEFAULTS = {"gemma4_text", "gemma4_unified_text", "mellum"}  # for what a file leaves out of its numbers
_PARTS_ROTATED = {
    **dict.fromkeys(("bamba", "glm", "glm4", "glm4_moe", "glm4v_moe_text", "nemotron", "persimmon", "phi"), 0.5),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "stablelm"), 0.25),
    "phi3": 1.0,
}
_NEMOTRON_H_LAYERS = {"M": _LINEAR, "E": "moe", "*": _FULL, "-": "mlp"}  # by their letters in a pattern
_NEMOTRON_H_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
KIMI_LINEAR_KEYS = {  # by those that files have for them in a part of their own
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
_GLM_ENDS = [151329, 151336, 151338]
_ENDS = {"glm": _GLM_ENDS, "glm4": _GLM_ENDS, "cwm": [128001, 128008, 128009]}
_OF_ROPE = {"original_max_position_embeddings", "partial_rotary_factor", "rope_scaling", "rope_theta"}
# What no class has today: older names of the above, generation settings, and what wrappers have beside a text model.
_OLDER_KEYS = {
    *("rope_local_base_freq", "rotary_dim", "rotary_emb_base", "rotary_pct"),
    *("_attn_implementation", "cache_implementation", "max_length", "prefix", "return_dict", "task_specific_params"),
    *("temperature", "top_k", "top_p"),
    *("audio_config", "image_token_id", "num_deep_layers", "video_token_id", "vision_config", "vision_end_token_id"),
    *("vision_start_token_id", "vision_token_id"),
}
_WITH_LENGTH = ("llama3", "yarn", "longrope")  # kinds of rotation that compare the length with an original one
_FORMER_TYPES = ("exaone4_5_text",)  # which text models of first releases had
_QWEN2 = ("qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text")


class Settings(Mapping[str, Any]):
    """The settings of a text model, which note the keys that are read."""

    def __init__(self, values: Values, stated: Mapping[str, Any], read: set[str]) -> None:
        """`stated` are those that the file itself has, under its names. `read` are those that others follow from."""
        self.stated = stated
        self.read = read
        self._values = values

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


class _Noting(dict[str, Any]):
    """Values that note which of them a rule reads."""

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.read.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().setdefault(key, default)


def settings_of(config: Mapping[str, Any]) -> Settings:
    """Return the settings of the text model in a config.json. Raises KeyError for a type without defaults."""
    stated = _with_floats(_text_of(config))
    values, read = _values_of(stated)
    return Settings(values, stated, read)


def _values_of(config: Mapping[str, Any]) -> tuple[Values, set[str]]:
    """Return the settings, and the keys that others follow from."""
    name = config["model_type"]
    row = _table()["types"][name]
    values = deepcopy({**row["keys"], **config})
    aliases = row.get("aliases", {})
    values |= {key: values[alias] for alias, key in aliases.items() if alias in config}
    values |= {alias: values[key] for alias, key in aliases.items()}
    values["dtype"] = values.get("dtype") or values.pop("torch_dtype", None)
    if name in _ENDS and values["eos_token_id"] is None:
        values["eos_token_id"] = list(_ENDS[name])
    _heads(name, values, row)
    read: set[str] = set()
    if (rule := _RULES.get(name)) is not None:
        values = _Noting(values)
        rule(values)
        read |= values.read
    if values.get("layer_types") is not None:
        values["layer_types"] = [_LAYER_TYPES.get(kind, kind) for kind in values["layer_types"]]
    if "rope_parameters" in row["keys"] or "rope_theta" in row["keys"]:
        values["rope_parameters"] = _rope(name, values, row)
        read |= _OF_ROPE
    if "layer_rope_theta" in values:  # by layer, 0 where it does not rotate
        of_all = [values["rope_parameters"]["rope_theta"]] * values["num_hidden_layers"]
        values["layer_rope_theta"] = of_all if values["layer_rope_theta"] is None else values["layer_rope_theta"]
    return values | {alias: values[key] for alias, key in aliases.items()}, read


def keys_of(model_type: str) -> frozenset[str]:
    """Return the keys that a config.json of a type may have, each under one name."""
    row = _table()["types"][model_type]
    return frozenset(row["keys"].keys() - row.get("aliases", {}).keys())


def _with_floats(value: Any) -> Any:
    """Return what a file has with floats for `{"__float__": "Infinity"}` and the like, since JSON has no infinity."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(one) for key, one in value.items()}
    return [_with_floats(one) for one in value] if isinstance(value, list) else value


@cache
def _table() -> Any:
    return json.loads(DEFAULTS.read_text())


def default_of(model_type: str, key: str) -> Any:
    """Return the default that a type has for a key; None also for a key that it doesn't have."""
    return _table()["types"][model_type]["keys"].get(key)


@cache
def known_keys() -> frozenset[str]:
    """Return the keys that any type has or had."""
    rows = _table()["types"].values()
    return frozenset(key for row in rows for key in (*row["keys"], *row.get("aliases", ()))) | _OLDER_KEYS


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a multimodal model whose text model is known."""
    return _wrapper_of(config).get("model_type") in _table()["wrappers"]


def _wrapper_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("thinker_config") or config  # which another model speaks for


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a multimodal model's config that describes its text model, or all of another model's."""
    if not is_wrapper(config):
        # As transformers does outside of wrappers: in Mistral, all layers are alike.
        is_ministral = config.get("model_type") == "mistral" and "layer_types" in config
        return {**config, "model_type": "ministral"} if is_ministral else config
    wrapper = _wrapper_of(config)
    row = _table()["wrappers"][wrapper["model_type"]]
    own = wrapper.get("text_config")
    text = dict(wrapper if own is None else own)
    if text.get("model_type") in (None, wrapper["model_type"], *_FORMER_TYPES):
        text["model_type"] = row["text"]
    is_tied = wrapper.get("tie_word_embeddings")
    if not is_tied and text.get("tie_word_embeddings"):  # which counts in some wrappers
        is_tied = row["tied_by_text" if is_tied is None else "against_wrapper"]
    text["tie_word_embeddings"] = row["tied"] if is_tied is None else is_tied
    vision = wrapper.get("vision_config") or {}
    deep = "deepstack_visual_indexes"
    text["num_deep_layers"] = len(vision[deep] or ()) if deep in vision else row.get("num_deep", 0)
    for key in ("architectures", "eos_token_id", "dtype", "torch_dtype"):
        if wrapper.get(key) is not None and text.get(key) is None:
            text[key] = wrapper[key]
    return text


def _heads(name: str, values: Values, row: Mapping[str, Any]) -> None:
    heads = values.get("num_attention_heads")
    if heads is None:
        return
    if name in ("cohere2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"):
        values["head_dim"] = None  # whatever a file says
    if "qk_rope_head_dim" in row["keys"]:
        values["qk_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        if name == "kimi_linear":  # whose files state another one, which nothing computes with
            values.setdefault("head_dim", values["qk_rope_head_dim"])
        else:
            values["head_dim"] = values["qk_rope_head_dim"]
    if values.get("head_dim") is None:
        values["head_dim"] = values["hidden_size"] // heads
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = heads


# -- rotary embeddings


def _rope(name: str, values: Values, row: Mapping[str, Any]) -> Values:
    """Return the numbers of the rotary tables, maybe by layer type, in the form of newer files."""
    given, scaling = values.get("rope_parameters"), values.get("rope_scaling")
    if given is None:
        given = deepcopy(_ROPE.get(name))
        if name == "ministral3" and given is not None:
            given["max_position_embeddings"] = values["max_position_embeddings"]
    if name in ("gemma3_text", "gemma3n_text", "olmo3"):
        return _rope_by_layer_type(given, scaling, values, row)
    if name in _WITHOUT_DEFAULTS or name == "cohere2_moe":  # whose class does not read it
        scaling = None
    rope: Values = scaling or given or {}
    theta = values.get("rope_theta", None if name in _WITHOUT_DEFAULTS else row.get("rope_theta", 10_000.0))
    part = _PARTS_ROTATED.get(name)
    if name == "gpt_neox":  # which has names of its own, and no others
        theta = values.get("rotary_emb_base", 10_000.0)
        part = values.get("rotary_pct", 0.25)
    elif name != "bamba":  # which has it whatever a file says
        if name == "minimax_m2" and values.get("rotary_dim") is not None:
            part = values["rotary_dim"] / values["head_dim"]
        part = values.get("partial_rotary_factor", part) if name not in _WITHOUT_DEFAULTS else None
    kinds = set(values.get("layer_types") or ())
    nested = [kind for kind in rope if kind in kinds]
    for of_layers in [rope[kind] for kind in nested] or [rope]:
        if of_layers is not None:
            of_layers.setdefault("rope_theta", theta)
            if part is not None:
                of_layers.setdefault("partial_rotary_factor", part)
            _with_type(name, of_layers, values, is_nested=bool(nested))
    return rope


def _rope_by_layer_type(given: Values | None, scaling: Values | None, values: Values, row: Mapping[str, Any]) -> Values:
    """Return those of Gemma 3 and OLMo 3, whose older files have a scaling that is for full layers alone."""
    rope = given or {}
    for kind in (_SLIDING, _FULL):
        if rope.get(kind) is None:
            rope[kind] = {"rope_type": "default"}
    rope[_FULL].update(scaling or {})
    default = row["rope_theta"]
    of_full, of_windows = (default["global"], default["local"]) if isinstance(default, dict) else (default, default)
    if "rope_theta" in values:
        of_full = values.get("rope_theta")
    if isinstance(default, dict):
        of_windows = values.get("rope_local_base_freq", of_windows)
    for kind, theta in ((_FULL, of_full), (_SLIDING, of_windows)):
        rope[kind].setdefault("rope_theta", theta)
        if "partial_rotary_factor" in values:
            rope[kind].setdefault("partial_rotary_factor", values["partial_rotary_factor"])
        _with_type("", rope[kind], values, is_nested=True)
    return rope


def _with_type(name: str, rope: Values, values: Values, *, is_nested: bool) -> None:
    """Give the numbers of one kind of layer the name of their kind, and the length that this needs."""
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    original = "original_max_position_embeddings"
    if rope["rope_type"] in _WITH_LENGTH:
        if original in values and not is_nested:
            rope[original] = values[original]
        rope.setdefault(original, values["max_position_embeddings"])
    if name == "phi3" and rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"


# -- what follows from other keys, by type


def _types(of_layer: Callable[[Values, int], str]) -> Callable[[Values], None]:
    """Make the rule that gives each layer its type where the file does not."""

    def rule(values: Values) -> None:
        if values.get("layer_types") is None:
            values["layer_types"] = [of_layer(values, layer) for layer in range(values["num_hidden_layers"])]

    return rule


def _full_every(key: str, default: int, others: str = _SLIDING, *, first: int = 1) -> Callable[[Values], None]:
    """Let every n-th layer have full attention. The file may have another n, under `key`; 0 or null: no such layer."""

    def of_layer(values: Values, layer: int) -> str:
        every = values.get(key, default)
        return others if every == 0 or (layer + first) % every else _FULL

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
    """Make the rule that a key which is missing or null has this value."""

    def rule(values: Values) -> None:
        if values.get(key) is None:
            values[key] = value(values)

    return rule


def _renamed(old: str, key: str) -> Callable[[Values], None]:
    def rule(values: Values) -> None:
        if old in values:
            values[key] = values.pop(old)

    return rule


def _windows_from(key: str) -> Callable[[Values], None]:
    """Let layers have a window from one on, if there is a window."""
    return _types(lambda v, layer: _SLIDING if v["sliding_window"] is not None and layer >= v[key] else _FULL)


def _gemma(values: Values) -> None:
    if values["hidden_act"] == "gelu":  # which in these files means the other one
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
        values["layer_types"][-1] = _FULL
    values.setdefault("global_head_dim", 512)
    own = values.get("num_global_key_value_heads") if values.get("attention_k_eq_v", True) else None
    if values.get("per_layer_config"):  # by number of the layer, as newer versions write it in place of both
        of_layer = values["per_layer_config"].get(str(values["layer_types"].index(_FULL)), {})
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
    _types(lambda v, i: _SLIDING if has_windows and not v["no_rope_layers"][i] else _FULL)(values)


def _ernie_moe(values: Values) -> None:
    if values["moe_layer_end_index"] == -1:
        values["moe_layer_end_index"] = values["num_hidden_layers"] - 1


def _olmo_hybrid(values: Values) -> None:
    heads, missing = values["num_attention_heads"], values.get("layer_types") is None
    _full_every("", 4, _LINEAR)(values)
    if missing and _FULL not in values["layer_types"]:
        values["layer_types"][-1] = _FULL
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
    values["layer_types"] = [_FULL if i in attend else _LINEAR for i in range(values["num_hidden_layers"])]


def _mamba2(values: Values) -> None:
    values["layer_types"] = [_LINEAR] * values["num_hidden_layers"]
    if values["time_step_rank"] == "auto":
        values["time_step_rank"] = math.ceil(values["hidden_size"] / 16)


def _lfm2(values: Values) -> None:
    if values.get("layer_types") is None:
        _or("full_attn_idxs", lambda v: list(range(v["num_hidden_layers"])))(values)
        attend = values["full_attn_idxs"]
        values["layer_types"] = [_FULL if i in attend else "conv" for i in range(values["num_hidden_layers"])]
    _renamed("tie_embedding", "tie_word_embeddings")(values)
    _renamed("block_ff_dim", "intermediate_size")(values)


def _falcon_h1(values: Values) -> None:
    if values["mamba_d_head"] == "auto":
        numbers = values["mamba_d_ssm"]
        numbers = values["mamba_expand"] * values["hidden_size"] if numbers is None else numbers
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
    values["layers_block_type"] = [_LAYER_TYPES.get(kind, kind) for kind in kinds]
    values["num_hidden_layers"] = len(kinds)
    _or("mtp_layers_block_type", lambda _: [_FULL, "moe"])(values)


def _lfm3_layer(_: Values, layer: int) -> str:
    if layer % 4 == 2:
        return _FULL
    return _SLIDING if layer % 4 == 0 and layer > 0 else "conv"


def _cohere2_moe(values: Values) -> None:
    dense = values.pop("first_k_dense_replace", 0)

    def of_layer(values: Values, layer: int) -> str:
        name, place = ("prefix_dense_", layer) if layer < dense else ("", layer - dense)
        return _SLIDING if (place + 1) % values[f"{name}sliding_window_pattern"] else _FULL

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
        kinds = dict.fromkeys(own["full_attn_layers"], _FULL) | dict.fromkeys(own["kda_layers"], _LINEAR)
        values["layer_types"] = [kinds.get(layer + 1) for layer in range(values["num_hidden_layers"])]
    _types(lambda _, layer: _FULL if layer and layer % 4 == 0 else _LINEAR)(values)
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
    _types(lambda v, i: "chunked_attention" if has_chunks and v["no_rope_layers"][i] else _FULL)(values)


def _dense_first(values: Values, dense: int) -> list[str]:
    return ["dense" if layer < dense else "sparse" for layer in range(values["num_hidden_layers"])]


_NO_LAYERS = _or("mlp_only_layers", lambda _: [])
_EVERY_SECOND, _EVERY_FOURTH = _full_every("", 2), _full_every("", 4)
_DELTA = _full_every("full_attention_interval", 4, _LINEAR)
_RULES: dict[str, Callable[[Values], None]] = {
    **dict.fromkeys(_QWEN2, _first_rule_then(_windows_if_used(None), _windows_from("max_window_layers"))),
    "qwen2_moe": _first_rule_then(
        _NO_LAYERS,
        _windows_if_used(0),
        _types(
            lambda v, i: _SLIDING if i % 2 == 0 and i < v["max_window_layers"] and v["use_sliding_window"] else _FULL
        ),
    ),
    "qwen3_moe": _first_rule_then(_NO_LAYERS, _windows_if_used(None)),
    "qwen3_omni_moe_text": _NO_LAYERS,
    "qwen3_vl_moe_text": _first_rule_then(_NO_LAYERS, lambda values: values.update(sliding_window=None)),
    "qwen3_next": _first_rule_then(_NO_LAYERS, _DELTA),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _DELTA),
    "olmo_hybrid": _olmo_hybrid,
    "ministral": _types(lambda v, _: _FULL if v["sliding_window"] is None else _SLIDING),
    "mellum": _first_rule_then(
        _types(lambda *_: _FULL), _or("mlp_layer_types", lambda v: ["sparse"] * v["num_hidden_layers"])
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
    "glm_ocr_text": lambda values: values.update(attention_bias=False),  # whatever a file says
    "opt": _or("word_embed_proj_dim", lambda v: v["hidden_size"]),
    "gpt_bigcode": lambda values: values.update(
        num_key_value_heads=1 if values["multi_query"] else values["num_attention_heads"]
    ),
    "granitemoehybrid": _first_rule_then(_mamba_heads, _types(lambda *_: _LINEAR)),
    "bamba": _bamba,
    "mamba2": _mamba2,
    "lfm2": _lfm2,
    "lfm3": _types(_lfm3_layer),
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "lfm2_moe": _renamed("tie_embedding", "tie_word_embeddings"),
}
