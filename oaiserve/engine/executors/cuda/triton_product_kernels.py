"""The device code of `triton_products`, which launches it and describes its arguments."""

import triton
import triton.language as tl

from oaiserve.engine.executors.cuda.triton_tiles import dot, to_float8


@triton.jit
def _less(code, zero, dtype: tl.constexpr):
    """Return small integers minus a zero. In the lowest bits of 2^23, an integer adds its value without conversion."""
    return ((code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)).to(dtype)


@triton.jit
def _float4(code, exponent, dtype):
    """Return floats of four bits times powers of two. `exponent` is the exponent plus 127.

    These floats are E2M1: a sign, two bits of the exponent and one of the fraction."""
    size = (code & 7).to(tl.int16)
    # From 1 on, exponent and fraction are those of bfloat16, whose exponents begin 126 lower. The smaller numbers are 0
    # and 0.5. The power of two is added to the exponent.
    bits = tl.where(size < 2, 0x3F00, (size << 6) + (126 << 7)) + ((exponent.to(tl.int16) - 127) << 7)
    bits = tl.where(size == 0, 0, bits).to(tl.int16) | ((code & 8).to(tl.int16) << 12)
    return bits.to(tl.bfloat16, bitcast=True).to(dtype)


@triton.jit
def _scale_and_zero(scales, zeros, group, is_output, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Load the scales [TILE_N] and the zeros [TILE_N, 1] of a group of integers; floats have no zeros."""
    scale = tl.load(scales + group, mask=is_output, other=0.0).to(tl.float32)
    if HAS_ZEROS:
        zero = tl.load(zeros + group, mask=is_output, other=0).to(tl.float32)[:, None]
    else:
        zero = tl.full([scale.shape[0], 1], 8.0 if KIND == "int4" else 128.0, tl.float32)
    return scale, zero


@triton.jit
def _inputs(x, row_offset, is_row, column):
    """Load columns of the inputs, transposed: [columns, rows]."""
    return tl.load(x + row_offset[None, :] + column[:, None], mask=is_row[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_rows", "tiles_each"])
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
    num_rows,  # rows of `out`
    n,
    columns,
    tiles_each,  # tiles of columns in each split
    group_columns,
    pairs_of_row,  # 1 if x has a row for each pair
    x_stride,
    codes_expert_stride,
    codes_stride,
    scales_expert_stride,
    groups_stride,  # stride of scales and zeros, in which the numbers of a group are adjacent
    KIND: tl.constexpr,
    OF_EXPERTS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Compute x @ W^T for a tile of rows of W and a tile of rows of x, or of an expert's pairs, with its W.

    The program is (tile of W, tile of x, split). A tile of columns is within one group. The stored codes of W are
    multiplied with x, and their product with the scale afterwards. W is the first factor, so that tensor cores read it
    from registers, where it is unpacked. With several splits, each computes some of the columns, and the last one to
    end adds up all of them in order.
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
    row_offset = row * x_stride
    output = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    is_output = output < n
    code_rows = codes + output.to(tl.int64)[:, None] * codes_stride
    scales += output
    zeros += output
    acc = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
    HALF: tl.constexpr = TILE_COLUMNS // 2
    half = tl.arange(0, HALF)
    column = tl.arange(0, TILE_COLUMNS)
    first = split * tiles_each * TILE_COLUMNS
    last = tl.minimum(first + tiles_each * TILE_COLUMNS, columns)
    for begin in range(first, last, TILE_COLUMNS):
        nothing = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
        if KIND == "mxfp4":  # Each half of a tile is a group.
            group = begin // HALF * groups_stride
            packed = tl.load(code_rows + (begin // 2 + half)[None, :], mask=is_output[:, None], other=0)
            exponent = tl.load(scales + group, mask=is_output, other=127)[:, None]
            low = _float4(packed & 15, exponent, x.dtype.element_ty)
            acc = dot(low, _inputs(x, row_offset, is_row, begin + half), acc)
            exponent = tl.load(scales + group + groups_stride, mask=is_output, other=127)[:, None]
            high = _float4(packed >> 4, exponent, x.dtype.element_ty)
            acc = dot(high, _inputs(x, row_offset, is_row, begin + HALF + half), acc)
        elif KIND == "dense":
            weight = tl.load(code_rows + (begin + column)[None, :], mask=is_output[:, None], other=0.0)
            acc = dot(weight, _inputs(x, row_offset, is_row, begin + column), acc)
        else:
            group = begin // group_columns * groups_stride
            scale, zero = _scale_and_zero(scales, zeros, group, is_output, KIND, HAS_ZEROS)
            if KIND == "int4":
                # The lower halves of a tile's bytes have its first columns, and the upper halves have the others.
                packed = tl.load(code_rows + (begin // 2 + half)[None, :], mask=is_output[:, None], other=0)
                low = _less(packed & 15, zero, x.dtype.element_ty)
                product = dot(low, _inputs(x, row_offset, is_row, begin + half), nothing)
                high = _less(packed >> 4, zero, x.dtype.element_ty)
                product = dot(high, _inputs(x, row_offset, is_row, begin + HALF + half), product)
            else:
                code = tl.load(code_rows + (begin + column)[None, :], mask=is_output[:, None], other=0.0)
                weight = _less(code, zero, x.dtype.element_ty) if KIND == "int8" else code.to(x.dtype.element_ty)
                product = dot(weight, _inputs(x, row_offset, is_row, begin + column), nothing)
            acc += product * scale[:, None]

    is_number = is_output[:, None] & is_row[None, :]
    number = out_row[None, :] * n + output[:, None]
    if SPLITS > 1:
        size = num_rows.to(tl.int64) * n
        tl.store(partial + split.to(tl.int64) * size + number, acc, mask=is_number)
        # All threads of this program write their numbers before one of them counts the split, which publishes them.
        tl.debug_barrier()
        done = num_done + tile * tl.num_programs(0) + tl.program_id(0)
        is_last = tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if is_last:
            tl.debug_barrier()
            tl.store(done, 0)  # The next launch needs a zero.
            acc = tl.zeros_like(acc)
            part = partial + number
            for _ in range(SPLITS):
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
    tile_first,  # int32 [tiles], the place of its first pair in the order
    tile_end,  # int32 [tiles], the place after the last pair of its expert
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
    group_columns,
    codes_stride,
    groups_stride,
    KIND: tl.constexpr,  # as in `product_kernel`
    HAS_ZEROS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Write the numbers of a tile of W, unpacked. The program is (tile of rows, tile of columns)."""
    row = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    is_row = row < n
    begin = tl.program_id(1) * TILE_COLUMNS
    code_rows = codes + row.to(tl.int64)[:, None] * codes_stride
    out_rows = out + row.to(tl.int64)[:, None] * columns + begin
    group = begin // group_columns * groups_stride
    scale, zero = _scale_and_zero(scales + row, zeros + row, group, is_row, KIND, HAS_ZEROS)
    HALF: tl.constexpr = TILE_COLUMNS // 2
    half = tl.arange(0, HALF)[None, :]
    if KIND == "int4":
        packed = tl.load(code_rows + begin // 2 + half, mask=is_row[:, None], other=0)
        low = _less(packed & 15, zero, tl.float32)
        high = _less(packed >> 4, zero, tl.float32)
        tl.store(out_rows + half, (low * scale[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
        tl.store(out_rows + HALF + half, (high * scale[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        column = tl.arange(0, TILE_COLUMNS)[None, :]
        code = tl.load(code_rows + begin + column, mask=is_row[:, None], other=0.0)
        weight = _less(code, zero, tl.float32) if KIND == "int8" else code.to(tl.float32)
        tl.store(out_rows + column, (weight * scale[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def round_rows_kernel(
    x,
    codes,
    scales,
    columns,
    x_stride,
    LARGEST: tl.constexpr,  # The largest float of eight bits.
    LEAST_LARGEST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round a row to floats of eight bits, and write its scale. The program is (row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    is_inside = column < columns
    numbers = tl.load(x + row * x_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), 0), LEAST_LARGEST) / LARGEST
    # The maximum may ignore NaN, and a float of eight bits cannot be infinite. The scale of such a row is NaN.
    scale += tl.sum(numbers * 0.0, 0)
    tl.store(scales + row, scale)
    tl.store(codes + row * columns + column, to_float8(numbers / scale, codes.dtype.element_ty), mask=is_inside)
