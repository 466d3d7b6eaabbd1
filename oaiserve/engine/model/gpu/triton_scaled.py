"""Products of many rows with matrices in floats of 8 bits, by the tensor cores' products of 8 bits: twice the rate.

Each row of the inputs is rounded to such floats with a scale of its own. That is for prompts, whose products take as
long as their arithmetic; decodes are not rounded, and take as long as reading the matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oaiserve.engine.model.gpu.device_matrices import Multiply, PackedMatrix
from oaiserve.engine.model.gpu.triton_matrix_kernels import round_rows_kernel

LEAST_ROWS = 256  # from about so many on, arithmetic takes longer than reading the matrix
_MULTIPLE = 16  # of rows and columns, which torch asks for


def can_scale(matrix: PackedMatrix) -> bool:
    """Return whether a matrix is one for such products: each of its rows has one scale."""
    n, columns = matrix.shape
    return matrix.kind == "float8" and len(matrix.scales) == 1 and n % _MULTIPLE == 0 and columns % _MULTIPLE == 0


def scaled_or(multiply: Multiply) -> Multiply:
    """Return the products of many rows by `_scaled_mm`, and all others by `multiply`."""

    def product(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
        if x.numel() < LEAST_ROWS * x.shape[-1] or not can_scale(matrix):
            return multiply(x, matrix, bias)
        return scaled_product(x, matrix, bias)

    return product


def scaled_product(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Return the product of `x` [..., columns], rounded to floats of 8 bits, with a matrix that `can_scale`."""
    rows = x.reshape(-1, x.shape[-1])
    rounded, scales = rounded_rows(rows)
    product = torch._scaled_mm(
        rounded, matrix.codes.T, scale_a=scales, scale_b=matrix.scales.float(), out_dtype=x.dtype
    )
    return (product if bias is None else product + bias).view(*x.shape[:-1], matrix.shape[0])


def rounded_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as floats of 8 bits, and the scale of each, float32 [rows, 1]: its largest number is the largest
    float."""
    num_rows, columns = rows.shape
    out = torch.empty(num_rows, columns, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=rows.device)
    tile = 1 << (columns - 1).bit_length()
    num_warps = min(16, max(1, tile // 512))
    round_rows_kernel[(num_rows,)](rows, out, scales, columns, rows.stride(0), TILE=tile, num_warps=num_warps)
    return out, scales
