"""Gives small random models the statistics of trained ones, which random weights lack.

The sizes are those of real files: biases of keys up to 150, a token whose hidden state is hundreds of times that of
others, norm weights up to 60, and attention that is nearly one-hot.
"""

from collections.abc import Callable, Iterator

import torch
from torch.nn import Linear, Module
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_QUERIES_AND_KEYS = (
    *("q_proj", "k_proj", "query_key_value", "qkv_proj", "Wqkv", "q_b_proj", "c_attn"),
    *("query", "key", "q_lin", "k_lin", "qkv"),  # names in encoders
)
_FUSED = ("c_attn", "qkv_proj", "Wqkv", "qkv")
_NORMS_OF_HEADS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm")


def _projections(model: PreTrainedModel) -> Iterator[tuple[str, Module]]:
    """Yield the projections of queries and keys in all layers."""
    for name, module in model.named_modules():
        if isinstance(module, Linear | Conv1D) and name.rsplit(".", 1)[-1] in _QUERIES_AND_KEYS:
            yield name, module


def _large_biases(model: PreTrainedModel, draw: torch.Generator) -> None:
    for name, module in _projections(model):
        bias = module.bias
        if isinstance(bias, torch.Tensor):
            largest = 150.0 if name.endswith(("k_proj", "key", "k_lin")) else 80.0
            values = torch.randn(bias.shape, generator=draw) * 2
            # Where queries, keys and values follow each other, values keep small biases.
            num_large = len(values) * 2 // 3 if name.endswith(_FUSED) else len(values)
            outliers = torch.randperm(num_large, generator=draw)[: max(2, num_large // 10)]
            values[outliers] = (torch.rand(len(outliers), generator=draw) - 0.5) * 2 * largest
            bias.data.copy_(values)


def _massive_activations(model: PreTrainedModel, draw: torch.Generator) -> None:
    table = model.get_input_embeddings().weight.data
    size = float(table.float().std())
    table[3, 5] = 7500 * size
    table[3, 13] = -4000 * size


def _large_norms(model: PreTrainedModel, draw: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() and parameter.dim() == 1 and name.endswith("weight"):
            largest = 20 if any(of_head in name for of_head in _NORMS_OF_HEADS) else 60
            parameter.data.copy_(torch.rand(parameter.shape, generator=draw) ** 6 * largest)


def _sharp_attention(model: PreTrainedModel, draw: torch.Generator) -> None:
    for _, module in _projections(model):
        assert isinstance(module.weight, torch.Tensor)
        module.weight.data *= 6


STATISTICS: dict[str, Callable[[PreTrainedModel, torch.Generator], None]] = {
    "large biases": _large_biases,
    "massive activations": _massive_activations,
    "large norms": _large_norms,
    "sharp attention": _sharp_attention,
}


def give_outliers(model: PreTrainedModel, *kinds: str, seed: int = 1) -> PreTrainedModel:
    """Give a model the statistics of these kinds, in place; all of them if none is named."""
    draw = torch.Generator().manual_seed(seed)
    for kind in kinds or STATISTICS:
        STATISTICS[kind](model, draw)
    return model
