"""No setting of a model is ignored by mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.keys import EFFECTIVE, refuse_ignored, unknown
from oaiserve.engine.decoder.settings import settings_of
from tests.engine.decoder.test_experts import described as described_files
from tests.engine.decoder.test_families import KNOWN, described, settings_in
from tests.engine.executors.test_described_families import VARIANTS
from tests.engine.executors.test_described_families import described as described_settings
from tests.models.decoders import random_model
from tests.models.pinned import model_with_numbers, pinned_model
from tests.models.small_configs import config_of

# Read for all types, or to count tensors: another value makes another description, or none. Others have another name
# in one type, and are without effect or shown by tensors in the rest.
OF_ALL_TYPES = {
    *("architectures", "eos_token_id", "head_dim", "hidden_size", "max_position_embeddings", "model_type"),
    *("num_attention_heads", "num_deep_layers", "num_hidden_layers", "num_key_value_heads", "pad_token_id"),
    *("moe_num_experts", "n_routed_experts", "num_mtp_layers"),
    *("tie_word_embeddings", "vocab_size", "word_embed_proj_dim", "rope_axes", "qk_head_dim"),
    *("layers_block_type", "mamba_conv_bias", "mamba_d_conv", "mamba_dt_min", "mtp_layers_block_type"),
}


def test_the_list_has_the_keys_that_families_read(tmp_path: Path) -> None:
    read: set[str] = set()
    for name in KNOWN:
        folder = tmp_path / name
        pinned_model(name).save_pretrained(folder)
        settings = settings_in(folder)
        described(name, folder, settings=settings)
        read |= settings.read
    random_model(config_of("llama4_text")).save_pretrained(tmp_path)
    settings = settings_in(tmp_path)
    described_files(tmp_path, settings=settings)
    read |= settings.read
    for name in VARIANTS:
        folder = tmp_path / name
        model_with_numbers(config_of(name)).save_pretrained(folder)
        settings = settings_in(folder)
        described_settings(settings, folder)
        read |= settings.read
    assert read - OF_ALL_TYPES == EFFECTIVE


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
    described(name, tmp_path, settings=settings)
    refuse_ignored(settings)


@pytest.mark.parametrize(
    "stated",
    [
        {"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"]},
        {"attention_multiplier": 1.0, "final_logit_softcapping": 0},
        {"initializer_range": 0.1, "pretraining_tp": 4},
    ],
)
def test_a_setting_without_an_effect_is_ignored(stated: dict[str, Any]) -> None:
    settings = settings_of({"model_type": "llama", **stated})
    FAMILIES["llama"].facts(settings)
    refuse_ignored(settings)
    assert not unknown(settings)


def test_keys_that_no_type_has_are_listed() -> None:
    config = json.loads('{"model_type": "llama", "x_scale": 2.5, "x_off": false, "torch_dtype": "bfloat16"}')
    assert unknown(settings_of(config)) == ["x_scale"]
