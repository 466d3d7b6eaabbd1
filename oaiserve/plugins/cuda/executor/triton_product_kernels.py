"""The device code of `triton_products`, which launches it and describes its arguments."""

import triton
import triton.language as tl

from oaiserve.plugins.cuda.executor.triton_tiles import dot, rounded_groups
from oaiserve.plugins.cuda.executor.triton_unpacking import (
    by_column,
    factor_of,
    of_4_bits,
    of_8_bits,
    of_float8,
    scale_of,
)


@triton.jit
def _scales_and_zeros(
    scales,  # [TILE_N] addresses, like those of the zeros
    zeros,
    group,
    last_group,
    groups_stride,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load the scales and zeros [TILE_N, GROUPS] of the groups from `group` on, or the last group's beyond the end."""
    offsets = tl.minimum(group + tl.arange(0, GROUPS), last_group)[None, :] * groups_stride
    scale = scale_of(tl.load(scales[:, None] + offsets), KIND, DTYPE)
    if HAS_ZEROS:
        zero = tl.load(zeros[:, None] + offsets).to(tl.float32)
    else:
        zero = tl.full([scales.shape[0], 1], 8.0 if KIND == "int4" else 128.0, tl.float32)
    return scale, zero


@triton.jit
def _inputs(x_rows, column, columns, IS_WHOLE: tl.constexpr):
    """Load columns of the inputs, transposed: [columns, rows]. They are zero beyond the last column."""
    if IS_WHOLE:
        return tl.load(x_rows + column[:, None])
    else:
        return tl.load(x_rows + column[:, None], mask=(column < columns)[:, None], other=0.0)


@triton.jit
def _codes(code_rows, place, width, IS_WHOLE: tl.constexpr):
    """Load codes [TILE_N, places] of the matrix. They are zero beyond its last one."""
    if IS_WHOLE:
        return tl.load(code_rows + place[None, :])
    else:
        return tl.load(code_rows + place[None, :], mask=(place < width)[None, :], other=0)


@triton.jit
def column_of(place, PARTS: tl.constexpr):
    """Return the column of the first of the codes of a place: each 32 columns are stored in as many places as a part
    has, one part after the other."""
    WIDTH: tl.constexpr = 32 // PARTS
    return place // WIDTH * 32 + place % WIDTH


@triton.jit(do_not_specialize=["num_rows", "splits", "tiles_each"])
def product_kernel(
    x,  # [rows, columns]
    codes,
    scales,
    zeros,
    bias,  # [n], or [experts, n]
    factors,  # [pairs], factors of the products
    order,  # The next arguments are a plan of experts.
    tile_expert,
    tile_first,
    tile_end,
    out,  # [rows, n], or [pairs, n]
    partial,  # float32 [splits, rows or pairs, n]
    num_done,  # int32 [tiles], zeros before and after each launch
    num_rows,  # the rows of `out`
    n,
    columns,
    splits,
    tiles_each,  # tiles of columns in each split
    pairs_of_row,  # 1 if x has a row for each pair
    x_stride,
    codes_expert_stride,
    codes_stride,
    scales_expert_stride,
    groups_stride,  # stride of scales and zeros, in which the numbers of a group are adjacent
    KIND: tl.constexpr,
    PARTS: tl.constexpr,  # codes of each number of `codes`
    GROUP_COLUMNS: tl.constexpr,  # 0 if each row of W is one group
    IS_WHOLE: tl.constexpr,  # whether the last tile has all its columns
    OF_EXPERTS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Compute x @ W^T for a tile of rows of W and a tile of rows of x, or of an expert's pairs, with its W.

    The program is (tile of W, tile of x, split). The stored codes of W are multiplied with x, and their product with
    the scale afterwards, unless a tile of columns has several groups: then weights are scaled first, and rounded to the
    dtype of x. Scales are loaded a tile ahead. W is the first factor, so that tensor cores read it from registers,
    where it is unpacked. With several splits, each computes some of the columns, and the last one to finish adds up all
    of them in order.
    """
    tile = tl.program_id(1)
    split = tl.program_id(2)
    if OF_EXPERTS:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        if expert < 0:
            return
        place = tl.load(tile_first + tile) + tl.arange(0, TILE_ROWS)
        is_row = place < tl.load(tile_end + tile)
        out_row = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
        row = out_row // pairs_of_row
        codes += expert * codes_expert_stride
        scales += expert * scales_expert_stride
        zeros += expert * scales_expert_stride
        bias += expert * n
    else:
        out_row = tile.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        is_row = out_row < num_rows
        row = out_row
    # Results of other rows are not stored, so any data will do for them.
    x_rows = x + tl.where(is_row, row, 0)[None, :] * x_stride
    output = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    is_output = output < n
    weight_row = tl.minimum(output, n - 1)
    code_rows = codes + weight_row.to(tl.int64)[:, None] * codes_stride
    scales += weight_row
    zeros += weight_row
    acc = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
    DTYPE: tl.constexpr = x.dtype.element_ty
    GROUPS: tl.constexpr = 1 if GROUP_COLUMNS == 0 else max(1, TILE_COLUMNS // GROUP_COLUMNS)  # groups of a tile
    IS_SCALED_FIRST: tl.constexpr = (GROUPS > 1) | (KIND == "mxfp4")
    IS_SCALED_LAST: tl.constexpr = (KIND != "dense") & (GROUP_COLUMNS == 0)
    WIDTH: tl.constexpr = TILE_COLUMNS // PARTS
    PART: tl.constexpr = 32 // PARTS
    place = tl.arange(0, WIDTH)
    column = column_of(place, PARTS)
    first = split * tiles_each * TILE_COLUMNS
    last = tl.minimum(first + tiles_each * TILE_COLUMNS, columns)
    last_group = 0 if GROUP_COLUMNS == 0 else columns // GROUP_COLUMNS - 1
    if KIND != "dense":
        group = 0 if GROUP_COLUMNS == 0 else first // GROUP_COLUMNS
        scale, zero = _scales_and_zeros(scales, zeros, group, last_group, groups_stride, KIND, HAS_ZEROS, GROUPS, DTYPE)
    for begin in range(first, last, TILE_COLUMNS):
        code = _codes(code_rows, begin // PARTS + place, columns // PARTS, IS_WHOLE)
        if IS_SCALED_FIRST | IS_SCALED_LAST:
            product = acc
        else:
            product = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
        x_tile = _inputs(x_rows, begin + column, columns, IS_WHOLE)
        if KIND == "dense":
            acc = dot(code, x_tile, acc)
        else:
            if not IS_SCALED_LAST:
                group = (begin + TILE_COLUMNS) // GROUP_COLUMNS
                next_scale, next_zero = _scales_and_zeros(
                    scales, zeros, group, last_group, groups_stride, KIND, HAS_ZEROS, GROUPS, DTYPE
                )
            zero_of_column = by_column(zero, WIDTH)
            if PARTS == 4:
                weight, second, third, fourth = of_4_bits(code, zero_of_column, KIND, DTYPE)
            elif PARTS == 2:
                weight, second = of_8_bits(code, zero_of_column, HAS_ZEROS, DTYPE)
            else:
                weight = of_float8(code, DTYPE)
            if IS_SCALED_FIRST:
                scale_of_column = by_column(scale.to(weight.dtype), WIDTH)
                weight *= scale_of_column
                if PARTS > 1:
                    second *= scale_of_column
                if PARTS > 2:
                    third *= scale_of_column
                    fourth *= scale_of_column
            product = dot(weight.to(DTYPE), x_tile, product)
            if PARTS > 1:
                x_tile = _inputs(x_rows, begin + PART + column, columns, IS_WHOLE)
                product = dot(second.to(DTYPE), x_tile, product)
            if PARTS > 2:
                x_tile = _inputs(x_rows, begin + 2 * PART + column, columns, IS_WHOLE)
                product = dot(third.to(DTYPE), x_tile, product)
                x_tile = _inputs(x_rows, begin + 3 * PART + column, columns, IS_WHOLE)
                product = dot(fourth.to(DTYPE), x_tile, product)
            if IS_SCALED_FIRST | IS_SCALED_LAST:
                acc = product
            else:
                acc += product * scale
            if not IS_SCALED_LAST:
                scale = next_scale
                zero = next_zero
    if IS_SCALED_LAST:
        acc *= scale
    FACTOR: tl.constexpr = factor_of(KIND, DTYPE)
    if FACTOR != 1:
        acc *= FACTOR

    is_number = is_output[:, None] & is_row[None, :]
    number = out_row[None, :] * n + output[:, None]
    if IS_SPLIT:
        size = num_rows.to(tl.int64) * n
        tl.store(partial + split.to(tl.int64) * size + number, acc, mask=is_number)
        # All threads of this program write their numbers before one of them counts the split, which publishes them.
        tl.debug_barrier()
        done = num_done + tile * tl.num_programs(0) + tl.program_id(0)
        is_last = tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == splits - 1
        if is_last:
            tl.debug_barrier()
            tl.store(done, 0)  # The next launch needs a zero.
            acc = tl.zeros_like(acc)
            part = partial + number
            for _ in range(splits):
                acc += tl.load(part, mask=is_number, other=0.0, cache_modifier=".cg")
                part += tl.full([], 1, tl.int64) * size
    else:
        is_last = True
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if HAS_FACTORS:
            acc *= tl.load(factors + out_row, mask=is_row, other=0.0).to(tl.float32)[None, :]
        tl.store(out + number, acc.to(out.dtype.element_ty), mask=is_number)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def plan_experts_kernel(
    chosen,  # int64 [pairs], the experts of rows
    order,  # int32 [pairs], the pairs sorted by expert
    tile_expert,  # int32 [tiles], -1 for an unused tile
    tile_first,  # int32 [tiles], the index of the tile's first pair in the order
    tile_end,  # int32 [tiles], the index after the last pair of the tile's expert
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,  # more than experts
    TILE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sort pairs by expert, and cut each expert's pairs into tiles. The program is (expert) and counts all pairs."""
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


@triton.jit
def unpack_kernel(
    codes,
    scales,
    zeros,
    out,  # [n, columns]
    n,
    columns,
    codes_stride,
    groups_stride,
    KIND: tl.constexpr,  # this and the following ones as in `product_kernel`
    PARTS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Write the numbers of a tile of W, unpacked. The program is (tile of rows, tile of columns)."""
    row = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    is_row = row < n
    begin = tl.program_id(1) * TILE_COLUMNS
    stored_row = tl.minimum(row, n - 1)
    group = 0 if GROUP_COLUMNS == 0 else begin // GROUP_COLUMNS
    scale, zero = _scales_and_zeros(
        scales + stored_row, zeros + stored_row, group, group, groups_stride, KIND, HAS_ZEROS, 1, tl.float32
    )
    place = tl.arange(0, TILE_COLUMNS // PARTS)
    code_rows = codes + stored_row.to(tl.int64)[:, None] * codes_stride
    code = tl.load(code_rows + (begin // PARTS + place)[None, :])
    out_rows = out + row.to(tl.int64)[:, None] * columns + (begin + column_of(place, PARTS))[None, :]
    PART: tl.constexpr = 32 // PARTS
    is_inside = is_row[:, None]
    dtype = out.dtype.element_ty
    if PARTS == 4:
        weight, second, third, fourth = of_4_bits(code, zero, KIND, tl.float32)
        tl.store(out_rows + 2 * PART, (third * scale).to(dtype), mask=is_inside)
        tl.store(out_rows + 3 * PART, (fourth * scale).to(dtype), mask=is_inside)
    elif PARTS == 2:
        weight, second = of_8_bits(code, zero, HAS_ZEROS, tl.float32)
    else:
        weight = of_float8(code, tl.float32)
    tl.store(out_rows, (weight * scale).to(dtype), mask=is_inside)
    if PARTS > 1:
        tl.store(out_rows + PART, (second * scale).to(dtype), mask=is_inside)


@triton.jit(do_not_specialize=["num_stored"])
def round_rows_kernel(
    x,
    codes,
    scales,
    columns,
    x_stride,
    num_stored,  # number of scales stored for each group
    GROUP: tl.constexpr,  # columns that share a scale
    TILE: tl.constexpr,
):
    """Round a row to 8-bit floats, and write the scales of its groups. The program is (row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    is_inside = column < columns
    numbers = tl.load(x + row * x_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    rounded, scale = rounded_groups(numbers, codes.dtype.element_ty, GROUP, TILE)
    group = tl.arange(0, TILE // GROUP)
    tl.store(scales + group * num_stored + row, scale, mask=group * GROUP < columns)
    tl.store(codes + row * columns + column, rounded, mask=is_inside)
