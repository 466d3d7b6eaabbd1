"""Stores matrices on a GPU as in the checkpoint: integers of 4 or 8 bits, and 8-bit floats.

In plain torch, each product expands the whole matrix. Kernels unpack it tile by tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from oaiserve.engine.decoder.sources.integer_layouts import Floats, Integers
from oaiserve.engine.model.attention import FP8, FP8_MAX
from oaiserve.plugins.cuda.executor.product_ways import ProductWays

Kind = Literal["int4", "int8", "float8", "mxfp4", "dense"]  # The last two are only for experts.
TILE_COLUMNS = 128  # columns that are unpacked at a time
UNIT_COLUMNS = 32  # columns whose integers are stored together; groups are multiples of it
PARTS: Mapping[Kind, int] = MappingProxyType({"int4": 4, "mxfp4": 4, "int8": 2, "float8": 1, "dense": 1})
SCALED_BLOCK = 128  # rows and columns that share a scale in published checkpoints
BLOCKS_ALIGNMENT = 4  # torch reads scales of this many rows or blocks at a time
SCALED_ALIGNMENT = 16  # torch multiplies matrices of 8-bit floats if their rows and columns are multiples of this
LEAST_LARGEST = 1e-30  # lower bound of the largest number in a group when its scale is computed
DENSE_TILE = 64  # columns of weights in 16 bits
FLOATS_OF_4_BITS = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)  # in the order of their codes


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [n, columns], whose weights are (code - zero) * scale. All columns of a group share zero and scale.

    Kernels read integers and MXFP4 as 16-bit numbers, which hold four codes of 4 bits or two of 8. Of each 32 columns,
    number i has the columns i, 8 + i, 16 + i and 24 + i, or i and 16 + i, from its lowest bits on.
    """

    kind: Kind
    # uint8 [n, columns / 2], uint8 [n, columns], or float8_e4m3fn [n, columns]; for a dense matrix, the weights
    # themselves
    codes: Tensor
    scales: Tensor  # [groups, n]; not read for a dense matrix
    zeros: Tensor | None  # uint8 [groups, n]; None: half of the range for integers, else 0
    order: Tensor | None = None  # int64 [columns], the column of x for each column; None: the same
    # For torch, if blocks of 128 rows and columns share the scales above: float32 [n / 128, blocks], with zeros after
    # the last block of columns.
    block_scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        n, width = self.codes.shape[-2:]
        return n, width * (2 if self.parts == 4 else 1)

    @property
    def parts(self) -> int:
        """Return how many codes each number that kernels read holds."""
        return PARTS[self.kind]

    @property
    def read_codes(self) -> Tensor:
        """Return the codes in the form that kernels read."""
        if self.kind == "dense":
            return self.codes
        return self.codes.view(torch.uint8 if self.kind == "float8" else torch.int16)

    @property
    def nbytes(self) -> int:
        parts = self.codes, self.scales, self.zeros, self.block_scales
        tensors = {id(one): one for one in parts if one is not None}
        return sum(tensor.nbytes for tensor in tensors.values())

    @property
    def group_columns(self) -> int:
        columns = self.shape[1]
        if self.kind == "dense":
            return columns
        return columns // self.scales.shape[-2]

    @property
    def divided_group(self) -> int:
        """Return the columns of a group, or 0 if each row is one group."""
        group = self.group_columns
        return 0 if group == self.shape[1] else group

    @property
    def tile_columns(self) -> int:
        """Return how many columns are multiplied at once."""
        if self.kind != "dense":
            return TILE_COLUMNS
        columns = self.shape[1]
        return min(DENSE_TILE, columns & -columns)

    @property
    def rounded_columns(self) -> int:
        """Return how many columns of x share a scale when x is rounded to 8-bit floats for torch's product.

        0 means that the whole row shares one.
        """
        return 0 if self.block_scales is None else SCALED_BLOCK

    @property
    def is_for_torch(self) -> bool:
        """Return whether torch can multiply with this matrix in 8-bit floats: its scales are of rows or blocks."""
        if self.block_scales is not None:
            return True
        is_whole = self.kind == "float8" and self.codes.dim() == 2 and len(self.scales) == 1 and self.order is None
        return is_whole and all(size % SCALED_ALIGNMENT == 0 for size in self.shape)

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [n, columns] in plain torch."""
        if self.kind == "dense":
            return self.codes.to(dtype)
        codes = self.codes
        scales = self.scales
        if self.parts > 1:
            units = self.read_codes.int().unflatten(1, (-1, UNIT_COLUMNS // self.parts))
            bits = 16 // self.parts
            codes = torch.cat([units >> bits * part & (1 << bits) - 1 for part in range(self.parts)], dim=2).flatten(1)
        if self.kind == "mxfp4":
            numbers = torch.tensor(FLOATS_OF_4_BITS, device=codes.device)[codes.int()]
            scales = (scales.int() << 23).view(torch.float32)  # The scales are exponents, offset by 127.
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
    """A matrix [n, columns] for each expert. The first dimension of all tensors is the expert."""

    bias: Tensor | None = None  # [experts, n]

    def of(self, expert: int) -> PackedMatrix:
        zeros = None if self.zeros is None else self.zeros[expert]
        return PackedMatrix(self.kind, self.codes[expert], self.scales[expert], zeros)


def of_integers(matrix: Integers | Floats) -> PackedMatrix | None:
    """Return a matrix for a GPU, or None if its groups are not multiples of 32 columns."""
    columns = matrix.codes.shape[1]
    group = columns // matrix.scales.shape[1]
    if group % UNIT_COLUMNS:
        return None
    # A tile has whole groups, or a part of one group. Other groups are split into parts that fit, and each part gets
    # the group's scale.
    repeats = 1 if group == columns else group // math.gcd(group, TILE_COLUMNS) if group % TILE_COLUMNS else 1
    scales = matrix.scales.T.repeat_interleave(repeats, 0).contiguous()
    if isinstance(matrix, Floats):
        # Kernels read a NaN code as a number, so its row gets a scale of NaN.
        has_nan = (matrix.codes.view(torch.uint8) & 0x7F == 0x7F).any(1)
        stored = scales.masked_fill(has_nan, math.nan)
        return PackedMatrix("float8", matrix.codes, stored, None, block_scales=block_scales_of(matrix))
    zeros = None if matrix.zeros is None else matrix.zeros.T.repeat_interleave(repeats, 0).contiguous()
    kind: Kind = "int8" if matrix.bits == 8 else "int4"
    return PackedMatrix(kind, in_parts(matrix.codes, PARTS[kind]), scales, zeros, matrix.columns)


def block_scales_of(matrix: Floats) -> Tensor | None:
    """Return the scales of blocks of 128 rows and columns in the form that torch reads.

    Returns None for other scales, and for tensors without numbers.
    """
    n, columns = matrix.codes.shape
    if n % SCALED_BLOCK or matrix.scales.shape[1] * SCALED_BLOCK != columns:
        return None
    of_blocks = matrix.scales.unflatten(0, (-1, SCALED_BLOCK))
    first = of_blocks[:, 0]
    if of_blocks.is_meta or not torch.equal(of_blocks, first[:, None].expand_as(of_blocks)):
        return None
    return torch.nn.functional.pad(first, (0, -first.shape[1] % BLOCKS_ALIGNMENT))


def in_parts(codes: Tensor, parts: int) -> Tensor:
    """Return codes uint8 [n, columns] as bytes [n, columns * 2 / parts] of 16-bit numbers with `parts` codes each."""
    units = codes.unflatten(1, (-1, parts, UNIT_COLUMNS // parts)).unbind(2)
    if parts == 4:
        units = [units[0] | units[1] << 4, units[2] | units[3] << 4]
    return torch.stack(units, dim=-1).flatten(1)


def rounded_rows(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """Return numbers [rows, columns] as 8-bit floats, and their scales float32 [rows, groups].

    `group` columns of a row share a scale, or whole rows for 0. The largest number of a group becomes the largest
    float. Groups that are not finite become NaN.
    """
    groups = x.float().unflatten(1, (-1, group or x.shape[1]))
    scales = groups.abs().amax(2, keepdim=True).clamp(min=LEAST_LARGEST) / FP8_MAX
    return (groups / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8).flatten(1), scales.squeeze(2)


class Rounded(NamedTuple):
    """Rows that are rounded to 8-bit floats.

    With groups, meaningless rows pad them to a multiple of 4, and the scales of a group are adjacent, because torch
    reads four at a time.
    """

    codes: Tensor  # [rows, columns]
    scales: Tensor  # float32 [rows, groups]
    group: int  # number of columns that share a scale; 0: the whole row does


def new_rounded(rows: int, columns: int, group: int, device: torch.device) -> Rounded:
    """Return uninitialised rows."""
    if group == 0:
        scales = torch.empty(rows, 1, dtype=torch.float32, device=device)
    else:
        rows = -(-rows // BLOCKS_ALIGNMENT) * BLOCKS_ALIGNMENT
        scales = torch.empty(columns // group, rows, dtype=torch.float32, device=device).T
    return Rounded(torch.empty(rows, columns, dtype=FP8, device=device), scales, group)


def in_float8(weights: Tensor) -> PackedMatrix | None:
    """Return weights [n, columns] as 8-bit floats with one scale per row, or None if kernels can't read them."""
    if weights.shape[1] % UNIT_COLUMNS:
        return None
    codes, scales = rounded_rows(weights)
    return PackedMatrix("float8", codes.contiguous(), scales.T.contiguous(), None)


def joined(matrices: Sequence[PackedMatrix]) -> PackedMatrix | None:
    """Return one matrix with the rows of all matrices, or None if there are none or their formats differ."""
    formats = {(one.kind, len(one.scales), one.scales.dtype, one.zeros is None) for one in matrices}
    orders = [one.order for one in matrices if one.order is not None]
    if len(formats) != 1 or len(orders) not in (0, len(matrices)):
        return None
    if not all(torch.equal(orders[0], order) for order in orders[1:]):
        return None
    if len(matrices) == 1:
        return matrices[0]
    parts = _combined(matrices, partial(torch.cat, dim=0), partial(torch.cat, dim=1))
    of_blocks = [one.block_scales for one in matrices if one.block_scales is not None]
    block_scales = torch.cat(of_blocks) if len(of_blocks) == len(matrices) else None
    return PackedMatrix(matrices[0].kind, *parts, matrices[0].order, block_scales)


def stacked(matrices: Sequence[PackedMatrix]) -> ExpertMatrices | None:
    """Return the matrices of all experts as one, or None if there are none, or their formats or orders differ."""
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
    """Return the product of `x` [rows, columns] with a matrix that is expanded for this product."""
    return linear(x, matrix.expand(x.dtype), bias)


def rounded_product(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Return the product float32 of `x`, with rows rounded to 8-bit floats, with a matrix of 8-bit floats.

    Apart from the last rounding, this is what torch computes with such rows. A number x of a group whose largest number
    is m changes by at most max(|x| / 16, m / 448 / 1024), so a product changes by at most the sum of these times the
    weights.
    """
    codes, scales = rounded_rows(x, matrix.rounded_columns)
    rounded = codes.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    return linear(rounded.flatten(1), matrix.expand(torch.float32), None if bias is None else bias.float())


# A function that multiplies rows with a matrix and adds a bias, in the way that ProductWays chooses. Rounded holds the
# same rows, if they are already rounded.
Multiply = Callable[[Tensor, PackedMatrix, Tensor | None, ProductWays, Rounded | None], Tensor]


def plain_product(
    x: Tensor, matrix: PackedMatrix, bias: Tensor | None, ways: ProductWays, rounded: Rounded | None = None
) -> Tensor:
    """Compute `rounded_product` if `ways` rounds this many rows, else `expanded_product`."""
    if ways.rounds(len(x)) and matrix.is_for_torch:
        return rounded_product(x, matrix, bias).to(x.dtype)
    return expanded_product(x, matrix, bias)
