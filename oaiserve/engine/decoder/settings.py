"""The settings of a text model, read from its config.json.

Files leave out values that are the defaults of their type, so a table provides these defaults. Some keys have several
names and forms, and some follow from others. The result has one name and one form of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from oaiserve.checkpoints.bad_file import refuse_too_large
from oaiserve.engine.decoder.settings_by_type import FULL, LAYER_TYPES, RULES, SLIDING, Values

DEFAULTS = Path(__file__).with_name("defaults.json")  # written by tools/config_defaults.py
# The default rotary parameters of some types.
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
        FULL: {"rope_type": "default", "rope_theta": 500_000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "gemma4_text": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
_ROPE["lfm3"] = {**_ROPE["gemma4_text"], FULL: {**_ROPE["gemma4_text"][FULL], "partial_rotary_factor": 0.5}}
_ROPE["gemma4_unified_text"] = _ROPE["gemma4_text"]
_WITHOUT_DEFAULTS = {"gemma4_text", "gemma4_unified_text", "mellum"}  # Their rotary parameters have no defaults.
_PARTS_ROTATED = {
    **dict.fromkeys(("bamba", "glm", "glm4", "glm4_moe", "glm4v_moe_text", "nemotron", "persimmon", "phi"), 0.5),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "stablelm"), 0.25),
    "phi3": 1.0,
}
_GLM_ENDS = [151329, 151336, 151338]
_ENDS = {"glm": _GLM_ENDS, "glm4": _GLM_ENDS, "cwm": [128001, 128008, 128009]}
_OF_ROPE = {"original_max_position_embeddings", "partial_rotary_factor", "rope_scaling", "rope_theta"}
# Keys that today's classes don't have: older names of the above, generation settings, and settings of wrappers.
_OLDER_KEYS = {
    *("rope_local_base_freq", "rotary_dim", "rotary_emb_base", "rotary_pct"),
    *("_attn_implementation", "cache_implementation", "max_length", "prefix", "return_dict", "task_specific_params"),
    *("temperature", "top_k", "top_p"),
    *("audio_config", "image_token_id", "num_deep_layers", "video_token_id", "vision_config", "vision_end_token_id"),
    *("vision_start_token_id", "vision_token_id"),
}
# The table leaves out these keys, because no computation reads them.
WITHOUT_USE = frozenset(
    {
        *("altup_coef_clip", "attention_dropout", "attention_softmax_in_fp32", "attn_pdrop"),
        *("block_ffn_dim_multiplier", "block_multiple_of", "bos_token_id", "chunk_size", "classifier_dropout"),
        *("dropout", "embd_pdrop", "embedding_dropout", "embedding_initializer_range", "eod_token_id", "ffn_dim"),
        *("hidden_dropout", "init_std", "initializer_range", "intermediate_size_mlp", "is_decoder", "laurel_rank"),
        *("layerdrop", "linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max"),
        *("linear_dt_min", "mamba_chunk_size", "mamba_ssm_cache_dtype", "moe_shared_expert_intermediate_size"),
        *("moe_shared_expert_overlap", "mtp_layer_types", "mtp_mlp_layer_types", "num_logits_to_keep"),
        *("output_router_logits", "prefix_dense_intermediate_size", "pretraining_tp", "reorder_and_upcast_attn"),
        *("rescale_prenorm_residual", "resid_pdrop", "residual_dropout", "residual_in_fp32", "router_aux_loss_coef"),
        *("router_jitter_noise", "scale_attention_softmax_in_fp32", "summary_activation", "summary_first_dropout"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj", "time_step_floor", "time_step_max"),
        *("use_cache", "use_mamba_kernels", "z_loss_coefficient"),
    }
)
_WITH_LENGTH = ("llama3", "yarn", "longrope")  # kinds of frequencies that depend on the original length
ALIKE: dict[str, str] = {}  # for each family with a type unknown to transformers, the type that it is `like`
_FORMER_TYPES = ("exaone4_5_text",)  # The first releases of these text models used this type.


class Settings(dict[str, Any]):
    """The settings of a text model. Records which keys are read, including those that other keys follow from."""

    def __init__(self, values: Values, stated: Mapping[str, Any]) -> None:
        """`stated` are the settings that the file itself contains, under its own names."""
        super().__init__(values)
        self.stated = stated
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

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
    """Return the settings of the text model in a config.json.

    Raises KeyError for a type without defaults, and BadFile for a known setting that is too large to compute with."""
    stated = _with_floats(_text_of(config))
    name = ALIKE.get(stated["model_type"], stated["model_type"])
    row = table()["types"][name]
    for key in known_keys() & stated.keys():
        refuse_too_large(key, stated[key])
    values = Settings(deepcopy({**row["keys"], **stated, "model_type": name}), stated)
    aliases = row.get("aliases", {})
    values |= {key: values[alias] for alias, key in aliases.items() if alias in stated}
    values |= {alias: values[key] for alias, key in aliases.items()}
    values["dtype"] = values.get("dtype") or values.pop("torch_dtype", None)
    if name in _ENDS and values["eos_token_id"] is None:
        values["eos_token_id"] = list(_ENDS[name])
    _heads(name, values, row)
    values.read.clear()
    if (rule := RULES.get(name)) is not None:
        rule(values)
    read = values.read.copy()
    if values.get("layer_types") is not None:
        values["layer_types"] = [LAYER_TYPES.get(kind, kind) for kind in values["layer_types"]]
    if "rope_parameters" in row["keys"] or "rope_theta" in row["keys"]:
        values["rope_parameters"] = _rope(name, values, row)
        read |= _OF_ROPE
    if "layer_rope_theta" in values:  # one base per layer, 0 for layers that do not rotate
        of_all = [values["rope_parameters"]["rope_theta"]] * values["num_hidden_layers"]
        if values["layer_rope_theta"] is None:
            values["layer_rope_theta"] = of_all
    values |= {alias: values[key] for alias, key in aliases.items()}
    values.read = read
    return values


def keys_of(model_type: str) -> frozenset[str]:
    """Return the keys that a config.json of this type may have, each under one name only."""
    row = table()["types"][ALIKE.get(model_type, model_type)]
    return frozenset(row["keys"].keys() - row.get("aliases", {}).keys())


def _with_floats(value: Any) -> Any:
    """Return a value of a file, with `{"__float__": "Infinity"}` and the like as floats, since JSON has no infinity."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_floats(one) for one in value]
    return value


@cache
def table() -> dict[str, Any]:
    """Return the table of types and wrappers.

    In the file, a type lists only the defaults that differ from an earlier type's.
    """
    stored: dict[str, Any] = json.loads(DEFAULTS.read_text())
    types = stored["types"]
    for row in types.values():
        if (like := row.pop("like", None)) is not None:
            without = row.pop("without", ())
            row["keys"] = {key: value for key, value in types[like]["keys"].items() if key not in without} | row["keys"]
    return stored


def default_of(model_type: str, key: str) -> Any:
    """Return a type's default for a key. None also means that the type doesn't have the key."""
    return table()["types"][model_type]["keys"].get(key)


@cache
def known_keys() -> frozenset[str]:
    """Return the keys that any type has or once had."""
    rows = table()["types"].values()
    of_rows = {key for row in rows for key in (*row["keys"], *row.get("aliases", ()))}
    return WITHOUT_USE | _OLDER_KEYS | of_rows


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a multimodal model whose text model is known."""
    return _wrapper_of(config).get("model_type") in table()["wrappers"]


def _wrapper_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("thinker_config") or config  # In models that speak, the config of the thinking model is nested.


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a multimodal model's config that describes its text model. Return other configs whole."""
    if not is_wrapper(config):
        # Like transformers, read a Mistral model with layer types as Ministral, except in a wrapper, where all layers
        # of Mistral have one type.
        is_ministral = config.get("model_type") == "mistral" and "layer_types" in config
        if is_ministral:
            return {**config, "model_type": "ministral"}
        return config
    wrapper = _wrapper_of(config)
    row = table()["wrappers"][wrapper["model_type"]]
    own = wrapper.get("text_config")
    text = dict(wrapper if own is None else own)
    if text.get("model_type") in (None, wrapper["model_type"], *_FORMER_TYPES):
        text["model_type"] = row["text"]
    is_tied = wrapper.get("tie_word_embeddings")
    if not is_tied and text.get("tie_word_embeddings"):  # For some wrappers, the text model's value is the valid one.
        is_tied = row.get("tied_by_text" if is_tied is None else "against_wrapper", False)
    text["tie_word_embeddings"] = row.get("tied", False) if is_tied is None else is_tied
    vision = wrapper.get("vision_config") or {}
    deep = "deepstack_visual_indexes"
    if deep in vision:
        text["num_deep_layers"] = len(vision[deep] or ())
    else:
        text["num_deep_layers"] = row.get("num_deep", 0)
    for key in ("architectures", "eos_token_id", "dtype", "torch_dtype"):
        if wrapper.get(key) is not None and text.get(key) is None:
            text[key] = wrapper[key]
    return text


def _heads(name: str, values: Values, row: Mapping[str, Any]) -> None:
    heads = values.get("num_attention_heads")
    if heads is None:
        return
    if name in ("cohere2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"):
        values["head_dim"] = None  # regardless of the file
    if "qk_rope_head_dim" in row["keys"]:
        values["qk_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        if name == "kimi_linear":  # Its files state another value, which nothing uses.
            values.setdefault("head_dim", values["qk_rope_head_dim"])
        else:
            values["head_dim"] = values["qk_rope_head_dim"]
    if values.get("head_dim") is None:
        values["head_dim"] = values["hidden_size"] // heads
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = heads


# -- rotary embeddings


def _rope(name: str, values: Values, row: Mapping[str, Any]) -> Values:
    """Return the rotary parameters in the form of newer files, by layer type where they differ."""
    stated = values.get("rope_parameters")
    scaling = values.get("rope_scaling")
    if stated is None:
        stated = deepcopy(_ROPE.get(name))
        if name == "ministral3" and stated is not None:
            stated["max_position_embeddings"] = values["max_position_embeddings"]
    if name in ("gemma3_text", "gemma3n_text", "olmo3"):
        return _rope_by_layer_type(stated, scaling, values, row)
    if name in _WITHOUT_DEFAULTS or name == "cohere2_moe":  # These classes don't read the key.
        scaling = None
    rope: Values = scaling or stated or {}
    theta = values.get("rope_theta", None if name in _WITHOUT_DEFAULTS else row.get("rope_theta", 10_000.0))
    part = _PARTS_ROTATED.get(name)
    if name == "gpt_neox":  # It uses only names of its own.
        theta = values.get("rotary_emb_base", 10_000.0)
        part = values.get("rotary_pct", 0.25)
    elif name != "bamba":  # Bamba uses its default, regardless of the file.
        if name == "minimax_m2" and values.get("rotary_dim") is not None:
            part = values["rotary_dim"] / values["head_dim"]
        if name not in _WITHOUT_DEFAULTS:
            part = values.get("partial_rotary_factor", part)
        else:
            part = None
    kinds = set(values.get("layer_types") or ())
    nested = [kind for kind in rope if kind in kinds]
    for of_layers in [rope[kind] for kind in nested] or [rope]:
        if of_layers is not None:
            of_layers.setdefault("rope_theta", theta)
            if part is not None:
                of_layers.setdefault("partial_rotary_factor", part)
            _with_type(name, of_layers, values, is_nested=bool(nested))
    return rope


def _rope_by_layer_type(
    stated: Values | None, scaling: Values | None, values: Values, row: Mapping[str, Any]
) -> Values:
    """Return the rotary parameters of Gemma 3 and OLMo 3. In older files, the scaling is only for full layers."""
    rope = stated or {}
    for kind in (SLIDING, FULL):
        if rope.get(kind) is None:
            rope[kind] = {"rope_type": "default"}
    rope[FULL].update(scaling or {})
    default = row["rope_theta"]
    if isinstance(default, dict):
        of_full = default["global"]
        of_windows = default["local"]
    else:
        of_full = default
        of_windows = default
    if "rope_theta" in values:
        of_full = values.get("rope_theta")
    if isinstance(default, dict):
        of_windows = values.get("rope_local_base_freq", of_windows)
    for kind, theta in ((FULL, of_full), (SLIDING, of_windows)):
        rope[kind].setdefault("rope_theta", theta)
        if "partial_rotary_factor" in values:
            rope[kind].setdefault("partial_rotary_factor", values["partial_rotary_factor"])
        _with_type("", rope[kind], values, is_nested=True)
    return rope


def _with_type(name: str, rope: Values, values: Values, *, is_nested: bool) -> None:
    """Add the kind of frequencies to a layer type's parameters, and the original length if that kind needs it."""
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
