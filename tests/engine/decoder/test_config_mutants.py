"""Settings that once made a wrong description, found by tools.config_mutants."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.keys import refuse_ignored
from tests.engine.decoder.test_expert_logits import TOLERANCE, error_of_files
from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.models.decoders import random_model
from tests.models.described import decoder_in, settings_in
from tests.models.small_configs import config_of
from tests.models.wrappers import random_wrapper


@pytest.mark.parametrize("layer_types", [["full_attention"] * 3, ["sliding_attention", "full_attention"] * 2])
def test_mistral_with_types_of_layers_is_ministral(layer_types: list[str], tmp_path: Path) -> None:
    config_of("mistral", sliding_window=6, num_hidden_layers=len(layer_types)).save_pretrained(tmp_path)
    change(tmp_path, layer_types=layer_types)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), attn_implementation="eager")
    assert type(model).__name__ == "MinistralForCausalLM"
    model.save_pretrained(tmp_path)
    change(tmp_path, model_type="mistral", layer_types=layer_types)
    assert error_of_files(model.eval(), tmp_path) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("bamba", {"mamba_conv_bias": False}),
        ("bamba", {"mamba_proj_bias": True}),
        ("falcon_h1", {"mamba_conv_bias": False}),
        ("falcon_h1", {"mamba_proj_bias": True}),
        ("falcon_h1", {"projectors_bias": True}),
        ("granitemoehybrid", {"mamba_conv_bias": False}),
        ("lfm2", {"conv_bias": True}),
        ("lfm3", {"conv_bias": True}),
        ("mamba2", {"use_bias": True}),
        ("mamba2", {"use_conv_bias": False}),
        ("nemotron_h", {"mlp_bias": True}),  # The first layer with attention has no such bias.
        ("nemotron_h", {"use_bias": True}),
        ("nemotron_h", {"use_conv_bias": False}),
    ],
)
def test_biases_are_those_of_the_settings(name: str, stated: dict[str, Any], tmp_path: Path) -> None:
    make_model(config_of(name)).save_pretrained(tmp_path)
    decoder_in(tmp_path)
    change(tmp_path, **stated)
    with pytest.raises(NotKnown, match=f"sets {next(iter(stated))} to .*, but a layer"):
        decoder_in(tmp_path)


def change(folder: Path, **changes: Any) -> None:
    """Change keys of a config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cohere2", "chunked_attention"),
        ("gemma2", "conv"),
        ("gpt_oss", "mamba"),
        ("granitemoehybrid", "sliding_attention"),
        ("lfm2", "sliding_attention"),
        ("lfm3", "chunked_attention"),
        ("llama4_text", "sliding_attention"),
        ("olmo_hybrid", "sliding_attention"),
        ("qwen3_next", "sliding_attention"),
    ],
)
def test_types_of_layers_that_a_family_does_not_have_decline_the_description(
    name: str, kind: str, tmp_path: Path
) -> None:
    make_model(config_of(name)).save_pretrained(tmp_path)
    kinds = settings_in(tmp_path)["layer_types"]
    change(tmp_path, layer_types=[kind if one == "full_attention" else one for one in kinds[:-1]] + [kind])
    with pytest.raises(NotKnown, match="it has layers of type"):
        decoder_in(tmp_path)


@pytest.mark.parametrize(
    ("name", "stated", "reason"),
    [
        ("gpt2", {"add_cross_attention": True}, "it attends to another text"),
        ("opt", {"enable_bias": False}, "sets enable_bias to False, but a layer has such tensors"),
        ("stablelm", {"use_parallel_residual": True}, "its files and its use_parallel_residual disagree"),
    ],
)
def test_settings_of_older_families_that_exclude_tensors_decline_the_description(
    name: str, stated: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    make_model(FAMILIES[name]).save_pretrained(tmp_path)
    decoder_in(tmp_path)
    change(tmp_path, **stated)
    with pytest.raises(NotKnown, match=reason):
        decoder_in(tmp_path)


def test_numbers_of_rotary_tables_by_layer_type_decline_a_family_without_such_layers(tmp_path: Path) -> None:
    make_model(config_of("olmo_hybrid")).save_pretrained(tmp_path)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    change(tmp_path, rope_parameters={"full_attention": rope, "sliding_attention": rope})
    with pytest.raises(NotKnown, match="its rotary embeddings depend on the types of layers"):
        decoder_in(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("cohere2_moe", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("mellum", {"partial_rotary_factor": 0.5}),
    ],
)
def test_numbers_of_rotary_tables_that_a_class_does_not_read_are_ignored(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    few = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 4}
    make_model(config_of(name, **few)).save_pretrained(tmp_path)
    change(tmp_path, **changes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert error_of_files(model, tmp_path) < TOLERANCE


def test_a_limit_of_the_weights_of_experts_declines_the_description(tmp_path: Path) -> None:
    make_model(config_of("ernie4_5_moe")).save_pretrained(tmp_path)
    change(tmp_path, moe_norm_min=0.5)
    with pytest.raises(NotKnown, match="it limits what the weights of its experts are divided by"):
        decoder_in(tmp_path)


def test_a_window_of_no_tokens_declines_the_description(tmp_path: Path) -> None:
    make_model(config_of("qwen2_moe")).save_pretrained(tmp_path)
    change(tmp_path, layer_types=["full_attention", "sliding_attention", "full_attention"])
    with pytest.raises(NotKnown, match="windows of no tokens"):  # since use_sliding_window is false
        decoder_in(tmp_path)


def test_a_convolution_needs_to_know_how_many_tokens_it_looks_at(tmp_path: Path) -> None:
    make_model(config_of("bamba")).save_pretrained(tmp_path)
    change(tmp_path, mamba_d_conv=None)
    with pytest.raises(NotKnown, match="with None tokens in its settings"):
        decoder_in(tmp_path)


def test_a_head_that_differs_from_the_embedding_is_not_tied(tmp_path: Path) -> None:
    make_model(config_of("llama", tie_word_embeddings=False)).save_pretrained(tmp_path)
    change(tmp_path, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert error_of_files(model, tmp_path) < TOLERANCE


def test_glm_with_images_does_not_say_how_many_layers_guess_tokens(tmp_path: Path) -> None:
    random_wrapper("glm4v_moe").save_pretrained(tmp_path)
    assert len(decoder_in(tmp_path).layers) == 3


def test_types_of_layers_are_read_by_families_that_have_them(tmp_path: Path) -> None:
    """Nothing else reads them, so that they decline a description where they have no effect."""
    random_model(config_of("starcoder2")).save_pretrained(tmp_path)
    change(tmp_path, layer_types=["sliding_attention"] * 3)
    settings = settings_in(tmp_path)
    decoder_in(tmp_path, settings)
    with pytest.raises(NotKnown, match="layer_types"):
        refuse_ignored(settings)
