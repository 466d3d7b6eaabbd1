"""Products with packed matrices by Triton kernels: in one launch, or, with many rows, of weights unpacked for them.

Few rows take as long as reading the matrix, which is packed. Many rows take as long as their arithmetic, which cuBLAS
does fastest, with weights of 16 bits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from oaiserve.engine.model.gpu.device_matrices import PackedMatrix
from oaiserve.engine.model.gpu.triton_matrix_kernels import matrix_kernel, unpack_kernel

PROGRAMS_PER_SM = 4  # so many programs load enough at once to keep the memory busy
MOST_SPLITS = 16
UNPACKED_FROM = 1024  # rows, where it has not been measured
SCRATCH_BYTES = 128 << 20  # of weights that are unpacked at a time
_UNPACKED_ROWS = 64  # of a matrix, by one program


class MatrixTiles(NamedTuple):
    rows: int  # of x
    n: int  # rows of the matrix
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, int]:
        """Return the arguments of kernels that say this."""
        rows, n, num_warps, num_stages = self
        return {"TILE_ROWS": rows, "TILE_N": n, "num_warps": num_warps, "num_stages": num_stages}


def multiply(x: Tensor, matrix: PackedMatrix, bias: Tensor | None, unpacked_from: int = UNPACKED_FROM) -> Tensor:
    """Return the product of `x` [..., columns] with the matrix. Sums are in float32. With so many rows or more, weights
    are rounded to the type of `x`."""
    if matrix.order is not None:
        x = x.index_select(-1, matrix.order)
    rows, (n, columns) = x.reshape(-1, x.shape[-1]), matrix.shape
    num_rows = len(rows)
    out = rows.new_empty(num_rows, n)
    if num_rows >= unpacked_from:
        _multiply_unpacked(rows, matrix, bias, out)
        return out.view(*x.shape[:-1], -1)
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


def _multiply_unpacked(rows: Tensor, matrix: PackedMatrix, bias: Tensor | None, out: Tensor) -> None:
    """Write the product of rows with the matrix, as many rows of which are unpacked at a time as there is room for."""
    n, columns = matrix.shape
    room = scratch(rows.device, rows.dtype)
    parts = -(-n // (len(room) // columns // _UNPACKED_ROWS * _UNPACKED_ROWS))
    size = -(-n // parts // _UNPACKED_ROWS) * _UNPACKED_ROWS  # of about the same size
    for begin in range(0, n, size):
        end = min(n, begin + size)
        weights = room[: (end - begin) * columns].view(-1, columns)
        unpack(matrix.rows(begin, end), weights)
        if bias is None:
            torch.mm(rows, weights.T, out=out[:, begin:end])
        else:
            torch.addmm(bias[begin:end], rows, weights.T, out=out[:, begin:end])


def unpack(matrix: PackedMatrix, out: Tensor) -> None:
    """Write the weights [n, columns] of a matrix, in the order in which it has its columns."""
    n, columns = matrix.shape
    zeros = matrix.scales if matrix.zeros is None else matrix.zeros  # a missing tensor is not read
    unpack_kernel[-(-n // _UNPACKED_ROWS), columns // matrix.tile_columns](
        *(matrix.codes, matrix.scales, zeros, out),
        *(n, columns, matrix.group_columns, matrix.codes.stride(0), matrix.scales.stride(0)),
        KIND=matrix.kind,
        HAS_ZEROS=matrix.zeros is not None,
        TILE_N=_UNPACKED_ROWS,
        TILE_COLUMNS=matrix.tile_columns,
    )


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
def scratch(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the room for unpacked weights, which all products share."""
    return torch.empty(SCRATCH_BYTES // dtype.itemsize, dtype=dtype, device=device)


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Return counters of ended programs, one for each tile of a product with splits: fewer than fit on the device."""
    return torch.zeros(1 << 14, dtype=torch.int32, device=device)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
