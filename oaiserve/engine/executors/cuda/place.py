"""Places a description on a GPU. Matrices with the same input are joined there, so each weight is there once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import Matrix, Router
from oaiserve.engine.executors.reference.place import Placing, expanded
from oaiserve.engine.model.gpu.device_experts import ExpertMatrices


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

    weight: Tensor  # [n, k], in the model's dtype
    bias: Tensor | None  # [n], in the model's dtype
    adapted: list[Adapted]


class JoiningPlacing(Placing):
    """Places the parts of one description. Blocks are expanded on the host, a matrix at a time."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._weights: dict[int, Tensor] = {}

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all matrices placed so far."""
        return sum(weight.nbytes for weight in self._weights.values())

    def part(self, part: Any, dtype: torch.dtype | None = None) -> Any:
        placed = super().part(part, dtype)
        if isinstance(placed, Matrix | Router):
            self._count(placed.weight)
        return placed

    def joined(self, matrices: list[Matrix]) -> JoinedMatrix:
        """Return one matrix with the rows of all these."""
        sizes = [len(matrix.weight) for matrix in matrices]
        bias = None
        if any(matrix.bias is not None for matrix in matrices):
            bias = torch.zeros(sum(sizes), dtype=self.dtype, device=self.device)
            for numbers, matrix in zip(bias.split(sizes), matrices, strict=True):
                if matrix.bias is not None:
                    numbers.copy_(matrix.bias)
        if len(matrices) == 1:  # it may be tied to another one
            weight: Tensor = self.part(matrices[0].weight, self.dtype)
        else:
            weight = torch.empty(sum(sizes), matrices[0].weight.shape[1], dtype=self.dtype, device=self.device)
            for rows, matrix in zip(weight.split(sizes), matrices, strict=True):
                rows.copy_(expanded(matrix.weight, self.dtype))
        self._count(weight)
        return JoinedMatrix(weight, bias, _adapted(matrices))

    def stacked(self, experts: list[list[Matrix]]) -> ExpertMatrices:
        """Return the joined matrices of all experts as one tensor [experts, n, k]."""
        sizes = [len(matrix.weight) for matrix in experts[0]]
        columns = experts[0][0].weight.shape[1]
        weights = torch.empty(len(experts), sum(sizes), columns, dtype=self.dtype, device=self.device)
        has_bias = any(matrix.bias is not None for matrix in experts[0])
        bias = torch.zeros(weights.shape[:2], dtype=self.dtype, device=self.device) if has_bias else None
        for number, matrices in enumerate(experts):
            first = 0
            for matrix in matrices:
                rows = slice(first, first + len(matrix.weight))
                weights[number, rows].copy_(expanded(matrix.weight, self.dtype))
                if bias is not None and matrix.bias is not None:
                    bias[number, rows].copy_(matrix.bias)
                first = rows.stop
        self._count(weights)
        return ExpertMatrices("dense", weights, weights, None, bias=bias)

    def _count(self, weight: Any) -> None:
        self._weights[id(weight)] = weight


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
