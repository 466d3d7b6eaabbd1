"""The protocol of weights that the native step keeps in blocks, wherever they come from."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks, ExpertBlocks

# File, offset, dtype and shape of a tensor.
PlaceInFile = tuple[str, int, torch.dtype, list[int]]


class Weights(Protocol):
    """The weights of a model, under the names that its parameters have in transformers."""

    @property
    def rope_factors(self) -> Tensor | None:
        """Return the factors by which the frequencies of rotary embeddings are divided."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def blocks(self, name: str) -> Blocks | ExpertBlocks | None:
        """Return a matrix, or those of each expert, in blocks, or None for a tensor that is computed with as it is."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as the model's code has it."""
