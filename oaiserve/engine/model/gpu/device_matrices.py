"""Stores matrices on a GPU as in the checkpoint: integers of 4 or 8 bits, and floats of 8 bits.

In plain torch, each product expands the whole matrix. Kernels unpack it tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from oaiserve.engine.decoder.sources.integer_layouts import Floats, Integers

Multiply = Callable[[Tensor, "PackedMatrix", Tensor | None], Tensor]
Kind = Literal["int4", "int8", "float8", "mxfp4", "dense"]  # The last two are only for experts.
TILE_COLUMNS = 128  # most columns that are unpacked at a time
LEAST_COLUMNS = 32
DENSE_TILE = 64  # columns of weights in 16 bits
MXFP4_TILE = 64  # columns, which are two groups
FLOATS_OF_4_BITS = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)  # by their codes


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [n, columns], whose weights are (code - zero) * scale. All columns of a group share zero and scale.

    A byte has two codes of four bits. In each tile of columns, byte i has column i in its lower half, and in its upper
    half column i of the second half of the tile.
    """

    kind: Kind
    # uint8 [n, columns / 2], uint8 [n, columns], or float8_e4m3fn [n, columns]; the weights themselves of a dense
    # matrix
    codes: Tensor
    scales: Tensor  # [groups, n]; not read for a dense matrix
    zeros: Tensor | None  # uint8 [groups, n]; if None, half of the range of integers, or 0
    order: Tensor | None = None  # int64 [columns], the column of x for each column; if None, the same

    @property
    def shape(self) -> tuple[int, int]:
        n, width = self.codes.shape[-2:]
        return n, width * 2 if self.is_in_halves else width

    @property
    def is_in_halves(self) -> bool:
        """Return whether a byte has two codes."""
        return self.kind in ("int4", "mxfp4")

    @property
    def num_bytes(self) -> int:
        if self.kind == "dense":
            return self.codes.nbytes
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    @property
    def group_columns(self) -> int:
        return self.shape[1] if self.kind == "dense" else self.shape[1] // self.scales.shape[-2]

    @property
    def tile_columns(self) -> int:
        if self.kind == "dense":
            return min(DENSE_TILE, tile_columns(self.shape[1]))
        return MXFP4_TILE if self.kind == "mxfp4" else tile_columns(self.group_columns)

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [n, columns] in plain torch."""
        if self.kind == "dense":
            return self.codes.to(dtype)
        codes = self.codes
        scales = self.scales
        if self.is_in_halves:
            tiles = codes.unflatten(1, (-1, self.tile_columns // 2))
            codes = torch.cat([tiles & 15, tiles >> 4], dim=2).flatten(1)
        if self.kind == "mxfp4":
            numbers = torch.tensor(FLOATS_OF_4_BITS, device=codes.device)[codes.int()]
            scales = (scales.int() << 23).view(torch.float32)  # The scales are exponents plus 127.
        else:
            numbers = codes.float()
        numbers = numbers.unflatten(1, (len(scales), -1))
        if self.zeros is not None:
            numbers = numbers - self.zeros.T.float()[..., None]
        elif self.kind in ("int4", "int8"):
            numbers = numbers - (8 if self.kind == "int4" else 128)
        weights = (numbers * scales.T.float()[..., None]).flatten(1).to(dtype)
        return weights if self.order is None else torch.empty_like(weights).index_copy_(1, self.order, weights)

    def rows(self, begin: int, end: int) -> PackedMatrix:
        """Return the matrix of some rows as views of these tensors."""
        zeros = None if self.zeros is None else self.zeros[:, begin:end]
        return PackedMatrix(self.kind, self.codes[begin:end], self.scales[:, begin:end], zeros, self.order)

    def to(self, device: torch.device) -> Self:
        tensors = ((field.name, getattr(self, field.name)) for field in fields(self))
        moved: dict[str, Any] = {name: one.to(device) for name, one in tensors if isinstance(one, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class ExpertMatrices(PackedMatrix):
    """A matrix [n, columns] for each expert. All tensors have a first dimension for the experts."""

    bias: Tensor | None = None  # [experts, n]

    def of(self, expert: int) -> PackedMatrix:
        zeros = None if self.zeros is None else self.zeros[expert]
        return PackedMatrix(self.kind, self.codes[expert], self.scales[expert], zeros)


def tile_columns(group_columns: int) -> int:
    """Return the number of columns that are unpacked at a time: a power of two that divides a group."""
    return min(TILE_COLUMNS, group_columns & -group_columns)


def of_integers(matrix: Integers | Floats) -> PackedMatrix | None:
    """Return a matrix for a GPU, or None if its groups are not multiples of 32 columns."""
    n, columns = matrix.codes.shape
    groups = matrix.scales.shape[1]
    tile = tile_columns(columns // groups)
    if tile < LEAST_COLUMNS:
        return None
    scales = matrix.scales.T.contiguous()
    if isinstance(matrix, Floats):
        return PackedMatrix("float8", matrix.codes, scales, None)
    zeros = None if matrix.zeros is None else matrix.zeros.T.contiguous()
    codes = matrix.codes
    if matrix.bits == 4:
        halves = codes.view(n, columns // tile, 2, tile // 2)
        codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    return PackedMatrix("int4" if matrix.bits == 4 else "int8", codes, scales, zeros, matrix.columns)


def joined(matrices: Sequence[PackedMatrix]) -> PackedMatrix | None:
    """Return a matrix with the rows of all these, or None for matrices in different formats."""
    first = matrices[0]
    if len({(one.kind, len(one.scales), *_stored(one)) for one in matrices}) > 1:
        return None
    orders = [one.order for one in matrices if one.order is not None]
    if len(orders) not in (0, len(matrices)) or not all(torch.equal(orders[0], order) for order in orders[1:]):
        return None
    codes = torch.cat([one.codes.view(torch.uint8) for one in matrices]).view(first.codes.dtype)
    scales = torch.cat([one.scales for one in matrices], dim=1)
    zeros = [one.zeros for one in matrices if one.zeros is not None]
    return PackedMatrix(first.kind, codes, scales, torch.cat(zeros, dim=1) if zeros else None, first.order)


def stacked(matrices: Sequence[PackedMatrix]) -> ExpertMatrices | None:
    """Return the matrices of all experts, or None for matrices in different formats."""
    first = matrices[0]
    if len({(one.kind, one.shape, one.scales.shape, *_stored(one)) for one in matrices}) > 1:
        return None
    if first.order is not None:
        return None
    codes = torch.stack([one.codes.view(torch.uint8) for one in matrices]).view(first.codes.dtype)
    zeros = [one.zeros for one in matrices if one.zeros is not None]
    scales = torch.stack([one.scales for one in matrices])
    return ExpertMatrices(first.kind, codes, scales, torch.stack(zeros) if zeros else None)


def _stored(matrix: PackedMatrix) -> tuple[torch.dtype, bool, bool]:
    return matrix.scales.dtype, matrix.zeros is None, matrix.order is None


def expanded_product(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Return the product of `x` [..., columns] with a matrix, which is expanded for it."""
    return linear(x, matrix.expand(x.dtype), bias)
