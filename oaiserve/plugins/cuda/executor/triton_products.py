"""Multiplies with packed matrices, including experts' matrices, in one Triton kernel.

With few rows, a product takes as long as reading the packed matrix. With many rows, it takes as long as its arithmetic.
cuBLAS is fastest then, but needs weights of 16 bits, so matrices are unpacked for it, except for experts. Rows of
experts are planned on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from oaiserve.plugins.cuda.executor import triton_attention
from oaiserve.plugins.cuda.executor.device_matrices import (
    TILE_COLUMNS,
    ExpertMatrices,
    PackedMatrix,
    Rounded,
    new_rounded,
)
from oaiserve.plugins.cuda.executor.launches import num_multiprocessors, present
from oaiserve.plugins.cuda.executor.product_ways import UNMEASURED, MatrixTiles, ProductWays
from oaiserve.plugins.cuda.executor.triton_product_kernels import (
    plan_experts_kernel,
    product_kernel,
    round_rows_kernel,
    unpack_kernel,
)

MOST_SPLITS = 16
LARGE_SHARED_BYTES = 128 << 10  # shared memory that a program needs for three stages of the largest tiles
_UNPACKED_ROWS = 64  # rows of a matrix that one program unpacks
PAIRS_AT_A_TIME = 1024  # pairs that a program of the plan reads at a time; a constant, so that it is compiled once


LARGEST_OF_EXPERTS = MatrixTiles(64, 128, num_warps=8, num_stages=3)  # with more rows, it spills registers


class Plan(NamedTuple):
    """The rows of each expert, cut into tiles. All of it is on the device."""

    order: Tensor
    tile_expert: Tensor
    tile_first: Tensor
    tile_end: Tensor
    tiles: MatrixTiles


def multiply(
    x: Tensor,
    matrix: PackedMatrix,
    bias: Tensor | None,
    ways: ProductWays = UNMEASURED,
    rounded: Rounded | None = None,
) -> Tensor:
    """Return the product [rows, n] of `x` [rows, columns] with the matrix, or its `rounded_product` if `ways` rounds.

    `rounded` may hold the rounded rows already. Sums are in float32. Weights that are unpacked are rounded to the dtype
    of `x`.
    """
    num_rows = len(x)
    if ways.rounds(num_rows) and matrix.is_for_torch:
        if rounded is None or rounded.group != matrix.rounded_columns:
            rounded = rounded_rows(x, matrix.rounded_columns)
        return _multiply_in_float8(x, rounded, matrix, bias, adds_fast=ways.adds_fast)
    if matrix.order is not None:
        x = x.index_select(1, matrix.order)
    if ways.unpacks(num_rows):
        return functional.linear(x, unpacked(matrix, x.dtype), bias)
    out = x.new_empty(num_rows, matrix.shape[0])
    tiles = ways.tiles_for(num_rows) or tiles_for(num_rows, x.device)
    _launch(x, matrix, bias, out, tiles, -(-num_rows // tiles.rows))
    return out


def _multiply_in_float8(
    x: Tensor, rounded: Rounded, matrix: PackedMatrix, bias: Tensor | None, *, adds_fast: bool
) -> Tensor:
    codes, scales, _ = rounded
    if matrix.block_scales is None:
        given = (codes, matrix.codes.T, scales, matrix.scales, bias)
        return torch._scaled_mm(*given, out_dtype=x.dtype, use_fast_accum=adds_fast)
    recipes = functional.ScalingType
    of_x = codes, matrix.codes.T, scales, recipes.BlockWise1x128
    of_matrix = matrix.block_scales.T, recipes.BlockWise128x128
    out = functional.scaled_mm(*of_x, *of_matrix, output_dtype=x.dtype, use_fast_accum=adds_fast)[: len(x)]
    return out if bias is None else out.add_(bias)


def rounded_rows(x: Tensor, group: int = 0) -> Rounded:
    """Compute `device_matrices.rounded_rows` in one launch."""
    rows, columns = x.shape
    rounded = new_rounded(rows, columns, group, x.device)
    tile = triton.next_power_of_2(columns)
    round_rows_kernel[(rows,)](
        *(x, rounded.codes, rounded.scales, columns, x.stride(0), len(rounded.codes)),
        GROUP=group or tile,
        TILE=tile,
        num_warps=min(16, max(1, tile // 512)),
    )
    return rounded


def product(x: Tensor, matrices: ExpertMatrices, plan: Plan, *, pairs_of_row: int, factors: Tensor | None) -> Tensor:
    """Return the products [pairs, n] of rows with the matrices of their experts, in the order of the pairs.

    They are multiplied by `factors` [pairs], if there are any.
    """
    out = x.new_empty(len(plan.order), matrices.shape[0])
    _launch(x, matrices, matrices.bias, out, plan.tiles, len(plan.tile_expert), plan, pairs_of_row, factors)
    return out


def _launch(
    x: Tensor,
    matrix: PackedMatrix,
    bias: Tensor | None,
    out: Tensor,
    tiles: MatrixTiles,
    num_tiles: int,
    plan: Plan | None = None,
    pairs_of_row: int = 1,
    factors: Tensor | None = None,
) -> None:
    (n, columns) = matrix.shape
    tile = matrix.tile_columns
    grid = -(-n // tiles.n), num_tiles
    tiles_of_columns = -(-columns // tile)
    splits = num_splits(grid[0] * grid[1], tiles_of_columns, x.device, tiles.programs_per_sm)
    partial = out
    if splits > 1:
        partial = torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device)
    codes = matrix.read_codes
    scales = matrix.scales
    num_done = counters(x.device)
    rows_of_tiles: Sequence[Tensor] = (num_done,) * 4
    if plan is not None:
        rows_of_tiles = plan[:4]
    product_kernel[(*grid, splits)](
        *(x, codes, scales, present(matrix.zeros, scales), present(bias, out), present(factors, out).contiguous()),
        *rows_of_tiles,
        *(out, partial, num_done),
        *(len(out), n, columns, splits, -(-tiles_of_columns // splits), pairs_of_row),
        *(x.stride(0), codes.stride(0), codes.stride(-2), scales.stride(0), scales.stride(-2)),
        KIND=matrix.kind,
        PARTS=matrix.parts,
        GROUP_COLUMNS=matrix.divided_group,
        IS_WHOLE=columns % tile == 0,
        OF_EXPERTS=plan is not None,
        HAS_ZEROS=matrix.zeros is not None,
        HAS_BIAS=bias is not None,
        HAS_FACTORS=factors is not None,
        IS_SPLIT=splits > 1,
        TILE_COLUMNS=tile,
        **tiles.constants(),
    )


def planned(chosen: Tensor, num_experts: int, ways: ProductWays = UNMEASURED) -> Plan:
    """Sort the rows by expert. The host knows only an upper bound of the number of tiles."""
    num_pairs = chosen.numel()
    rows = -(-num_pairs // num_experts)
    tiles = ways.tiles_for(rows, of_experts=True) or tiles_for(rows, chosen.device, of_experts=True)
    most_tiles = min(num_pairs, num_pairs // tiles.rows + num_experts)
    # If these were parts of one tensor, they could begin at any address, and Triton compiles kernels for each
    # alignment.
    order, tile_expert, tile_first, tile_end = (
        torch.empty(size, dtype=torch.int32, device=chosen.device)
        for size in (num_pairs, most_tiles, most_tiles, most_tiles)
    )
    plan_experts_kernel[(num_experts,)](
        *(chosen.contiguous(), order, tile_expert, tile_first, tile_end, num_pairs, most_tiles),
        NUM_EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        TILE_ROWS=tiles.rows,
        CHUNK=PAIRS_AT_A_TIME,
        num_warps=4,
    )
    return Plan(order, tile_expert, tile_first, tile_end, tiles)


def unpacked(matrix: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """Return the weights [n, columns] of a matrix, in the order of its stored columns."""
    n, columns = matrix.shape
    out = torch.empty(n, columns, dtype=dtype, device=matrix.codes.device)
    tile = min(TILE_COLUMNS, matrix.group_columns & -matrix.group_columns)
    codes = matrix.read_codes
    unpack_kernel[-(-n // _UNPACKED_ROWS), columns // tile](
        *(codes, matrix.scales, present(matrix.zeros, matrix.scales), out),
        *(n, columns, codes.stride(0), matrix.scales.stride(0)),
        KIND=matrix.kind,
        PARTS=matrix.parts,
        GROUP_COLUMNS=matrix.divided_group,
        HAS_ZEROS=matrix.zeros is not None,
        TILE_N=_UNPACKED_ROWS,
        TILE_COLUMNS=tile,
    )
    return out


def tiles_for(num_rows: int, device: torch.device, *, of_experts: bool = False) -> MatrixTiles:
    """Return the tiles for a product with `num_rows` rows. Up to 64 rows, it takes as long as reading the matrix."""
    if num_rows <= 16:
        return MatrixTiles(16, 64, num_warps=4, num_stages=4)
    if num_rows <= 32:
        return MatrixTiles(32, 64, num_warps=4, num_stages=4)
    if of_experts:
        return LARGEST_OF_EXPERTS
    if num_rows <= 64:
        return MatrixTiles(64, 64, num_warps=4, num_stages=3)
    has_room = triton_attention.card_of(device).shared_bytes >= LARGE_SHARED_BYTES
    return MatrixTiles(128, 128, num_warps=8, num_stages=3 if has_room else 2)


def num_splits(num_programs: int, num_tiles: int, device: torch.device, programs_per_sm: int) -> int:
    """Return how many splits of the columns give enough programs, as a power of two."""
    splits = 1
    enough = num_multiprocessors(device) * programs_per_sm
    while splits < MOST_SPLITS and num_programs * splits < enough:
        splits *= 2
    return min(splits, 1 << num_tiles.bit_length() - 1)


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Return counters of finished programs, one for each tile of a product with splits.

    There are fewer of these tiles than programs that fit on the device.
    """
    return torch.zeros(1 << 14, dtype=torch.int32, device=device)
