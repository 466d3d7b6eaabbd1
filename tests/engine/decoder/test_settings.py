"""Settings read from a config.json are those of transformers' config classes, for every key of every type."""

import json
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from oaiserve.engine.decoder.settings import Settings, settings_of, table
from oaiserve.engine.model.transformers_files.wrapper import text_config
from tests.models.wrappers import wrapper_config
from tools.config_defaults import defaults_of, text_of

TABLE = table()
ROWS: dict[str, Any] = TABLE["types"]
_YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
_FACTORS = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64}
_OF_FULL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 77.0}
# Settings of rotary embeddings in files of different ages.
OLD_ROPE = (
    {"rope_theta": 12345.0},
    {"rope_theta": None},
    {"rope_theta": 12345.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 12345.0, "rope_scaling": {"rope_type": "yarn", **_YARN}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_scaling": None},
    {"partial_rotary_factor": 0.75},
    {"rotary_pct": 0.5, "rotary_emb_base": 12345.0},
    {"rotary_dim": 32},
    {"original_max_position_embeddings": 512, "rope_scaling": {"type": "longrope", **_FACTORS}},
)
NEW_ROPE = (
    {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    {"rope_parameters": None},
)
BY_LAYER_TYPE = {"rope_parameters": {"full_attention": _OF_FULL, "sliding_attention": {"rope_type": "default"}}}
OLD_BY_LAYER_TYPE = {"rope_local_base_freq": 500.0, **OLD_ROPE[2]}
COMPARED_BELOW = {
    *("layer_types", "mamba_d_head", "mlp_layer_types", "no_rope_layers", "rope_parameters", "rope_scaling"),
    *("activation_sparsity_pattern", "use_bidirectional_attention"),
}
REFUSED_ALONE = {
    "internlm3": {"attention_bias", "mlp_bias"},
    "mamba2": {"expand", "head_dim", "hidden_size", "num_heads"},
    "mellum": {"num_mtp_layers"},  # has no effect here
}
WITHOUT_OLD_FILES = ("gemma4_text", "gemma4_unified_text", "mellum")
GEMMA4 = {"head_dim", "num_key_value_heads"}  # These settings differ between layers.
WITHOUT_CHUNKS = {"model_type": "llama4_text", "attention_chunk_size": None}  # its layers still have them in 5.23
_OF_TRAINING = {"embedding_initializer_range"}


def of_class(config: dict[str, Any]) -> Any:
    """Make the class's own configuration of a file."""
    fields = deepcopy({key: value for key, value in config.items() if key != "model_type"})
    instance = CONFIG_MAPPING[config["model_type"]](**fields)
    if getattr(instance, "rope_parameters", None):
        instance.standardize_rope_params()  # as each module does that reads them
    return instance


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def differing(config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that are not the class's, with these."""
    return differences(of_class(config), settings_of(config))


def differences(expected: Any, found: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the settings that are not those of a class's configuration, with these."""
    name = found["model_type"]
    derived = {"layer_types", "head_dim", "num_key_value_heads", "qk_head_dim", "rope_parameters"}
    keys = {*ROWS[name]["keys"], *derived} - _OF_TRAINING
    of_layers = GEMMA4 & keys if name.startswith("gemma4") else frozenset()
    pairs = {key: (found.get(key), plain(getattr(expected, key))) for key in keys - of_layers if hasattr(expected, key)}
    of_full_layers = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    for key in of_layers:
        for number, kind in enumerate(found["layer_types"]):
            value = found[of_full_layers[key]] if kind == "full_attention" else found[key]
            wanted = getattr(expected.per_layer_config[number], key)
            pairs[f"{key} of {kind}"] = (value, wanted)
    for key in ("head_dim", "num_key_value_heads"):
        if key in pairs and pairs[key][1] is None:  # modules then take what the settings have
            del pairs[key]
    return {key: (ours, theirs) for key, (ours, theirs) in pairs.items() if ours != theirs}


def is_as_in_the_class(config: dict[str, Any]) -> bool:
    """Compare the settings of a file with the class's; false if the class refuses it."""
    try:
        of_class(config)
    except Exception:  # each in its own way
        return False
    assert differing(config) == {}, config
    return True


def other_values(value: Any) -> list[Any]:
    """Return values of a key that differ from its default, of which a class may refuse some."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int | float):
        return [value * 2 or 1, value / 2, value // 2, None]
    return [None, "gelu", "silu", [], [1], 8, 8.5, True]


@pytest.mark.parametrize("name", ROWS)
def test_defaults_are_those_of_the_class(name: str) -> None:
    assert json.loads(json.dumps(defaults_of(CONFIG_MAPPING[name]))) == ROWS[name]
    assert differing({"model_type": name}) == {}


@pytest.mark.parametrize("name", ROWS)
def test_each_key_has_the_effect_that_it_has_in_the_class(name: str) -> None:
    refused = set()
    for key, default in ROWS[name]["keys"].items():
        configs = [{"model_type": name, key: value} for value in other_values(default)]
        if transformers.__version__.startswith("5.23.") and WITHOUT_CHUNKS in configs:
            configs.remove(WITHOUT_CHUNKS)
        values = [config[key] for config in configs if is_as_in_the_class(config)]
        if values in ([], [default]):
            refused.add(key)
    assert refused <= COMPARED_BELOW | REFUSED_ALONE.get(name, set())


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "rope_parameters" in row["keys"]])
def test_rotary_embeddings_are_read_from_files_of_all_ages(name: str) -> None:
    cases = [*NEW_ROPE, *(() if name in WITHOUT_OLD_FILES else OLD_ROPE)]
    with_old_windows = ("gemma3_text", "gemma3n_text", "olmo3")
    if name in with_old_windows:
        cases.append(OLD_BY_LAYER_TYPE)
    if name in (*with_old_windows, *WITHOUT_OLD_FILES):
        cases = [BY_LAYER_TYPE, *(case for case in cases if case not in NEW_ROPE[:2])]
    compared = [is_as_in_the_class({"model_type": name, **case}) for case in cases]
    assert compared.count(False) <= 4


# What follows from keys that a class does not have.
OTHERS = (
    {"model_type": "cohere2", "sliding_window_pattern": 3},
    {"model_type": "gemma3_text", "sliding_window_pattern": 3},
    {"model_type": "qwen3_next", "full_attention_interval": 3},
    {"model_type": "cohere2_moe", "first_k_dense_replace": 5},
    {"model_type": "lfm2", "full_attn_idxs": [2, 5], "block_ff_dim": 1000, "tie_embedding": False},
    {"model_type": "bamba", "attn_layer_indices": [9, 18]},
    {"model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    {"model_type": "gemma", "hidden_act": "gelu"},
    {"model_type": "gemma4_text", "attention_k_eq_v": True, "num_global_key_value_heads": 2, "global_head_dim": 128},
    {"model_type": "gemma4_text", "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3},
    {"model_type": "gemma4_text", "num_hidden_layers": 6, "per_layer_config": {"5": {"head_dim": 384}}},
    {"model_type": "gemma4_text", "num_hidden_layers": 6, "per_layer_config": {"5": {"num_key_value_heads": 2}}},
    {"model_type": "gemma4_text", "use_bidirectional_attention": "all"},
    {"model_type": "gpt2", "num_hidden_layers": 3, "hidden_size": 96},
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3, "num_hidden_layers": 6},
    {"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 3},
    {"model_type": "bamba", "mamba_d_head": 32, "mamba_n_heads": 256},
    {"model_type": "exaone_moe", "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
    {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
    {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 64},
    {"model_type": "ministral", "sliding_window": None},
    {"model_type": "glm", "eos_token_id": None},
    {"model_type": "mistral", "torch_dtype": "float16"},
    {"model_type": "internlm3", "attention_bias": True, "mlp_bias": True},
    {"model_type": "mamba2", "hidden_size": 1024, "num_heads": 64, "head_dim": 64, "expand": 4},
    {"model_type": "ernie4_5_moe", "num_experts_per_tok": 3, "num_experts": 32},
    {"model_type": "cohere2_moe", "rope_theta": 12345.0},
    {"model_type": "llama", "qk_rope_head_dim": 64},
    {"model_type": "gemma3n_text", "num_hidden_layers": 2, "activation_sparsity_pattern": [0.5, 0.0]},
    {"model_type": "gemma3n_text", "num_hidden_layers": 6, "num_kv_shared_layers": 0, "intermediate_size": 64},
    {"model_type": "kimi_linear", "head_dim": 72, "num_hidden_layers": 2, "linear_attn_config": {"head_dim": 64}},
    {"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 3, "short_conv_kernel_size": 2}},
    {
        "model_type": "kimi_linear",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 2,
        "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3]},
    },
    {"model_type": "qwen2_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
)


@pytest.mark.parametrize("config", OTHERS, ids=lambda config: "-".join([config["model_type"], *list(config)[1:]]))
def test_what_follows_from_other_keys_is_as_in_the_class(config: dict[str, Any]) -> None:
    assert differing(config) == {}
    assert str(of_class(config).dtype).removeprefix("torch.") == str(settings_of(config)["dtype"])


WRAPPERS = [name for name, row in TABLE["wrappers"].items() if row["text"] in ROWS]


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_model_of_a_wrapper_has_the_settings_of_its_own_class(name: str) -> None:
    assert text_of(CONFIG_MAPPING[name]) == TABLE["wrappers"][name]
    config = wrapper_config(name)
    wrapped = json.loads(json.dumps(config.to_dict(), default=str))
    own = config.get_text_config(decoder=True)
    settings = settings_of(wrapped)
    expected = settings_of(json.loads(json.dumps(own.to_dict(), default=str)))
    differing = {key for key in ROWS[own.model_type]["keys"] if settings[key] != expected[key]}
    assert differing <= {"tie_word_embeddings", "eos_token_id"}
    assert settings["eos_token_id"] == text_config(config).eos_token_id


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_embedding_is_tied_where_wrapper_and_text_model_say_so(name: str) -> None:
    says = ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False})
    text = {"model_type": TABLE["wrappers"][name]["text"]}
    for own, of_text in product(says, says):
        parts = {**own, "text_config": {**text, **of_text}}
        expected = text_config(CONFIG_MAPPING[name](**deepcopy(parts))).tie_word_embeddings
        assert settings_of({"model_type": name, **parts})["tie_word_embeddings"] == expected, parts


def test_older_wrappers_have_the_settings_of_the_text_model_among_their_own() -> None:
    rope = {"rope_theta": 12345.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    flat = {"model_type": "qwen2_vl", "hidden_size": 96, "num_attention_heads": 4, "vision_config": {}, **rope}
    expected = of_class(flat).get_text_config()
    settings = settings_of(flat)
    keys = ROWS["qwen2_vl_text"]["keys"]
    assert {key: settings[key] for key in keys} == {key: getattr(expected, key) for key in keys}


def test_a_text_model_may_have_the_type_of_its_first_release() -> None:
    config = {"model_type": "exaone4_5", "text_config": {"model_type": "exaone4_5_text", "hidden_size": 96}}
    assert of_class(config).get_text_config().model_type == "exaone4"
    assert settings_of(config)["model_type"] == "exaone4"


def test_a_type_without_defaults_is_refused() -> None:
    with pytest.raises(KeyError, match="unheard"):
        settings_of({"model_type": "unheard"})
