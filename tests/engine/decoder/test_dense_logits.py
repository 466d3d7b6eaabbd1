"""Dense families compute transformers' logits in float32, with another value of each setting of their classes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.settings import table
from tests.engine.decoder.test_expert_logits import TOLERANCE, error
from tests.engine.executors.native.small_models import make_model
from tests.models.small_configs import config_of, sizes_of

ROWS: dict[str, Any] = table()["types"]
TYPES = (
    *("arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
    *("gpt2", "gpt_bigcode", "gpt_neox", "granite", "granite_swa", "helium", "hunyuan_v1_dense", "internlm3"),
    *("iquestcoder", "jais2", "llama", "ministral", "ministral3", "mistral", "nemotron", "olmo", "olmo2", "olmo3"),
    *("opt", "persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    "vaultgemma",
)
# Settings that no computation of texts depends on, and sizes, which tensors have.
_WITHOUT_EFFECT = re.compile(
    "drop|pdrop|summary|initializer|init_std|_id$|use_cache|pretraining|reorder|in_fp32|is_decoder|max_position"
    "|n_positions|cross_attention|vocab_size|hidden_size|intermediate_size|n_embd|n_inner|_dim$|heads$|n_head|layers$"
    "|n_layer"
)
_FUNCTIONS = ("hidden_act", "hidden_activation", "activation_function")
# More than one setting at a time, where one needs another.
_TOGETHER: dict[str, tuple[dict[str, Any], ...]] = {
    "exaone4": ({"num_hidden_layers": 5, "sliding_window": 6},),
    "gemma3_text": ({"num_hidden_layers": 7, "sliding_window": 6},),
    "granite_swa": ({"layer_rope_theta": [0, 10000.0, 500.0]}, {"num_hidden_layers": 5, "sliding_window": 6}),
    "qwen2": ({"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},),
    "smollm3": ({"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 6},),
    "stablelm": ({"use_parallel_residual": True, "use_qkv_bias": True},),
}
_ALWAYS = {"opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}}
# What is not described, but left to transformers' own code.
_REFUSED = {
    "cohere": {"use_qk_norm"},
    "gemma3_text": {"use_bidirectional_attention"},
    "olmo": {"clip_qkv"},
    "opt": {"_remove_final_layer_norm", "do_layer_norm_before", "layer_norm_elementwise_affine"},
    "stablelm": {"qk_layernorm"},
}


@pytest.mark.parametrize("name", TYPES)
def test_each_setting_has_the_effect_that_it_has_in_transformers(name: str, tmp_path: Path) -> None:
    wrong: dict[str, float] = {}
    refused: set[str] = set()
    for changes in ({}, *_other_settings(name), *_TOGETHER.get(name, ())):
        keys = ", ".join(changes)
        model = make_model(config_of(name, **{**_ALWAYS.get(name, {}), **changes}))
        try:
            result = error(model, tmp_path / keys)
        except NotKnown:
            refused.add(keys)
        else:
            if result >= TOLERANCE:
                wrong[keys] = result
    assert wrong == {}
    assert refused == _REFUSED.get(name, set())


def _other_settings(name: str) -> Iterator[dict[str, Any]]:
    """Return another value of each key that a class has, and that it accepts."""
    sizes = sizes_of(name)
    for key, default in ROWS[name]["keys"].items():
        value = sizes.get(key, default)
        if key in _FUNCTIONS:
            yield {key: "gelu" if value != "gelu" else "silu"}
        elif not _WITHOUT_EFFECT.search(key):
            for changes in ({key: other} for other in _others(value)):
                try:
                    config_of(name, **changes)
                except Exception:  # each class refuses in its own way
                    continue
                yield changes
                break


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 or 1, value / 2, 1]
    return [True, 8, 2.0] if value is None else []
