"""The device code of `triton_adapters`, which launches it and describes its arguments.

Rows are sorted by adapter, and cut into tiles as in `plan_experts_kernel`, so that a program reads the weights of only
one adapter. The table has four words for each number: see `TritonAdapters.table`.
"""

import triton
import triton.language as tl

from oaiserve.plugins.cuda.executor.triton_tiles import dot


@triton.jit
def _rows(order, first, end, ROWS: tl.constexpr):
    """Return the rows int64 [ROWS] of a tile, and a mask of those that exist."""
    place = tl.load(first) + tl.arange(0, ROWS)
    is_row = place < tl.load(end)
    return tl.load(order + place, mask=is_row, other=0).to(tl.int64), is_row


@triton.jit(do_not_specialize=["table_stride", "x_stride", "widest"])
def shrink_kernel(
    x,
    order,
    tile_expert,  # the number of its adapter
    tile_first,
    tile_end,
    table,
    table_stride,
    products,
    x_stride,
    columns,
    widest,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute scale * (x A^T) for some ranks of a tile. The program is (tile, ranks)."""
    tile = tl.program_id(0)
    number = tl.load(tile_expert + tile).to(tl.int64)
    if number <= 0:
        return
    entry = table + number * table_stride
    rank = tl.load(entry + 2)
    # An adapter that is narrower than the widest one, or has no part for this layer, has no ranks here.
    if tl.program_id(1) * RANKS >= rank:
        return
    ranks = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    row, is_row = _rows(order, tile_first + tile, tile_end + tile, ROWS)
    a = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
    sums = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_inside = column < columns
        inputs = tl.load(
            x + row[:, None] * x_stride + column[None, :], mask=is_row[:, None] & is_inside[None, :], other=0.0
        )
        weights = tl.load(
            a + ranks[None, :] * columns + column[:, None], mask=(ranks < rank)[None, :] & is_inside[:, None], other=0.0
        )
        sums = dot(inputs, weights, sums)
    sums *= tl.load(entry + 3).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(products + row[:, None] * widest + ranks[None, :], sums, mask=is_row[:, None] & (ranks < rank)[None, :])


@triton.jit(do_not_specialize=["table_stride", "out_stride", "widest"])
def expand_kernel(
    products,
    order,
    tile_expert,
    tile_first,
    tile_end,
    table,
    table_stride,
    out,
    out_stride,
    num_columns,
    widest,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the products times B^T to some columns of `out`, for the rows of a tile. The program is (tile, columns)."""
    tile = tl.program_id(0)
    number = tl.load(tile_expert + tile).to(tl.int64)
    if number <= 0:
        return
    entry = table + number * table_stride
    rank = tl.load(entry + 2).to(tl.int32)
    if rank == 0:
        return
    b = tl.load(entry + 1).to(tl.pointer_type(out.dtype.element_ty))
    row, is_row = _rows(order, tile_first + tile, tile_end + tile, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rank, RANKS):
        ranks = start + tl.arange(0, RANKS)
        is_inside = ranks < rank
        part = tl.load(
            products + row[:, None] * widest + ranks[None, :], mask=is_row[:, None] & is_inside[None, :], other=0.0
        )
        weights = tl.load(
            b + column[None, :] * rank + ranks[:, None],
            mask=is_inside[:, None] & (column < num_columns)[None, :],
            other=0.0,
        )
        sums = dot(part.to(out.dtype.element_ty), weights, sums)
    places_out = out + row[:, None] * out_stride + column[None, :]
    is_wanted = is_row[:, None] & (column < num_columns)[None, :]
    before = tl.load(places_out, mask=is_wanted, other=0.0).to(tl.float32)
    tl.store(places_out, (before + sums).to(out.dtype.element_ty), mask=is_wanted)
