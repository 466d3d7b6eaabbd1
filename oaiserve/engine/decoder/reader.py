"""Reads the tensors of a decoder by their roles, from files of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Matrix, Norm, NotKnown
from oaiserve.engine.decoder.sources.names import Names, names_of


class Tensors(Protocol):
    """The tensors of one model, by paths such as `layers.3.q.weight`. Methods raise NotKnown for a missing tensor."""

    dtype: torch.dtype  # type of matrices that are not quantized
    bias_dtype: torch.dtype  # type of the biases of matrices: float32 in files that may be quantized
    has_norms_as_computed: bool  # norm weights and speeds of states are stored as used: not minus 1, not as logarithms
    names: Names  # names of modules on the hub

    def has(self, path: str) -> bool: ...

    def matrix(self, path: str) -> Tensor | Blocks:
        """Return a matrix [n, k]."""

    def stored(self, path: str) -> Tensor:
        """Return any tensor with the hub's order of rows and shape, in a dtype of the files or in float32."""

    def experts(self, path: str) -> list[Tensor | Blocks]:
        """Return the matrix [n, k] of each expert.

        The path is that of one tensor for all experts, such as `layers.3.experts.gate.weight`. Files may instead have a
        tensor for each expert, such as `layers.3.experts.0.gate.weight`.
        """

    def leave_out(self, path: str) -> None:
        """Count a tensor as read if it exists, or all tensors of a part of the model, such as `layers.61`."""

    def unread(self) -> list[str]:
        """Return the names of tensors that nothing has read."""

    def numbers(self, path: str) -> Tensor:
        """Return any tensor in float32, rounded to the dtype of the model. Vectors next to blocks are not rounded."""
        tensor = self.stored(path)
        if tensor.dim() == 1 and self.bias_dtype == torch.float32:
            return tensor.float()
        return tensor.to(self.dtype).float()

    def exact(self, path: str) -> Tensor:
        """Return any tensor unrounded: in the model's dtype if it is stored in that dtype, else in float32."""
        tensor = self.stored(path)
        if tensor.dtype == self.dtype:
            return tensor
        return tensor.float()

    def module(self, path: str) -> str:
        """Return the name by which adapters name a module."""
        return names_of(path, self.names)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormKind:
    """The properties of a family's norms that its files don't show."""

    epsilon: float
    subtracts_mean: bool = False
    adds_one: bool = False  # Add 1 to the weight: files on the hub store it minus 1.
    width_without_weights: int = 0  # width of the norms in WEIGHTLESS; 0: all norms have weights

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            raise NotKnown(f"the epsilon of its norms is {self.epsilon}")


# The norms to add for a family whose norms have no weights, since its files have no tensors for them.
WEIGHTLESS = ("attention_norm", "mlp_norm", "final_norm")


class Reader:
    """Reads the tensors of a decoder, or of the part of it whose paths begin with the same prefix."""

    def __init__(self, tensors: Tensors, place: str = "") -> None:
        self.tensors = tensors
        self._place = place

    def at(self, place: str) -> Reader:
        return Reader(self.tensors, f"{self._place}{place}.")

    def has(self, role: str) -> bool:
        """Return whether a module with this role exists and has a weight."""
        return self.tensors.has(f"{self._place}{role}.weight")

    def has_bias(self, role: str) -> bool:
        return self.tensors.has(f"{self._place}{role}.bias")

    def bias(self, role: str) -> Tensor | None:
        """Return the bias of a matrix, if there is one."""
        if self.has_bias(role):
            return self.numbers(f"{role}.bias").to(self.tensors.bias_dtype)
        return None

    def matrix(self, role: str) -> Matrix:
        path = f"{self._place}{role}"
        return Matrix(
            self.tensors.matrix(f"{path}.weight"),
            self.bias(role),
            self.tensors.module(path),
        )

    def matrix_or_none(self, role: str) -> Matrix | None:
        if self.has(role):
            return self.matrix(role)
        return None

    def experts(self, role: str) -> list[Matrix]:
        """Return the matrix of each expert. Adapters can't name these matrices."""
        weights = self.tensors.experts(f"{self._place}experts.{role}.weight")
        biases = self.numbers_or_none(f"experts.{role}.bias")
        if biases is None:
            return [Matrix(weight, None) for weight in weights]
        if len(biases) != len(weights):
            raise NotKnown(f"it has {len(weights)} experts with {len(biases)} biases")
        return [Matrix(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def norm(self, role: str, kind: NormKind) -> Norm:
        if kind.width_without_weights:
            return Norm(
                torch.ones(kind.width_without_weights, dtype=torch.float32), None, kind.epsilon, kind.subtracts_mean
            )
        path = f"{self._place}{role}"
        weight = self.tensors.numbers(f"{path}.weight")
        if weight.dim() > 1:
            raise NotKnown(f"its norm '{self.tensors.module(path)}' has weights of its own for each head")
        if kind.adds_one and not self.tensors.has_norms_as_computed:
            weight = weight + 1
        bias = f"{path}.bias"
        return Norm(
            weight, self.tensors.numbers(bias) if self.tensors.has(bias) else None, kind.epsilon, kind.subtracts_mean
        )

    def norm_or_none(self, role: str, kind: NormKind) -> Norm | None:
        if kind.width_without_weights:
            is_there = role in WEIGHTLESS
        else:
            is_there = self.has(role)
        if is_there:
            return self.norm(role, kind)
        return None

    def numbers(self, name: str) -> Tensor:
        """Return a parameter that isn't part of a module, in float32."""
        return self.tensors.numbers(f"{self._place}{name}")

    def numbers_or_none(self, name: str) -> Tensor | None:
        if self.tensors.has(f"{self._place}{name}"):
            return self.numbers(name)
        return None

    def module(self, role: str) -> str:
        return self.tensors.module(f"{self._place}{role}")

    def exact(self, name: str) -> Tensor:
        """Return a parameter without rounding it to the dtype of the model."""
        return self.tensors.exact(f"{self._place}{name}")

    def leave_out(self, role: str) -> None:
        """Count the weight and the bias of a module as read, if it exists."""
        self.tensors.leave_out(f"{self._place}{role}.weight")
        self.tensors.leave_out(f"{self._place}{role}.bias")

    def in_dtype(self, name: str) -> Tensor:
        return self.numbers(name).to(self.tensors.dtype)
