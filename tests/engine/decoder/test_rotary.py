"""Rotary tables are, bit for bit, those of transformers' modules and those of the pinned descriptions."""

import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from oaiserve.engine.decoder.description import NotKnown, RotaryTable
from oaiserve.engine.decoder.rotary import query_factors, rotary_table
from oaiserve.engine.decoder.settings import settings_of
from oaiserve.engine.model.transformers_files.wrapper import text_config
from tests.engine.decoder.rotary_modules import (
    LLAMA3,
    LONG,
    ORIGINAL_KEY,
    ROTATING,
    SHORT,
    assert_equal,
    config_with,
    kinds_of,
    module_of,
    of_module,
    rotating_types,
    text_module_of,
)
from tests.engine.decoder.test_settings import WRAPPERS, of_class
from tests.models.fingerprints import text_of_table
from tests.models.pinned import PINNED, pinned_text
from tests.models.wrappers import wrapper_config

INTERLEAVED = ("cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium")


def settings_in(config: PreTrainedConfig) -> dict[str, Any]:
    return settings_of(json.loads(json.dumps(config.to_dict(), default=str)))


def tables_of(settings: dict[str, Any], length: int) -> list[RotaryTable]:
    """Make the tables of all kinds of layers."""
    is_interleaved = settings["model_type"] in INTERLEAVED or bool(settings.get("rope_interleave"))
    kinds = sorted(set(settings.get("layer_types") or ["full_attention"]))
    tables = [rotary_table(settings, length, layer_type=kind, is_interleaved=is_interleaved) for kind in kinds]
    return [table for table in tables if table is not None]


@pytest.mark.parametrize("name", PINNED)
def test_tables_are_those_of_the_pinned_descriptions(name: str) -> None:
    lines = [line.split(" ", 1) for line in pinned_text(name).splitlines()]
    (length,) = (int(value) for key, value in lines if key == "max_model_len")
    expected = {value for key, value in lines if key.startswith("table.")}
    settings = settings_in(PINNED[name].config)
    tables = tables_of(settings, length)
    texts = {text_of_table(table) for table in (*tables, query_factors(settings, length)) if table is not None}
    assert texts == expected


@pytest.mark.parametrize("name", ROTATING)
def test_tables_of_all_kinds_are_those_of_the_modules_at_all_lengths(name: str) -> None:
    for kind in kinds_of(name):
        config = config_with(name, kind)
        settings = settings_of(config)
        module = text_module_of(config)
        for layer_type in rotating_types(settings):
            changes = kind in ("dynamic", "longrope") and layer_type == "full_attention"
            last = {"dynamic": LONG, "longrope": SHORT}[kind] if changes else 2 * LONG
            for length in (8, SHORT, last):
                positions = torch.arange(min(length, last))
                table = rotary_table(settings, len(positions), layer_type=layer_type)
                assert_equal(table, of_module(module, positions, layer_type))
            if changes:
                with pytest.raises(ValueError, match=f"change beyond {last} positions, and {last + 1} are needed"):
                    rotary_table(settings, last + 1, layer_type=layer_type)
                cosines, _ = of_module(module, torch.arange(last + 1), layer_type)
                assert not torch.equal(table.cosines, cosines[:last])


@pytest.mark.parametrize("name", ROTATING)
def test_a_part_of_each_head_is_rotated_as_in_the_module_or_refused(name: str) -> None:
    for kind in kinds_of(name):
        config = config_with(name, kind, partial_rotary_factor=0.5)
        settings = settings_of(config)
        expected = of_module(text_module_of(config), torch.arange(8), "full_attention")
        actual = table_or_refusal(settings)
        if isinstance(actual, str):  # since the module ignores it
            assert "its partial_rotary_factor is 0.5" in actual
            actual = rotary_table(settings_of(config_with(name, kind)), 8, layer_type="full_attention")
        assert_equal(actual, expected)


def table_or_refusal(settings: dict[str, Any]) -> RotaryTable | str | None:
    try:
        return rotary_table(settings, 8, layer_type="full_attention")
    except NotKnown as error:
        return str(error)


# -- files as they are published, with the longest sequence that is compared

YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1}
OF_FACTORS = {"short_factor": [1 + pair / 100 for pair in range(48)], "long_factor": [1.0 + pair for pair in range(48)]}


def published(name: str, length: int, scaling: dict[str, Any] | None = None, **keys: Any) -> Any:
    scaled = {} if scaling is None else {"rope_scaling": scaling}
    return pytest.param(length, {"model_type": name, **keys, **scaled}, id=name)


PUBLISHED = (
    published(
        "llama", 20000, {**LLAMA3, ORIGINAL_KEY: 8192, "rope_type": "llama3"}, rope_theta=500000.0, hidden_size=4096
    ),
    published("qwen2", 40000, {"type": "yarn", "factor": 4.0, ORIGINAL_KEY: 32768}, rope_theta=1000000.0),
    published("deepseek_v3", 5000, {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, ORIGINAL_KEY: 4096}),
    published("deepseek_v2", 5000, {**YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.8, ORIGINAL_KEY: 4096}),
    published("gpt_oss", 5000, {**YARN, "factor": 32.0, ORIGINAL_KEY: 4096, "truncate": False}, rope_theta=150000),
    published(
        "phi3",
        4096,
        {"type": "longrope", **OF_FACTORS},
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
    ),
    published(
        "gemma3_text", 9000, {"rope_type": "linear", "factor": 8.0}, rope_theta=1000000.0, rope_local_base_freq=10000.0
    ),
    published("gemma4_text", 9000),
    published("lfm3", 9000),
    published("ministral3", 20000),
    published("olmo3", 9000, {**YARN, "factor": 8.0, ORIGINAL_KEY: 8192, "attention_factor": 1.2079441541679836}),
    published(
        "hunyuan_v1_dense",
        9000,
        {**YARN, "type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0},
        head_dim=128,
        max_position_embeddings=32768,
    ),
    published("gpt_neox", 2048, rotary_pct=0.5, rotary_emb_base=20000),
    published("minimax_m2", 9000, rotary_dim=64, rope_theta=5000000),
    published("qwen2_vl_text", 9000, {"type": "mrope", "mrope_section": [16, 24, 24]}),
)


@pytest.mark.parametrize(("length", "config"), PUBLISHED)
def test_tables_of_published_files_are_those_of_the_modules(length: int, config: dict[str, Any]) -> None:
    settings = settings_of(config)
    module = text_module_of(config)
    rows = torch.cat([torch.arange(0, length, 199), torch.arange(length - 20, length)])
    for layer_type in rotating_types(settings):
        table = rotary_table(settings, length, layer_type=layer_type)
        assert_equal(table, of_module(module, rows, layer_type), rows)


@pytest.mark.parametrize("name", [name for name in WRAPPERS if hasattr(text_config(wrapper_config(name)), "rope_axes")])
def test_pairs_are_rotated_by_the_axes_that_the_module_has(name: str) -> None:
    config = wrapper_config(name)
    axes = rotary_table(settings_in(config), 32).axes
    assert_axes(settings_in(config), module_of(config.get_text_config(decoder=True)))
    assert axes.tolist() == text_config(config).rope_axes[: len(axes)]


@pytest.mark.parametrize(("name", "section"), [("qwen3_vl_text", [12, 10, 10]), ("qwen2_vl_text", [10, 8, 8, 6])])
def test_sections_may_be_of_different_sizes_and_more_than_three(name: str, section: list[int]) -> None:
    config = config_with(name, "default", mrope_section=section)
    assert_axes(settings_of(config), module_of(of_class(config)))


def assert_axes(settings: dict[str, Any], module: Any) -> None:
    """Compare a token whose positions of time, height and width differ."""
    positions = torch.tensor([5, 9, 14])
    table = rotary_table(settings, 32)
    of_token = [part[positions[table.axes], torch.arange(len(table.axes))] for part in (table.cosines, table.sines)]
    for each, (expected,) in zip(of_token, module(torch.zeros(1), positions[:, None, None]), strict=True):
        twice = (torch.cat([each, each]), each.repeat_interleave(2))
        assert any(torch.equal(one, expected[0]) for one in twice)
