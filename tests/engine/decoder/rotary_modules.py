"""transformers' own rotary modules, which are the oracle of rotary tables, and small config.json files for them."""

from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_MAPPING, PreTrainedConfig

from oaiserve.engine.decoder.description import RotaryTable
from oaiserve.engine.decoder.settings import settings_of
from tests.engine.decoder.test_settings import ROWS, of_class

SHORT = 64  # the original length of models whose frequencies are scaled
LONG = 4 * SHORT
ORIGINAL_KEY = "original_max_position_embeddings"
ORIGINAL = {ORIGINAL_KEY: SHORT}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, **ORIGINAL},
    "longrope": ORIGINAL,
    "proportional": {"partial_rotary_factor": 0.25},
}
SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "global_head_dim": 64,
    "max_position_embeddings": LONG,
    "position_embedding_type": "rope",
}
BY_LAYER_TYPE = ("gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "lfm3", "mellum", "olmo3")
ROTATING = [name for name, row in ROWS.items() if "rope_theta" in row or "rope_parameters" in row["keys"]]
MODULES = {
    "qwen2_5_omni_text": ("qwen2_5_omni", "Qwen2_5OmniRotaryEmbedding"),
    "qwen3_omni_moe_text": ("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextRotaryEmbedding"),
}


def config_with(name: str, kind: str, **rope: Any) -> dict[str, Any]:
    """Return the config.json of a type whose full layers have rotary embeddings of this kind."""
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind], **rope}
    keys = ROWS[name]["keys"]
    sizes = SIZES | {key: value for key, value in {"qk_rope_head_dim": 64, **ORIGINAL}.items() if key in keys}
    config = {"model_type": name, **sizes, "rope_parameters": parameters}
    pairs = int(64 * settings_of(config)["rope_parameters"].get("partial_rotary_factor", 1.0)) // 2
    if kind == "longrope":
        parameters |= {"short_factor": [1 + pair / 8 for pair in range(pairs)], "long_factor": [4.0] * pairs, **rope}
    if name in BY_LAYER_TYPE:
        of_windows = {"rope_type": "default", "rope_theta": 500.0}
        config["rope_parameters"] = {"sliding_attention": of_windows, "full_attention": parameters}
    return config


def rotating_types(settings: Mapping[str, Any]) -> set[str]:
    """Return the types of layers whose tables differ; in other models all layers count as full ones."""
    if settings["model_type"] not in BY_LAYER_TYPE:
        return {"full_attention"}
    return set(settings["layer_types"] or ()) & {"full_attention", "sliding_attention"}


def kinds_of(name: str) -> tuple[str, ...]:
    return ("default", "longrope") if name == "phi3" else tuple(KINDS)  # its class refuses others


def module_of(config: PreTrainedConfig) -> Any:
    """Make transformers' own module."""
    name = config.model_type
    if name in MODULES:
        package, of_class = MODULES[name]
        return getattr(import_module(f"transformers.models.{package}.modeling_{package}"), of_class)(config)
    model = MODEL_MAPPING[type(config)]
    members = vars(import_module(model.__module__)).items()
    (result,) = (kind for key, kind in members if key.endswith("RotaryEmbedding") and "Vision" not in key)
    return result(config)


def text_module_of(config: dict[str, Any]) -> Any:
    """Make transformers' own module for positions that are the same on all axes."""
    module = module_of(of_class(config))
    if hasattr(module, "mrope_section"):
        module.mrope_section = [len(module.inv_freq), 0, 0]
    return module


def of_module(module: Any, positions: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, pairs], which most modules have twice."""
    layer_types = [layer_type] if "layer_type" in signature(module.forward).parameters else []
    tables = module(torch.zeros(1), positions[None], *layer_types)
    if isinstance(tables, Tensor):
        return tables[0].real, tables[0].imag
    cosines, sines = (table[0] for table in tables)
    halves = [table.chunk(2, dim=-1) for table in (cosines, sines)]
    neighbours = [table.unflatten(-1, (-1, 2)).unbind(-1) for table in (cosines, sines)]
    for (cosine, again), (sine, sine_again) in (halves, neighbours):
        if torch.equal(cosine, again) and torch.equal(sine, sine_again):
            return cosine, sine
    return cosines, sines


def assert_equal(
    table: RotaryTable | None, expected: tuple[Tensor, Tensor], rows: Tensor | slice = slice(None)
) -> None:
    """Compare rows of a table, in which pairs that are never rotated may be missing."""
    assert table is not None
    cosines, sines = expected
    pairs = table.cosines.shape[1]
    assert torch.equal(table.cosines[rows], cosines[:, :pairs])
    assert torch.equal(table.sines[rows], sines[:, :pairs])
    assert (cosines[:, pairs:] == 1).all()
    assert (sines[:, pairs:] == 0).all()
    assert table.apart in (1, cosines.shape[1])
