"""The device code of `triton_layers`, which launches it and describes its arguments."""

import triton
import triton.language as tl

from oaiserve.plugins.cuda.executor.triton_tiles import rounded_groups


@triton.jit
def _normed(x, is_inside, weight, bias, epsilon, width, HAS_MEAN: tl.constexpr):
    """Return the norm of a row, float32 [TILE]. It is zero beyond the end of the row, like `weight` and `bias`."""
    if HAS_MEAN:
        x = tl.where(is_inside, x - tl.sum(x, 0) / width, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    return x * weight + bias


@triton.jit
def _of_norm(weight, bias, column, is_inside, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Load the weight and the bias of a norm, or 0 for one that is missing."""
    own_weight = 0.0
    own_bias = 0.0
    if HAS_NORM:
        own_weight = tl.load(weight + column, mask=is_inside, other=0.0)
    if HAS_BIAS:
        own_bias = tl.load(bias + column, mask=is_inside, other=0.0)
    return own_weight, own_bias


@triton.jit
def _store_rounded(
    numbers,
    codes,  # the row's codes, beginning at the first of these columns
    scales,  # the row's scales
    first_group,
    num_stored,
    columns,
    is_inside,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write numbers [TILE] of a row of this many columns as 8-bit floats, and write their scales."""
    rounded, scale = rounded_groups(numbers.to(tl.float32), codes.dtype.element_ty, GROUP, TILE)
    group = first_group + tl.arange(0, TILE // GROUP)
    tl.store(scales + group * num_stored, scale, mask=group * GROUP < columns)
    tl.store(codes + tl.arange(0, TILE), rounded, mask=is_inside)


@triton.jit(do_not_specialize=["num_stored"])
def add_and_norm_kernel(
    hidden,
    first,
    second,
    out,
    out_weight,
    out_bias,
    weight,
    bias,
    out_epsilon,
    epsilon,
    scale,
    width,
    hidden_stride,
    first_stride,
    second_stride,
    codes,  # the norm, rounded to 8-bit floats
    scales,
    num_stored,  # number of scales stored for each group
    ROUNDED_GROUP: tl.constexpr,  # numbers that share a scale; 0 if nothing is rounded
    NUM_ADDED: tl.constexpr,
    HAS_OUT_NORM: tl.constexpr,
    HAS_OUT_BIAS: tl.constexpr,
    HAS_OUT_MEAN: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add to a row of `hidden`, in place, and write its norm. The program is (row).

    It loads everything before it computes, so that it waits for memory only once.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    is_inside = column < width
    x = tl.load(hidden + row * hidden_stride + column, mask=is_inside, other=0.0)
    own_weight, own_bias = _of_norm(weight, bias, column, is_inside, HAS_NORM, HAS_BIAS)
    added_weight, added_bias = _of_norm(out_weight, out_bias, column, is_inside, HAS_OUT_NORM, HAS_OUT_BIAS)
    x = x.to(tl.float32)
    if NUM_ADDED > 0:
        added = tl.load(first + row * first_stride + column, mask=is_inside, other=0.0).to(tl.float32)
        if NUM_ADDED > 1:
            added += tl.load(second + row * second_stride + column, mask=is_inside, other=0.0).to(tl.float32)
        if HAS_OUT_NORM:
            added = _normed(added, is_inside, added_weight, added_bias, out_epsilon, width, HAS_OUT_MEAN)
        # The sum is rounded before the norm, so that the norm is computed from what is stored.
        x = (x + scale * added).to(hidden.dtype.element_ty)
        tl.store(hidden + row * hidden_stride + column, x, mask=is_inside)
        x = x.to(tl.float32)
    if HAS_NORM:
        x = _normed(x, is_inside, own_weight, own_bias, epsilon, width, HAS_MEAN)
        x = x.to(out.dtype.element_ty)
        tl.store(out + row * width + column, x, mask=is_inside)
        if ROUNDED_GROUP > 0:
            of_row = codes + row * width
            _store_rounded(x, of_row, scales + row, 0, num_stored, width, is_inside, ROUNDED_GROUP, TILE)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 1 + tanh(y) is 2 - 2 / (1 + exp(2 y))
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * y)))
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        x = tl.maximum(x, 0.0)
        return x * x


@triton.jit(do_not_specialize=["num_stored"])
def activate_kernel(
    products,
    out,
    inner,
    stride,
    alpha,
    limit,
    codes,  # the result, rounded to 8-bit floats
    scales,
    num_stored,  # number of scales stored for each group
    ROUNDED_GROUP: tl.constexpr,  # numbers that share a scale; 0 if nothing is rounded
    ACTIVATION: tl.constexpr,  # "clamped": (up + 1) * gate * sigmoid(alpha * gate), of gates and ups up to the limit
    IS_GATED: tl.constexpr,  # gates come first, then ups
    TILE: tl.constexpr,
):
    """Compute activation(gate) * up, or only the activation. The program is (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = column < inner
    x = tl.load(products + row * stride + column, mask=is_inside, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(products + row * stride + inner + column, mask=is_inside, other=0.0).to(tl.float32)
        if ACTIVATION == "clamped":
            x = tl.minimum(x, limit)
            x = (tl.minimum(tl.maximum(up, -limit), limit) + 1.0) * x / (1.0 + tl.exp(-alpha * x))
        else:
            x = _activated(x, ACTIVATION) * up
    else:
        x = _activated(x, ACTIVATION)
    x = x.to(out.dtype.element_ty)
    tl.store(out + row * inner + column, x, mask=is_inside)
    if ROUNDED_GROUP > 0:
        begin = tl.program_id(1) * TILE
        of_row = codes + row * inner + begin
        group = begin // ROUNDED_GROUP
        _store_rounded(x, of_row, scales + row, group, num_stored, inner, is_inside, ROUNDED_GROUP, TILE)
