"""Each number of rotary embeddings has the effect that it has in transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.rotary import query_factors, rotary_table, scaling_with_yarn
from oaiserve.engine.decoder.settings import settings_of
from tests.engine.decoder.rotary_modules import ORIGINAL_KEY, assert_equal, config_with, of_module, text_module_of
from tests.engine.decoder.test_settings import of_class
from tests.models.fingerprints import text_of_table

FACTORS = [1 + pair / 4 for pair in range(32)]
CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "linear": ({"factor": 2.5},),
    "dynamic": (),
    "proportional": ({"factor": 2.0},),
    "llama3": ({"factor": 32.0}, {"low_freq_factor": 2.0}, {"high_freq_factor": 8.0}, {ORIGINAL_KEY: 32}),
    "yarn": (
        {"factor": 40.0},
        {"factor": None, ORIGINAL_KEY: 32},
        {ORIGINAL_KEY: 32},
        {"beta_fast": 4.0},
        {"beta_slow": 3.0},
        {"attention_factor": 1.5},
        {"mscale": 0.7, "mscale_all_dim": 0.8},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"truncate": False},
        {"factor": 0.5},
        {ORIGINAL_KEY: 10**7, "beta_slow": 0.001},  # its ramp would end behind the last number
        {ORIGINAL_KEY: 6},  # its ramp is empty
    ),
    "longrope": (
        {"factor": 8.0},
        {"factor": 0.5},
        {"attention_factor": 1.5},
        {ORIGINAL_KEY: 32},
        {"short_factor": FACTORS},
    ),
}
WITHOUT_EFFECT = {
    "dynamic": {"factor": 2.1, "alpha": 50.0},
    "yarn": {"mscale": 2.0},
    "longrope": {"long_factor": FACTORS},
}


def table_and_oracle(config: dict[str, Any], kind: str) -> Tensor:
    """Make the cosines of 32 positions, which are those of transformers' function."""
    table = rotary_table(settings_of(config), 32)
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](of_class(config))
    angles = torch.arange(32)[:, None].float() * frequencies
    assert_equal(table, (angles.cos() * factor, angles.sin() * factor))
    return table.cosines


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (kind, change)
        for kind, changes in CHANGES.items()
        for change in (*changes, {"rope_theta": 500000.0}, {"rope_theta": 500000})
    ],
    ids=str,
)
def test_each_number_has_the_effect_that_it_has_in_transformers(kind: str, change: dict[str, Any]) -> None:
    cosines = table_and_oracle(config_with("llama", kind), kind)
    changed = table_and_oracle(config_with("llama", kind, **change), kind)
    assert not torch.equal(cosines, changed)


@pytest.mark.parametrize("kind", WITHOUT_EFFECT)
def test_numbers_without_an_effect_have_none(kind: str) -> None:
    change = WITHOUT_EFFECT[kind]
    cosines = table_and_oracle(config_with("llama", kind), kind)
    assert torch.equal(cosines, table_and_oracle(config_with("llama", kind, **change), kind))


@pytest.mark.parametrize("alpha", [50.0, 1000.0, 0])
def test_the_alpha_of_hunyuan_scales_theta(alpha: float) -> None:
    config = config_with("hunyuan_v1_dense", "dynamic", alpha=alpha)
    expected = of_module(text_module_of(config), torch.arange(32), "full_attention")
    assert_equal(rotary_table(settings_of(config), 32), expected)


def test_a_layer_types_own_truncation_is_ignored() -> None:
    config = config_with("olmo3", "yarn", truncate=False)
    expected = of_module(text_module_of(config), torch.arange(32), "full_attention")
    assert_equal(rotary_table(settings_of(config), 32, layer_type="full_attention"), expected)


def test_divisors_of_a_gguf_file_divide_the_frequencies() -> None:
    config = config_with("llama", "default")
    module = text_module_of(config)
    factors = torch.linspace(1, 8, len(module.inv_freq))
    module.inv_freq /= factors
    table = rotary_table(settings_of(config), 32, frequency_factors=factors)
    assert_equal(table, of_module(module, torch.arange(32), "full_attention"))


def test_layers_with_a_theta_of_their_own_have_their_own_tables() -> None:
    settings = settings_of(config_with("granite_swa", "linear"))
    other = settings_of(config_with("granite_swa", "linear", rope_theta=77.0))
    expected = rotary_table(other, 32)
    assert text_of_table(rotary_table(settings, 32, theta=77.0)) == text_of_table(expected)


@pytest.mark.parametrize(("beta", "original"), [(0.1, 8), (0.2, 8), (0.1, 16)])
def test_query_factors_are_those_of_ministral3(beta: float, original: int) -> None:
    config = config_with("ministral3", "yarn", llama_4_scaling_beta=beta, original_max_position_embeddings=original)
    expected = get_llama_4_attn_scale(torch.arange(40)[None], beta, original)[0, 0, :, 0]
    assert torch.equal(query_factors(settings_of(config), 40), expected)
    assert query_factors(settings_of(config), original) is None
    assert query_factors(settings_of(config_with("ministral3", "yarn")), 40) is None
    with pytest.raises(NotKnown, match="'llama' don't scale queries"):
        query_factors(settings_of({**config, "model_type": "llama"}), 40)


@pytest.mark.parametrize("kind", ["default", "yarn"])
@pytest.mark.parametrize("numbers", [{}, {"mscale_all_dim": 0.8}, {"mscale_all_dim": 1.0}, {"mscale_all_dim": 0}])
@pytest.mark.parametrize("factor", [0.5, 4.0, 40])
def test_scores_are_scaled_as_in_deepseek(kind: str, numbers: dict[str, float], factor: float) -> None:
    config = config_with("deepseek_v3", kind, factor=factor, **numbers)
    expected = yarn_apply_mscale(of_class(config).rope_parameters, 192**-0.5)
    assert scaling_with_yarn(settings_of(config), 192**-0.5) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2"},
        {"model_type": "mamba2"},
        {"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None}},
        {"model_type": "granitemoehybrid"},
        {"model_type": "mellum", "rope_parameters": {"full_attention": None}},
    ],
    ids=lambda config: config["model_type"],
)
def test_models_that_do_not_rotate_have_no_table(config: dict[str, Any]) -> None:
    assert rotary_table(settings_of(config), 8, layer_type="full_attention") is None


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "axial"}, "the kind of its rotary embeddings is 'axial'"),
        ({"rope_type": "default", "rope_theta": None}, "the rope_theta of its rotary embeddings is None"),
        ({"rope_type": "linear"}, "the factor of its rotary embeddings is None"),
        ({"rope_type": "linear", "factor": "4"}, "the factor of its rotary embeddings is 4"),
        ({"mrope_section": [16, 16]}, "its rotary embeddings have axes for 32 of 64 pairs"),
    ],
)
def test_parameters_without_a_known_effect_are_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(NotKnown, match=message):
        rotary_table(settings_of({"model_type": "llama", "rope_parameters": rope}), 8)
