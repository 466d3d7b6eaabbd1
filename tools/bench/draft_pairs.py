"""Makes pairs of a model and a draft model out of the demo model, where no trained pair is at hand.

The model is the demo model with further layers behind its own. These add noise of a chosen size to the hidden state, so
how often the demo model guesses right can be chosen: always without noise, since they compute and add zeros. The text
is that of a trained model, and the times are those of real sizes.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from oaiserve.files import demo
from tests.models.decoders import byte_tokenizer, random_model, real_shape


def save_deepened(folder: Path, *, times: int, noise: float) -> None:
    """Save the demo model with so many times its layers. The output of further ones has `noise` times the usual
    weights, drawn at random."""
    model = _demo()
    layers = model.model.layers
    torch.manual_seed(1)
    for index in range(len(layers), times * len(layers)):
        layer = copy.deepcopy(layers[index % len(layers)])
        layer.self_attn.layer_idx = index
        for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            matrix.data = noise * matrix.data.float().std().to(matrix.dtype) * torch.randn_like(matrix)
        layers.append(layer)
    _save(model, folder)


def save_shortened(folder: Path, *, num_layers: int) -> None:
    """Save the demo model with its first layers only."""
    model = _demo()
    del model.model.layers[num_layers:]
    _save(model, folder)


def save_random(folder: Path, shape: str, *, num_layers: int | None = None) -> None:
    """Save a model of a real shape with random weights, or its first layers."""
    config = real_shape(shape)
    model = random_model(config, dtype=torch.bfloat16)
    if num_layers is not None:
        del model.model.layers[num_layers:]
        model.config.num_hidden_layers = num_layers
    model.save_pretrained(folder)
    byte_tokenizer(config.vocab_size).save_pretrained(folder)


def _demo() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo.fetched(), dtype=torch.bfloat16)  # type: ignore[no-any-return]


def _save(model: PreTrainedModel, folder: Path) -> None:
    model.config.num_hidden_layers = len(model.model.layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = ["full_attention"] * len(model.model.layers)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo.fetched()).save_pretrained(folder)
