"""No setting of a model is ignored by mistake."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.keys import effective, refuse_ignored, refuse_other_tensors, unknown
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import settings_of
from tests.engine.decoder.test_families import KNOWN
from tests.engine.executors.test_described_families import VARIANTS
from tests.models.decoders import random_model
from tests.models.described import decoder_in, settings_in
from tests.models.pinned import model_with_numbers, pinned_model
from tests.models.small_configs import config_of

# Read for all types, or to count tensors: another value makes another description, or none. Others have another name
# in one type, and are without effect or shown by tensors in the rest.
OF_ALL_TYPES = {
    *("architectures", "eos_token_id", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings"),
    "model_type",
    *("num_attention_heads", "num_deep_layers", "num_hidden_layers", "num_key_value_heads", "pad_token_id"),
    *("moe_num_experts", "n_routed_experts", "num_mtp_layers"),
    *("tie_word_embeddings", "vocab_size", "word_embed_proj_dim", "rope_axes", "qk_head_dim"),
    *("conv_L_cache", "conv_kernel", "layers_block_type", "linear_conv_kernel_dim", "mamba_d_conv", "mamba_dt_min"),
    *("mtp_layers_block_type", "vocab_size_per_layer_input"),
}


def test_the_list_has_the_keys_that_families_read(tmp_path: Path) -> None:
    read: set[str] = set()
    for name in KNOWN:
        folder = tmp_path / name
        pinned_model(name).save_pretrained(folder)
        settings = settings_in(folder)
        decoder_in(folder, settings)
        read |= settings.read
    random_model(config_of("llama4_text")).save_pretrained(tmp_path)
    settings = settings_in(tmp_path)
    decoder_in(tmp_path, settings)
    read |= settings.read
    for name in VARIANTS:
        folder = tmp_path / name
        model_with_numbers(config_of(name)).save_pretrained(folder)
        settings = settings_in(folder)
        decoder_in(folder, settings)
        read |= settings.read
    assert read - OF_ALL_TYPES == effective()


@pytest.mark.parametrize(
    ("model_type", "stated", "named"),
    [
        ("llama", {"attention_multiplier": 0.5}, "attention_multiplier"),
        ("llama", {"sliding_window": 64}, "sliding_window"),
        ("llama", {"multi_query": True}, "multi_query"),
        ("llama", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("granite", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_a_setting_of_another_family_declines_the_description(
    model_type: str, stated: dict[str, Any], named: str
) -> None:
    settings = settings_of({"model_type": model_type, **stated})
    FAMILIES[model_type].facts(settings)
    with pytest.raises(NotKnown, match=named):
        refuse_ignored(settings)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "lfm2_moe", "olmoe"])
def test_the_number_of_experts_is_told_by_tensors(name: str, tmp_path: Path) -> None:
    pinned_model(name).save_pretrained(tmp_path)
    settings = settings_in(tmp_path)
    decoder_in(tmp_path, settings)
    refuse_ignored(settings)


@pytest.mark.parametrize(
    ("model_type", "stated"),
    [
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}),
        ("starcoder2", {"activation_function": "gelu", "layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5}),
        ("starcoder2", {"rms_norm_eps": 1e-5, "scale_attn_weights": True}),
        ("deepseek_v3", {"topk_method": "noaux_tc"}),
    ],
)
def test_a_setting_under_several_names_or_with_its_usual_value_is_ignored(
    model_type: str, stated: dict[str, Any]
) -> None:
    settings = settings_of({"model_type": model_type, **stated})
    FAMILIES[model_type].facts(settings)
    refuse_ignored(settings)


def test_another_choice_of_experts_declines_the_description() -> None:
    settings = settings_of({"model_type": "deepseek_v3", "topk_method": "greedy"})
    with pytest.raises(NotKnown, match="greedy"):
        FAMILIES["deepseek_v3"].facts(settings)


@pytest.mark.parametrize(
    ("model_type", "stated", "has_biases", "is_refused"),
    [
        ("llama", {"attention_bias": False}, True, True),
        ("llama", {"attention_bias": True}, False, True),
        ("qwen2", {"attention_bias": True}, False, True),  # its class does not read the key
        ("qwen2", {"attention_bias": True}, True, False),
        ("qwen2", {"attention_bias": False}, True, False),
        ("phi", {"attention_bias": False}, True, False),
    ],
)
def test_biases_are_compared_with_the_settings_that_transformers_reads(
    model_type: str, stated: dict[str, Any], has_biases: bool, is_refused: bool
) -> None:
    settings = settings_of({"model_type": model_type, **stated})
    there = {"layers.0.q.weight", "layers.0.q.bias"} if has_biases else {"layers.0.q.weight"}
    tensors: Any = SimpleNamespace(has=there.__contains__)
    with pytest.raises(NotKnown, match="attention_bias") if is_refused else nullcontext():
        layers = [Reader(tensors, "layers.0.")]
        refuse_other_tensors(settings, layers, layers)
        refuse_ignored(settings)


@pytest.mark.parametrize(
    ("model_type", "stated"),
    [
        ("llama", {"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"]}),
        ("llama", {"attention_multiplier": 1.0, "final_logit_softcapping": 0}),
        ("llama", {"initializer_range": 0.1, "pretraining_tp": 4}),
        ("deepseek_v2", {"topk_method": "greedy", "n_group": 4, "topk_group": 2, "norm_topk_prob": True}),
        ("exaone_moe", {"mlp_layer_types": ["sparse"] * 32, "first_k_dense_replace": 2}),
        ("nemotron_h", {"mlp_bias": True}),  # the tensors decide
        ("nemotron_h", {"time_step_limit": [0.0, {"__float__": "Infinity"}]}),  # the default, as transformers writes it
    ],
)
def test_a_setting_without_an_effect_is_ignored(model_type: str, stated: dict[str, Any]) -> None:
    settings = settings_of({"model_type": model_type, **stated})
    FAMILIES[model_type].facts(settings)
    refuse_ignored(settings)
    assert not unknown(settings)


def test_keys_that_no_type_has_are_listed() -> None:
    config = json.loads('{"model_type": "llama", "x_scale": 2.5, "_name": "x", "x_off": false, "dtype": "float32"}')
    assert unknown(settings_of(config)) == ["x_scale"]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 5000},
        {"model_type": "minimax_m2", "rotary_dim": 64},
        {"model_type": "gemma3_text", "rope_local_base_freq": 5000.0, "cache_implementation": "hybrid"},
        {"model_type": "lfm2", "block_ff_dim": 1024},
        {"model_type": "qwen3_next", "full_attention_interval": 4},
        {"model_type": "phi", "partial_rotary_factor": 0.75},
        {"model_type": "gpt2", "task_specific_params": {"text-generation": {"max_length": 50}}},
        {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}, "image_token_id": 5, "hidden_size": 64},
    ],
    ids=lambda config: "-".join(config),
)
def test_keys_that_are_read_or_are_of_all_types_are_not_listed(config: dict[str, Any]) -> None:
    assert not unknown(settings_of(config))
