"""What the native step needs of a model's weights to keep them in blocks, wherever they come from."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from oaiserve.engine.model.cpu.blocks import Blocks


class Weights(Protocol):
    """The weights of a model, under the names that its parameters have in transformers."""

    @property
    def rope_factors(self) -> Tensor | None:
        """What the frequencies of rotary embeddings are divided by."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def blocks(self, name: str) -> Blocks | None:
        """Return a matrix in blocks, or None for a tensor that is computed with as it is."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as the model's code has it."""
