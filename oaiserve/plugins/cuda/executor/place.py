"""Places a description on a GPU. Joins the matrices that have the same input, and stores each weight once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Matrix, Router
from oaiserve.engine.executors.reference.place import Placing, expanded
from oaiserve.engine.model.padded_head import aligned
from oaiserve.plugins.cuda.executor.device_matrices import ExpertMatrices, PackedMatrix, in_float8, joined, stacked
from oaiserve.plugins.cuda.executor.packed import packed

PLACED = Matrix(torch.empty(0, 0), None)  # stands for a matrix that is already on the device


@dataclass(frozen=True, slots=True)
class Adapted:
    """A range of a product's columns that adapters change, and the row of the module at which the range begins."""

    module: str
    begin: int
    end: int
    first_row: int


@dataclass(frozen=True, slots=True)
class JoinedMatrix:
    """Several matrices as one, whose rows are in sequence."""

    weight: Tensor | PackedMatrix  # [n, k], in the model's dtype or in blocks
    bias: Tensor | None  # [n], in the model's dtype
    adapted: list[Adapted]


class JoiningPlacing(Placing):
    """Places the parts of one description, one matrix at a time.

    Matrices in blocks stay in blocks if kernels can read them. Otherwise, they are expanded on the host.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, in_float8: bool = False) -> None:
        """With `in_float8`, joined and stacked matrices are rounded to 8-bit floats unless they are in blocks."""
        super().__init__(dtype, device)
        self._in_float8 = in_float8
        self._weights: dict[int, Tensor | PackedMatrix] = {}
        self.widest = 0

    @property
    def weight_bytes(self) -> int:
        """Return the total bytes of all matrices placed so far."""
        return sum(weight.nbytes for weight in self._weights.values())

    @property
    def packed(self) -> list[PackedMatrix]:
        """Return the matrices in blocks, and the experts' matrices in any form."""
        return [one for one in self._weights.values() if isinstance(one, PackedMatrix)]

    def part(self, part: Any, dtype: torch.dtype | None = None) -> Any:
        placed = super().part(part, dtype)
        if isinstance(placed, Matrix | Router):
            self._count(placed.weight)
        return placed

    def joined(self, matrices: list[Matrix]) -> JoinedMatrix:
        """Return one matrix with the rows of all these matrices."""
        weight: Tensor | PackedMatrix | None = self._packed(matrices)
        if weight is None:
            weight = self._expanded([matrices])[0]
        self._count(weight)
        self.widest = max(self.widest, *weight.shape)
        biases = self._biases([matrices])
        return JoinedMatrix(weight, None if biases is None else biases[0], _adapted(matrices))

    def embedding_and_head(self, embedding: Tensor | Blocks, head: Matrix) -> tuple[Tensor, JoinedMatrix]:
        """Return the embedding and the head. The head is padded with rows of zeros, so that rows of logits are aligned.

        If they are one matrix, both share the same memory.
        """
        rows, columns = head.weight.shape
        weight = torch.zeros(aligned(rows), columns, dtype=self.dtype, device=self.device)
        weight[:rows].copy_(expanded(head.weight, self.dtype))
        bias: Tensor | None = None
        if head.bias is not None:
            bias = torch.zeros(len(weight), dtype=self.dtype, device=self.device)
            bias[:rows].copy_(head.bias)
        self._count(weight)
        own = JoinedMatrix(weight, bias, _adapted([head]))
        if _are_tied(embedding, head.weight):
            return weight[:rows], own
        return self.part(embedding, self.dtype), own

    def stacked(self, experts: list[list[Matrix]]) -> ExpertMatrices:
        """Return the joined matrices of all experts as one tensor [experts, n, k]."""
        in_blocks = _unless_any_is_none(self._packed(matrices) for matrices in experts)
        matrices = stacked(in_blocks)
        if matrices is None:
            weights = self._expanded(experts)
            matrices = ExpertMatrices("dense", weights, weights, None)
        matrices = replace(matrices, bias=self._biases(experts))
        self._count(matrices)
        self.widest = max(self.widest, *matrices.shape)
        return matrices

    def _expanded(self, experts: list[list[Matrix]]) -> Tensor:
        """Return the joined matrices of all experts [experts, n, k] in the model's dtype."""
        sizes = [len(matrix.weight) for matrix in experts[0]]
        columns = experts[0][0].weight.shape[1]
        weights = torch.empty(len(experts), sum(sizes), columns, dtype=self.dtype, device=self.device)
        for of_expert, matrices in zip(weights, experts, strict=True):
            for rows, matrix in zip(of_expert.split(sizes), matrices, strict=True):
                rows.copy_(expanded(matrix.weight, self.dtype))
        return weights

    def _biases(self, experts: list[list[Matrix]]) -> Tensor | None:
        """Return the biases [experts, n], if there are any."""
        if all(matrix.bias is None for matrix in experts[0]):
            return None
        sizes = [len(matrix.weight) for matrix in experts[0]]
        biases = torch.zeros(len(experts), sum(sizes), dtype=self.dtype, device=self.device)
        for of_expert, matrices in zip(biases, experts, strict=True):
            for part, matrix in zip(of_expert.split(sizes), matrices, strict=True):
                if matrix.bias is not None:
                    part.copy_(matrix.bias)
        return biases

    def _packed(self, matrices: list[Matrix]) -> PackedMatrix | None:
        """Return the rows of all matrices in blocks on the device, or None if they have no blocks that kernels read."""
        return joined(_unless_any_is_none(map(self._in_blocks, matrices)))

    def _in_blocks(self, matrix: Matrix) -> PackedMatrix | None:
        if self._in_float8 and isinstance(matrix.weight, Tensor):
            return in_float8(matrix.weight.to(self.device))
        return packed(matrix.weight, self.device)

    def _count(self, weight: Any) -> None:
        self._weights[id(weight)] = weight


def _unless_any_is_none(matrices: Iterable[PackedMatrix | None]) -> list[PackedMatrix]:
    """Return all matrices, or None. They are read one by one, up to the first one without blocks."""
    in_blocks = []
    for matrix in matrices:
        if matrix is None:
            return []
        in_blocks.append(matrix)
    return in_blocks


def _are_tied(embedding: Tensor | Blocks, head: Tensor | Blocks) -> bool:
    if isinstance(embedding, Tensor) and isinstance(head, Tensor):
        return embedding.data_ptr() == head.data_ptr() and embedding.shape == head.shape
    return embedding is head


def _adapted(matrices: list[Matrix]) -> list[Adapted]:
    """Return the columns of the product that adapters change. Adjacent rows of one module become one range."""
    adapted: list[Adapted] = []
    begin = 0
    for matrix in matrices:
        end = begin + len(matrix.weight)
        part = Adapted(matrix.module, begin, end, matrix.first_row)
        if adapted and _follows(part, adapted[-1]):
            adapted[-1] = replace(adapted[-1], end=end)
        elif matrix.module:
            adapted.append(part)
        begin = end
    return adapted


def _follows(part: Adapted, last: Adapted) -> bool:
    """Return whether a range directly follows another one, in both the product and the module."""
    ends = last.module, last.end, last.first_row + last.end - last.begin
    return (part.module, part.begin, part.first_row) == ends
