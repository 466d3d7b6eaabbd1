"""Products of many rows with matrices in floats of 8 bits, by the tensor cores' products of 8 bits: twice the rate.

The inputs are rounded to such floats, with a scale for each row, or for each row and 128 columns. This is for prompts,
whose products take as long as their arithmetic; decodes are not rounded, and take as long as reading the matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oaiserve.engine.model.gpu.device_matrices import TILE_COLUMNS, Multiply, PackedMatrix
from oaiserve.engine.model.gpu.triton_matrices import multiply_into
from oaiserve.engine.model.gpu.triton_matrix_kernels import round_rows_kernel

LEAST_ROWS = 256  # from about so many on, arithmetic takes longer than reading the matrix
_MULTIPLE = 16  # of rows and columns, which torch asks for
_NUMBERS_AT_A_TIME = 4096  # of a row that is rounded


def ways(matrix: PackedMatrix) -> list[Multiply]:
    """Return the possible products of 8 bits with such a matrix, the fastest first."""
    if matrix.kind != "float8":
        return []
    n, columns = matrix.shape
    is_whole = n % _MULTIPLE == 0 and columns % _MULTIPLE == 0
    # Torch supports scales for each row, or for each row and 128 columns.
    has_torchs_groups = len(matrix.scales) == 1 or matrix.group_columns == TILE_COLUMNS
    return [by_torch, by_triton] if is_whole and has_torchs_groups else [by_triton]


def scaled_or(scaled: Multiply, multiply: Multiply) -> Multiply:
    """Return the products of many rows by `scaled`, and all others by `multiply`."""

    def product(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
        return (multiply if x.numel() < LEAST_ROWS * x.shape[-1] else scaled)(x, matrix, bias)

    return product


def by_torch(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Return the product of `x` [..., columns], rounded to floats of 8 bits, by a library of NVIDIA's.

    Scales of groups of 128 columns are for Hopper, with cuBLAS from 12.9 on. Torch raises an error elsewhere.
    """
    codes, scales = rounded_rows(x.reshape(-1, x.shape[-1]), matrix.group_columns)
    scale_b = matrix.scales.float().contiguous()  # those of a part of a matrix are apart
    scale_a = scales.view(-1, 1) if len(scales) == 1 else scales.T
    product = torch._scaled_mm(codes, matrix.codes.T, scale_a=scale_a, scale_b=scale_b, out_dtype=x.dtype)
    product = product[: x.numel() // x.shape[-1]]
    return (product if bias is None else product + bias).view(*x.shape[:-1], matrix.shape[0])


def by_triton(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Return the product of `x` [..., columns], rounded to floats of 8 bits, by our kernel. Sums are in float32 from
    one tile of columns to the next: within one, tensor cores keep fewer bits."""
    rows = x.reshape(-1, x.shape[-1])
    codes, scales = rounded_rows(rows, matrix.tile_columns)
    out = rows.new_empty(len(rows), matrix.shape[0])
    multiply_into(out, codes[: len(rows)], matrix, bias, scales)
    return out.view(*x.shape[:-1], -1)


def rounded_rows(rows: Tensor, group_columns: int) -> tuple[Tensor, Tensor]:
    """Return rows [rows, columns] as floats of 8 bits, and the scales of each row's groups, float32 [groups, rows].

    The largest number of a group is the largest float. There are more rows than are given, up to a multiple of 16,
    whose content is undefined.
    """
    num_rows, columns = rows.shape
    padded, groups = -(-num_rows // _MULTIPLE) * _MULTIPLE, -(-columns // group_columns)
    out = torch.empty(padded, columns, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(groups, padded, dtype=torch.float32, device=rows.device)
    tile = 1 << (group_columns - 1).bit_length()
    tile_groups = max(1, min(1 << (groups - 1).bit_length(), _NUMBERS_AT_A_TIME // tile))
    round_rows_kernel[(num_rows, -(-groups // tile_groups))](
        rows,
        out,
        scales,
        columns,
        group_columns,
        rows.stride(0),
        padded,
        TILE_GROUPS=tile_groups,
        TILE=tile,
        num_warps=min(16, max(1, tile * tile_groups // 512)),
    )
    return out, scales
