"""What `kept.py` needs to know of the weights of a model's files, whatever their format is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from oaiserve.engine.model.cpu.blocks import Blocks, ExpertBlocks


class NotKept(Exception):
    """The weights of the files cannot stay as they are; the message says why."""


class KeptWeights(Protocol):
    """Weights by the names that transformers' model has for its parameters."""

    rope_factors: Tensor | None  # what the frequencies of rotary embeddings are divided by

    def names(self) -> set[str]:
        """Return the names of all parameters."""
        ...

    def formats(self) -> dict[str, int]:
        """Return how many matrices there are of each format."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the model's parameter."""
        ...

    def blocks(self, name: str) -> Blocks | ExpertBlocks | None:
        """Return a matrix, or those of each expert, in blocks, or None for a tensor that has none."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return the model's parameter, expanded."""
        ...


def refuse_unless_whole(weights: KeptWeights, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise NotKept unless the files have exactly the parameters of the model, in their shapes."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
    if differing := sorted(shapes.keys() ^ weights.names()):
        where = "the model" if differing[0] in shapes else "the file"
        raise NotKept(f"only {where} has a tensor '{differing[0]}'")
    for name, shape in shapes.items():
        if weights.shape(name) != shape:
            raise NotKept(f"its tensor '{name}' has the shape {weights.shape(name)}, and not {shape}")
