"""The protocol of the weights in a model's files."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Weights(Protocol):
    """The weights of a model, under the names that its parameters have in transformers."""

    @property
    def rope_factors(self) -> Tensor | None:
        """Return the factors by which the frequencies of rotary embeddings are divided."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as the model's code has it."""
