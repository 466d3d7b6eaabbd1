"""Layers of models such as BGE-M3 that give each token of a text a weight, for a search by words, and a vector.

The formulas are those of FlagEmbedding's `EncoderOnlyEmbedderM3Model`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from oaiserve.checkpoints.checkpoint import conversion
from oaiserve.errors import StartupError

WEIGHTS = "sparse_linear"  # names of the layers' files, without their endings
VECTORS = "colbert_linear"


@dataclass(frozen=True, slots=True)
class TokenHeads:
    """The layers over the hidden states of a model that has such. Where it has none, a token's vector is its hidden
    state."""

    weights: torch.nn.Linear | None = None
    vectors: torch.nn.Linear | None = None

    def weigh(self, token_ids: Sequence[int], hidden: torch.Tensor, left_out: frozenset[int]) -> array[float]:
        """Return ids of tokens and their weights in turn, by id. A token that occurs often has its largest weight.

        `hidden` is [tokens, hidden]. Tokens of `left_out`, such as those around a text, have no weight.
        """
        assert self.weights is not None
        found = torch.relu(self.weights(hidden.float()))[:, 0].tolist()
        largest: dict[int, float] = {}
        for token_id, weight in zip(token_ids, found, strict=True):
            if token_id not in left_out and not weight <= largest.get(token_id, 0.0):  # NaN stays
                largest[token_id] = weight
        return array("f", [number for pair in sorted(largest.items()) for number in pair])

    def vectors_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the vectors [tokens, size] of the tokens, in float32. A layer of the model's own leaves out the first
        token, and makes all vectors of length 1."""
        if self.vectors is None:
            return hidden.float()
        return torch.nn.functional.normalize(self.vectors(hidden[1:].float()), dim=-1)


def load_token_heads(folder: Path, num_inputs: int, device: torch.device) -> TokenHeads:
    """Return the layers that a model's folder has for tokens whose hidden states have `num_inputs` numbers. Raises
    StartupError."""
    weights, vectors = (_load_linear(folder / f"{name}.safetensors", num_inputs, device) for name in (WEIGHTS, VECTORS))
    if weights is not None and weights.out_features != 1:
        raise StartupError(f"'{folder / WEIGHTS}.safetensors' cannot be used: a token would have several weights.")
    return TokenHeads(weights, vectors)


def _load_linear(path: Path, num_inputs: int, device: torch.device) -> torch.nn.Linear | None:
    if not path.is_file():
        return None
    tensors = {key: value.float() for key, value in load_file(path).items()}
    weight = tensors.get("weight")
    if weight is None or weight.dim() != 2 or weight.shape[1] != num_inputs or tensors.keys() - {"weight", "bias"}:
        shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in tensors.items())
        raise StartupError(
            f"'{path}' cannot be used: it must have a matrix 'weight' [any, {num_inputs}] and perhaps a 'bias', and it "
            f"has {shapes or 'nothing'}."
        )
    layer = torch.nn.Linear(num_inputs, weight.shape[0], bias="bias" in tensors)
    layer.load_state_dict(tensors)
    return layer.to(device).eval()


def pickled_layers(folder: Path) -> list[str]:
    """Return a command for each layer that is there as a pickle only, which converts it."""
    names = [name for name in (WEIGHTS, VECTORS) if not (folder / f"{name}.safetensors").is_file()]
    paths = [folder / f"{name}.pt" for name in names]
    return [conversion(path, f"{path.stem}.safetensors") for path in paths if path.is_file()]
