"""Matrix products whose sums do not depend on the number of rows: `--exact` has them in place of cuBLAS.

Each number is summed along the row in one order, in tiles whose sizes follow from the matrix alone.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from oaiserve.engine.model.gpu.triton_exact_kernels import exact_product_kernel

TILE_ROWS, TILE_COLUMNS = 64, 64  # of x, and of both along the sum
WIDE, NARROW = 128, 32  # rows of the matrix: narrow tiles keep more multiprocessors busy with a small matrix
ENOUGH_PROGRAMS = 128


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [..., K] times weight [N, K], as torch.nn.functional.linear does. Sums are in float32."""
    rows, (n, columns) = x.reshape(-1, x.shape[-1]), weight.shape
    out = rows.new_empty(len(rows), n)
    tile = _tile(n)
    exact_product_kernel[-(-len(rows) // TILE_ROWS), -(-n // tile)](
        *(rows, weight, out if bias is None else bias, out),
        *(len(rows), n, columns, rows.stride(0), rows.stride(1), *weight.stride(), n),
        HAS_BIAS=bias is not None,
        TILE_ROWS=TILE_ROWS,
        TILE_N=tile,
        TILE_COLUMNS=TILE_COLUMNS if x.dtype != torch.float32 else 32,
        num_warps=4,
        num_stages=4 if x.dtype != torch.float32 else 2,
    )
    return out.view(*x.shape[:-1], n)


@functools.cache
def _tile(n: int) -> int:
    return WIDE if n >= WIDE * ENOUGH_PROGRAMS else NARROW
