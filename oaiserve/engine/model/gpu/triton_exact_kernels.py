"""The device code of `triton_exact`, which launches it and describes its arguments."""

import triton
import triton.language as tl

from oaiserve.engine.model.gpu.triton_tiles import dot


@triton.jit(do_not_specialize=["num_rows"])
def exact_product_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    n,
    columns,
    x_stride_row,
    x_stride_column,
    weight_stride_row,
    weight_stride_column,
    out_stride,
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Compute a tile of products. The program is (tile of rows of x, tile of rows of the matrix)."""
    row = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    of_n = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    column = tl.arange(0, TILE_COLUMNS)
    is_row, is_n = row < num_rows, of_n < n
    x_rows = x + row[:, None] * x_stride_row
    weight_rows = weight + of_n[None, :] * weight_stride_row
    acc = tl.zeros([TILE_ROWS, TILE_N], tl.float32)
    for begin in range(0, columns, TILE_COLUMNS):
        at = begin + column
        is_column = at < columns
        a = tl.load(x_rows + at[None, :] * x_stride_column, mask=is_row[:, None] & is_column[None, :], other=0.0)
        b = tl.load(
            weight_rows + at[:, None] * weight_stride_column, mask=is_column[:, None] & is_n[None, :], other=0.0
        )
        acc = dot(a, b, acc)
    if HAS_BIAS:
        acc += tl.load(bias + of_n, mask=is_n, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * out_stride + of_n[None, :], acc, mask=is_row[:, None] & is_n[None, :])
