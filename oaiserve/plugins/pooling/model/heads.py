"""Heads: functions of the hidden states of a step's texts, with one row for each text.

A head takes the hidden states of all tokens in one row, and the texts' lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from oaiserve.checkpoints.checkpoint import conversion
from oaiserve.errors import StartupError

Head = Callable[[torch.Tensor, list[int]], torch.Tensor]  # ([T, hidden], lengths) -> [texts, size], float32

_ACTIVATIONS: dict[str, type[torch.nn.Module]] = {
    name: getattr(torch.nn, name) for name in ("Identity", "Tanh", "Sigmoid", "ReLU", "GELU", "SiLU", "LeakyReLU")
}


def pool(hidden: torch.Tensor, lengths: list[int], mode: str) -> torch.Tensor:
    if mode in ("cls", "lasttoken"):
        ends = torch.tensor(lengths, device=hidden.device).cumsum(0)
        if mode == "cls":
            rows = ends - torch.tensor(lengths, device=hidden.device)
        else:
            rows = ends - 1
        return hidden[rows]
    return torch.stack([_pooled(text, mode) for text in hidden.float().split(lengths)])


def _pooled(text: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "max":
        return text.amax(0)
    if mode == "weightedmean":  # Later tokens have seen more of the text.
        weights = torch.arange(1, len(text) + 1, device=text.device, dtype=text.dtype)
        return weights @ text / weights.sum()
    if mode == "mean_sqrt_len_tokens":
        return text.sum(0) / math.sqrt(len(text))
    return text.mean(0)


def embedding_head(mode: str, dense: list[torch.nn.Module]) -> Head:
    def head(hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        vectors = pool(hidden, lengths, mode).float()
        for layer in dense:
            vectors = layer(vectors)
        return vectors

    return head


class Dense(torch.nn.Module):
    """sentence-transformers' linear layer after the pooling. With `use_residual`, its input is added to its output."""

    def __init__(
        self, sizes: tuple[int, int], activation: torch.nn.Module, *, has_bias: bool, adds_input: bool
    ) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(*sizes, bias=has_bias)
        self.activation = activation
        self.residual: torch.nn.Module | None = None
        if adds_input and sizes[0] == sizes[1]:
            self.residual = torch.nn.Identity()
        elif adds_input:
            self.residual = torch.nn.Linear(*sizes, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.activation(self.linear(vectors))
        if self.residual is not None:
            output = output + self.residual(vectors)
        return output


def load_dense(config: dict[str, Any], weights: Path | None, name: str) -> torch.nn.Module:
    """Return a linear layer after the pooling, with its activation. Raises StartupError."""
    for key in ("module_input_name", "module_output_name"):
        if (value := config.get(key) or "sentence_embedding") != "sentence_embedding":
            raise StartupError(f"'{name}' cannot be served: a dense layer of it is for {value!r} ({key}), not vectors.")
    if weights is None:
        raise StartupError(
            f"'{name}' cannot be served: a dense layer of it has no model.safetensors. If it has a pytorch_model.bin, "
            f"convert that in its folder with: {conversion(Path('pytorch_model.bin'), 'model.safetensors')}"
        )
    kind = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise StartupError(f"'{name}' cannot be served: the activation {kind!r} of a dense layer is not known.")
    layer = Dense(
        (int(config["in_features"]), int(config["out_features"])),
        _ACTIVATIONS[kind](),
        has_bias=bool(config.get("bias", True)),
        adds_input=bool(config.get("use_residual", False)),
    )
    layer.load_state_dict({key: value.float() for key, value in load_file(weights).items()})
    return layer.eval()


def score_head(model: PreTrainedModel) -> Head:
    """Return the head of a classifier, whose place in the model depends on the family. Loading a model checks it."""
    parts: Any = model._modules
    pooler: Any = getattr(model.base_model, "pooler", None)
    mode = str(getattr(model.config, "classifier_pooling", "cls"))

    def logits(hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        scores: torch.Tensor
        if "score" in parts:  # decoder-only models
            scores = parts["score"](pool(hidden, lengths, "lasttoken"))
        elif pooler is not None:  # BERT
            scores = parts["classifier"](pooler(pool(hidden, lengths, "cls")[:, None]))
        elif "head" in parts:  # ModernBERT
            scores = parts["classifier"](parts["head"](pool(hidden, lengths, mode).to(hidden.dtype)))
        else:  # RoBERTa
            scores = parts["classifier"](pool(hidden, lengths, "cls")[:, None])
        return scores.float()

    return logits


def score_activation(config: Any, name: str, stated: str | None = None) -> torch.nn.Module:
    """Return the function from the logit of a cross-encoder to its score: the stated one, the configuration's, or a
    sigmoid."""
    stated = stated or (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    stated = stated or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    kind = str(stated).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise StartupError(f"'{name}' cannot be served for scores: the activation {kind!r} is not known.")
    return _ACTIVATIONS[kind]()
