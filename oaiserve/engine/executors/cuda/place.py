"""Places a description on a GPU. Matrices with the same input are joined there, and each weight is there once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Matrix, Router
from oaiserve.engine.executors.cuda.packed import packed
from oaiserve.engine.executors.reference.place import Placing, expanded
from oaiserve.engine.model.gpu.device_experts import ExpertMatrices, stacked
from oaiserve.engine.model.gpu.device_matrices import PackedMatrix, joined
from oaiserve.engine.model.padded_head import aligned

PLACED = Matrix(torch.empty(0, 0), None)  # in place of a matrix that is on the device already


@dataclass(frozen=True, slots=True)
class Adapted:
    """Numbers of a product that adapters add to, and the rows of a module that make them."""

    module: str
    begin: int  # of the numbers
    end: int
    first_row: int


@dataclass(frozen=True, slots=True)
class JoinedMatrix:
    """Matrices whose rows follow each other."""

    weight: Tensor | PackedMatrix  # [n, k], in the model's dtype or in blocks
    bias: Tensor | None  # [n], in the model's dtype
    adapted: list[Adapted]


class JoiningPlacing(Placing):
    """Places the parts of one description, a matrix at a time.

    Matrices in blocks stay so if kernels can read them, and are expanded on the host otherwise. Without `takes_float8`,
    those in floats of eight bits are, too.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, takes_float8: bool = True) -> None:
        super().__init__(dtype, device)
        self._takes_float8 = takes_float8
        self._weights: dict[int, Tensor | PackedMatrix] = {}
        self.widest = 0

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all matrices placed so far."""
        weights = self._weights.values()
        return sum(one.num_bytes if isinstance(one, PackedMatrix) else one.nbytes for one in weights)

    @property
    def packed(self) -> list[PackedMatrix]:
        """Return the matrices in blocks, and those of experts in any form."""
        return [one for one in self._weights.values() if isinstance(one, PackedMatrix)]

    def part(self, part: Any, dtype: torch.dtype | None = None) -> Any:
        placed = super().part(part, dtype)
        if isinstance(placed, Matrix | Router):
            self._count(placed.weight)
        return placed

    def joined(self, matrices: list[Matrix]) -> JoinedMatrix:
        """Return one matrix with the rows of all these."""
        sizes = [len(matrix.weight) for matrix in matrices]
        columns = matrices[0].weight.shape[1]
        bias = None
        if any(matrix.bias is not None for matrix in matrices):
            bias = torch.zeros(sum(sizes), dtype=self.dtype, device=self.device)
            for numbers, matrix in zip(bias.split(sizes), matrices, strict=True):
                if matrix.bias is not None:
                    numbers.copy_(matrix.bias)
        weight: Tensor | PackedMatrix | None = self._packed(matrices)
        if weight is None:
            weight = torch.empty(sum(sizes), columns, dtype=self.dtype, device=self.device)
            for rows, matrix in zip(weight.split(sizes), matrices, strict=True):
                rows.copy_(expanded(matrix.weight, self.dtype))
        self._count(weight)
        self.widest = max(self.widest, sum(sizes), columns)
        return JoinedMatrix(weight, bias, _adapted(matrices))

    def embedding_and_head(self, embedding: Tensor | Blocks, head: Matrix) -> tuple[Tensor, JoinedMatrix]:
        """Return the embedding and the head, which has rows of zeros at its end so that rows of logits are aligned.

        If they are one matrix, both have the same memory.
        """
        rows, columns = head.weight.shape
        weight = torch.zeros(aligned(rows), columns, dtype=self.dtype, device=self.device)
        weight[:rows].copy_(expanded(head.weight, self.dtype))
        bias: Tensor | None = None
        if head.bias is not None:
            bias = torch.zeros(len(weight), dtype=self.dtype, device=self.device)
            bias[:rows].copy_(head.bias)
        self._count(weight)
        table = weight[:rows] if _are_tied(embedding, head.weight) else self.part(embedding, self.dtype)
        return table, JoinedMatrix(weight, bias, _adapted([head]))

    def stacked(self, experts: list[list[Matrix]]) -> ExpertMatrices:
        """Return the joined matrices of all experts as one tensor [experts, n, k]."""
        sizes = [len(matrix.weight) for matrix in experts[0]]
        columns = experts[0][0].weight.shape[1]
        bias: Tensor | None = None
        if any(matrix.bias is not None for matrix in experts[0]):
            bias = torch.zeros(len(experts), sum(sizes), dtype=self.dtype, device=self.device)
            for numbers, matrices in zip(bias, experts, strict=True):
                for part, matrix in zip(numbers.split(sizes), matrices, strict=True):
                    if matrix.bias is not None:
                        part.copy_(matrix.bias)
        found = self._stacked_blocks(experts)
        if found is None:
            weights = torch.empty(len(experts), sum(sizes), columns, dtype=self.dtype, device=self.device)
            for of_expert, matrices in zip(weights, experts, strict=True):
                for rows, matrix in zip(of_expert.split(sizes), matrices, strict=True):
                    rows.copy_(expanded(matrix.weight, self.dtype))
            found = ExpertMatrices("dense", weights, weights, None)
        found = replace(found, bias=bias)
        self._count(found)
        self.widest = max(self.widest, sum(sizes), columns)
        return found

    def _stacked_blocks(self, experts: list[list[Matrix]]) -> ExpertMatrices | None:
        """Return the matrices of all experts in blocks, or None if they have none that kernels read."""
        found: list[PackedMatrix] = []
        for matrices in experts:
            one = self._packed(matrices)
            if one is None:
                return None
            found.append(one)
        return stacked(found)

    def _packed(self, matrices: list[Matrix]) -> PackedMatrix | None:
        """Return the rows of all these in blocks on the device, or None if they have none that kernels read."""
        found: list[PackedMatrix] = []
        for matrix in matrices:
            one = packed(matrix.weight, self.device, takes_float8=self._takes_float8)
            if one is None:
                return None
            found.append(one)
        return found[0] if len(found) == 1 else joined(found)

    def _count(self, weight: Any) -> None:
        self._weights[id(weight)] = weight


def _are_tied(embedding: Tensor | Blocks, head: Tensor | Blocks) -> bool:
    if isinstance(embedding, Tensor) and isinstance(head, Tensor):
        return embedding.data_ptr() == head.data_ptr() and embedding.shape == head.shape
    return embedding is head


def _adapted(matrices: list[Matrix]) -> list[Adapted]:
    """Return what adapters add to. Matrices that follow each other in one module are added to as one."""
    adapted: list[Adapted] = []
    begin = 0
    for matrix in matrices:
        end = begin + len(matrix.weight)
        last = adapted[-1] if adapted else None
        if last is not None and (last.module, last.end, last.first_row + last.end - last.begin) == (
            matrix.module,
            begin,
            matrix.first_row,
        ):
            adapted[-1] = replace(last, end=end)
        elif matrix.module:
            adapted.append(Adapted(matrix.module, begin, end, matrix.first_row))
        begin = end
    return adapted
