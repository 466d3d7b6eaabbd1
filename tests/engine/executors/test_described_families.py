"""Families that are described from files alone: the reference computes transformers' logits in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.engine.decoder.dense import describe
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.mixers import state_shapes
from oaiserve.engine.decoder.model_spec import model_spec
from oaiserve.engine.decoder.settings import settings_of
from oaiserve.engine.decoder.sources.hub import HubTensors
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from tests.engine.executors.test_reference import TOLERANCE, case_of, error
from tests.engine.model.steps import CPU
from tests.models.pinned import model_with_numbers
from tests.models.small_configs import config_of

_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "lfm3": (
        {},
        {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True},
        {"num_hidden_layers": 6, "layer_types": None, "tie_word_embeddings": False, "attention_bias": True},
        {"conv_L_cache": 3, "norm_eps": 1e-3, "sliding_window": 9, "num_key_value_heads": 4},
    ),
    "nemotron_h": (
        {},
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
        {"use_bias": True, "use_conv_bias": False, "mlp_bias": True, "time_step_min": 0.3, "conv_kernel": 3},
        {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "n_routed_experts": 8},
        {"layer_norm_epsilon": 1e-3},
        {"num_experts_per_tok": 3},
        {"tie_word_embeddings": True},
        {"n_groups": 1},
        {"mlp_hidden_act": "silu", "mamba_head_dim": 32, "head_dim": 32, "num_key_value_heads": 4},
    ),
}
_CASES = [(name, changes) for name, variants in _VARIANTS.items() for changes in variants]


@pytest.mark.parametrize(("name", "changes"), _CASES, ids=[f"{name} {list(changes)}" for name, changes in _CASES])
@torch.inference_mode()
def test_logits_are_those_of_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = model_with_numbers(config_of(name, **changes))
    model.save_pretrained(tmp_path)
    settings = settings_of(json.loads((tmp_path / "config.json").read_text()))
    family = FAMILIES[name]
    decoder = describe(HubTensors(TensorFiles(tmp_path), family.names, torch.float32), settings, family, 128)
    shapes = state_shapes(decoder, torch.float32)
    spec = model_spec(settings, decoder, dtype=torch.float32, device=CPU, state_shapes=shapes)
    assert error(case_of(model, spec, decoder)) < TOLERANCE
