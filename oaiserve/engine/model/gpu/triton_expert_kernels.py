"""The device code of `triton_experts`, which launches it and describes its arguments."""

import triton
import triton.language as tl

from oaiserve.engine.model.gpu.triton_matrix_kernels import added_up, product_of_tiles


@triton.jit(do_not_specialize=["num_pairs"])
def plan_experts_kernel(
    chosen,  # int64 [pairs], the experts of rows
    order,  # int32 [pairs], the pairs sorted by expert
    tile_expert,  # int32 [tiles]; -1: there is nothing to do
    tile_first,  # int32 [tiles], where its pairs begin in the order
    tile_end,  # int32 [tiles], and where those of its expert end
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,  # more than experts
    TILE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sort pairs by expert, and cut each one's into tiles. The program is (expert): each counts all pairs itself."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, num_pairs, CHUNK):
        found = tl.load(chosen + begin + lane, mask=begin + lane < num_pairs, other=BINS - 1).to(tl.int32)
        counts += tl.histogram(found, BINS)
    bins = tl.arange(0, BINS)
    tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    end = first + tl.sum(tl.where(bins == expert, counts, 0), 0)
    tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    place = first
    for begin in range(0, num_pairs, CHUNK):
        found = tl.load(chosen + begin + lane, mask=begin + lane < num_pairs, other=BINS - 1).to(tl.int32)
        is_own = (found == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, 0) - 1, begin + lane, mask=is_own > 0)
        place += tl.sum(is_own, 0)
    for begin in range(first, end, TILE_ROWS):
        tl.store(tile_expert + tile, expert)
        tl.store(tile_first + tile, begin)
        tl.store(tile_end + tile, end)
        tile += 1
    if expert == NUM_EXPERTS - 1:
        for rest in range(tile, num_tiles):
            tl.store(tile_expert + rest, -1)


@triton.jit(do_not_specialize=["num_pairs"])
def expert_kernel(
    x,  # [rows, columns]
    codes,
    scales,
    zeros,
    bias,  # [experts, n]
    factors,  # [pairs], by which the products are multiplied
    order,
    tile_expert,
    tile_first,
    tile_end,
    out,  # [pairs, n]
    partial,  # float32 [splits, pairs, n]
    num_done,  # int32 [tiles], zeros, which each launch leaves as it finds them
    num_pairs,
    n,
    columns,
    tiles_each,  # of columns, for each split
    group_columns,
    pairs_of_row,  # 1 if x has a row for each pair
    x_stride,
    codes_expert_stride,
    codes_stride,
    scales_expert_stride,
    groups_stride,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Multiply pairs with their expert's matrix. The program is (tile of it, tile of pairs, split)."""
    tile, split = tl.program_id(1), tl.program_id(2)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= 0:
        place = tl.load(tile_first + tile) + tl.arange(0, TILE_ROWS)
        is_row = place < tl.load(tile_end + tile)
        pair = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
        output = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
        is_output = output < n
        row = pair // pairs_of_row
        first = split * tiles_each * TILE_COLUMNS
        acc = product_of_tiles(
            x,
            row * x_stride,
            is_row,
            codes + expert * codes_expert_stride + output.to(tl.int64)[:, None] * codes_stride,
            scales + expert * scales_expert_stride + output,
            zeros + expert * scales_expert_stride + output,
            is_output,
            first,
            tl.minimum(first + tiles_each * TILE_COLUMNS, columns),
            group_columns,
            groups_stride,
            KIND,
            HAS_ZEROS,
            TILE_ROWS,
            TILE_N,
            TILE_COLUMNS,
        )
        is_number = is_output[:, None] & is_row[None, :]
        number = pair[None, :] * n + output[:, None]
        if SPLITS > 1:
            done = num_done + tile * tl.num_programs(0) + tl.program_id(0)
            acc, is_last = added_up(acc, partial, num_pairs.to(tl.int64) * n, number, is_number, done, split, SPLITS)
        else:
            is_last = True
        if is_last:
            if HAS_BIAS:
                acc += tl.load(bias + expert * n + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
            if HAS_FACTORS:
                acc *= tl.load(factors + pair, mask=is_row, other=0.0).to(tl.float32)[None, :]
            tl.store(out + number, acc.to(out.dtype.element_ty), mask=is_number)
