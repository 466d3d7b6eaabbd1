"""Products with packed matrices by a Triton kernel: one launch for any number of rows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from oaiserve.engine.model.gpu.device_matrices import PackedMatrix
from oaiserve.engine.model.gpu.triton_matrix_kernels import matrix_kernel

PROGRAMS_PER_SM = 4  # so many programs load enough at once to keep the memory busy
MOST_SPLITS = 16


class MatrixTiles(NamedTuple):
    rows: int  # of x
    n: int  # rows of the matrix
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, int]:
        """Return the arguments of kernels that say this."""
        rows, n, num_warps, num_stages = self
        return {"TILE_ROWS": rows, "TILE_N": n, "num_warps": num_warps, "num_stages": num_stages}


def multiply(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Return the product of `x` [..., columns] with the matrix. Sums are in float32."""
    if matrix.order is not None:
        x = x.index_select(-1, matrix.order)
    rows, (n, columns) = x.reshape(-1, x.shape[-1]), matrix.shape
    num_rows = len(rows)
    out = rows.new_empty(num_rows, n)
    tiles = tiles_for(num_rows)
    grid = -(-n // tiles.n), -(-num_rows // tiles.rows)
    num_tiles = columns // matrix.tile_columns
    splits = num_splits(grid[0] * grid[1], num_tiles, rows.device)
    partial = torch.empty(splits, num_rows, n, dtype=torch.float32, device=rows.device) if splits > 1 else out
    zeros = matrix.scales if matrix.zeros is None else matrix.zeros  # a missing tensor is not read
    tensors = rows, matrix.codes, matrix.scales, zeros, out if bias is None else bias
    strides = rows.stride(0), matrix.codes.stride(0), matrix.scales.stride(0)
    matrix_kernel[(*grid, splits)](
        *tensors,
        out,
        partial,
        counters(rows.device),
        *(num_rows, n, columns, matrix.group_columns),
        *strides,
        -(-num_tiles // splits),
        KIND=matrix.kind,
        HAS_ZEROS=matrix.zeros is not None,
        HAS_BIAS=bias is not None,
        SPLITS=splits,
        TILE_COLUMNS=matrix.tile_columns,
        **tiles.constants(),
    )
    return out.view(*x.shape[:-1], -1)


def tiles_for(num_rows: int) -> MatrixTiles:
    """Return the tiles for a product with so many rows. Up to 64 rows, it takes as long as reading the matrix."""
    if num_rows <= 16:
        return MatrixTiles(16, 64, num_warps=4, num_stages=4)
    if num_rows <= 32:
        return MatrixTiles(32, 64, num_warps=4, num_stages=4)
    if num_rows <= 64:
        return MatrixTiles(64, 64, num_warps=4, num_stages=3)
    return MatrixTiles(128, 128, num_warps=8, num_stages=3)


def num_splits(num_programs: int, num_tiles: int, device: torch.device) -> int:
    """Return the number of splits of the columns, a power of two, for enough programs."""
    splits, enough = 1, _num_multiprocessors(device) * PROGRAMS_PER_SM
    while splits < MOST_SPLITS and num_programs * splits < enough:
        splits *= 2
    return min(splits, 1 << num_tiles.bit_length() - 1)


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Return counters of ended programs, one for each tile of a product with splits: fewer than fit on the device."""
    return torch.zeros(1 << 14, dtype=torch.int32, device=device)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
