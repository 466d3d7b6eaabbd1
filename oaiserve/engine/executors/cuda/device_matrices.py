"""Stores matrices on a GPU as in the checkpoint: integers of 4 or 8 bits, and floats of 8 bits.

In plain torch, each product expands the whole matrix. Kernels unpack it tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from oaiserve.engine.decoder.sources.integer_layouts import Floats, Integers
from oaiserve.engine.model.attention import FP8, FP8_MAX

Multiply = Callable[[Tensor, "PackedMatrix", Tensor | None], Tensor]
Kind = Literal["int4", "int8", "float8", "mxfp4", "dense"]  # The last two are only for experts.
TILE_COLUMNS = 128  # most columns that are unpacked at a time
LEAST_COLUMNS = 32
SCALED_ALIGNMENT = 16  # rows and columns: torch multiplies matrices in floats of 8 bits if they are multiples of this
# Rows of x from which products with matrices in floats of 8 bits may round x to these, too. With fewer rows, a product
# takes as long as reading the matrix, and rounding would save nothing.
FLOAT8_FROM = 65
LEAST_LARGEST = 1e-30  # Rows with smaller numbers only count as if this were the largest.
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
        return n, width * (1 + self.is_in_halves)

    @property
    def is_in_halves(self) -> bool:
        """Return whether a byte has two codes."""
        return self.kind in ("int4", "mxfp4")

    @property
    def nbytes(self) -> int:
        tensors = {id(one): one for one in (self.codes, self.scales, self.zeros) if one is not None}
        return sum(tensor.nbytes for tensor in tensors.values())

    @property
    def group_columns(self) -> int:
        columns = self.shape[1]
        if self.kind == "dense":
            return columns
        return columns // self.scales.shape[-2]

    @property
    def tile_columns(self) -> int:
        if self.kind == "mxfp4":
            return MXFP4_TILE
        tile = tile_columns(self.group_columns)
        if self.kind == "dense":
            return min(DENSE_TILE, tile)
        return tile

    @property
    def has_row_scales(self) -> bool:
        """Return whether torch can multiply with this matrix in floats of 8 bits, with a scale for each row."""
        is_whole = self.kind == "float8" and self.codes.dim() == 2 and len(self.scales) == 1 and self.order is None
        return is_whole and all(size % SCALED_ALIGNMENT == 0 for size in self.shape)

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
        elif self.kind == "int4":
            numbers = numbers - 8
        elif self.kind == "int8":
            numbers = numbers - 128
        weights: Tensor = (numbers * scales.T.float()[..., None]).flatten(1).to(dtype)
        if self.order is None:
            return weights
        return torch.empty_like(weights).index_copy_(1, self.order, weights)

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
    codes = matrix.codes
    scales = matrix.scales.T.contiguous()
    if isinstance(matrix, Floats):
        return PackedMatrix("float8", codes, scales, None)
    zeros = None if matrix.zeros is None else matrix.zeros.T.contiguous()
    if matrix.bits == 8:
        return PackedMatrix("int8", codes, scales, zeros, matrix.columns)
    halves = codes.view(n, columns // tile, 2, tile // 2)
    codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    return PackedMatrix("int4", codes, scales, zeros, matrix.columns)


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers [rows, columns] as floats of 8 bits, and the scales float32 [rows, 1] of their rows.

    The largest number of a row becomes the largest float. Rows that are not finite become NaN.
    """
    x = x.float()
    scales = x.abs().amax(1, keepdim=True).clamp(min=LEAST_LARGEST) / FP8_MAX
    return (x / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def in_float8(weights: Tensor) -> PackedMatrix | None:
    """Return weights [n, columns] as floats of 8 bits with a scale for each row, or None if kernels can't read them."""
    if tile_columns(weights.shape[1]) < LEAST_COLUMNS:
        return None
    codes, scales = rounded_rows(weights)
    return PackedMatrix("float8", codes.contiguous(), scales.T.contiguous(), None)


def joined(matrices: Sequence[PackedMatrix]) -> PackedMatrix | None:
    """Return a matrix with the rows of all these, or None for none, and for matrices in different formats."""
    formats = {(one.kind, len(one.scales), one.scales.dtype, one.zeros is None) for one in matrices}
    orders = [one.order for one in matrices if one.order is not None]
    if len(formats) != 1 or len(orders) not in (0, len(matrices)):
        return None
    if not all(torch.equal(orders[0], order) for order in orders[1:]):
        return None
    if len(matrices) == 1:
        return matrices[0]
    parts = _combined(matrices, partial(torch.cat, dim=0), partial(torch.cat, dim=1))
    return PackedMatrix(matrices[0].kind, *parts, matrices[0].order)


def stacked(matrices: Sequence[PackedMatrix]) -> ExpertMatrices | None:
    """Return the matrices of all experts, or None for none, and for matrices in different formats or orders."""
    formats = {(one.kind, one.shape, one.scales.shape, one.scales.dtype, one.zeros is None) for one in matrices}
    if len(formats) != 1 or any(one.order is not None for one in matrices):
        return None
    return ExpertMatrices(matrices[0].kind, *_combined(matrices, torch.stack, torch.stack))


def _combined(
    matrices: Sequence[PackedMatrix],
    of_rows: Callable[[list[Tensor]], Tensor],
    of_groups: Callable[[list[Tensor]], Tensor],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the codes, scales and zeros of all matrices as one tensor each. Codes have rows first, the others
    groups."""
    codes = of_rows([one.codes.view(torch.uint8) for one in matrices]).view(matrices[0].codes.dtype)
    scales = of_groups([one.scales for one in matrices])
    zeros = [one.zeros for one in matrices if one.zeros is not None]
    if not zeros:
        return codes, scales, None
    return codes, scales, of_groups(zeros)


def expanded_product(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Return the product of `x` [rows, columns] with a matrix, which is expanded for it."""
    return linear(x, matrix.expand(x.dtype), bias)


def rounded_product(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Return the product float32 of `x`, whose rows are rounded to floats of 8 bits, with a matrix in these.

    Without the last rounding, this is what torch computes with such rows. A number x of a row whose largest one is m
    moves by at most max(|x| / 16, m / 448 / 1024), so a product moves by at most the sum of these times the weights.
    """
    codes, scales = rounded_rows(x)
    return linear(codes.float() * scales, matrix.expand(torch.float32), None if bias is None else bias.float())


def rounds(num_rows: int, matrix: PackedMatrix) -> bool:
    """Return whether inputs of a product are rounded to floats of 8 bits, if the device can multiply these."""
    return num_rows >= FLOAT8_FROM and matrix.has_row_scales


def plain_product(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Compute `rounded_product` where `rounds` says so, and `expanded_product` elsewhere."""
    if rounds(len(x), matrix):
        return rounded_product(x, matrix, bias).to(x.dtype)
    return expanded_product(x, matrix, bias)
