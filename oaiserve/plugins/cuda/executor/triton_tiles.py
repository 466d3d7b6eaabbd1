"""Device code that several kernels share: the product of two tiles, and rounding to 8-bit floats."""

import triton
import triton.language as tl

from oaiserve.plugins.cuda.executor import device_matrices

LEAST_LARGEST = tl.constexpr(device_matrices.LEAST_LARGEST)
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc):
    """Return a @ b + acc in float32, without TF32."""
    if IS_INTERPRETED:  # the interpreter would multiply the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def to_float8(numbers, dtype: tl.constexpr):
    """Round float32 numbers to the nearest 8-bit floats (E4M3). Numbers that are too large become the largest."""
    numbers = tl.minimum(tl.maximum(numbers, -448.0), 448.0)
    if IS_INTERPRETED:  # the interpreter doesn't carry when it rounds up
        bits = numbers.to(tl.int32, bitcast=True)
        normal = ((bits + ((bits >> 20) & 1) + 0x7FFFF) & 0x7FF00000 | bits & -0x80000000).to(tl.float32, bitcast=True)
        small = (numbers + 24576.0) - 24576.0  # rounds to multiples of 2^-9
        numbers = tl.where(tl.abs(numbers) < 0.015625, small, normal)
    return numbers.to(dtype)


@triton.jit
def rounded_groups(numbers, dtype: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return float32 numbers [TILE] as 8-bit floats, and the scales [groups] of each GROUP of them."""
    groups = tl.reshape(numbers, [TILE // GROUP, GROUP])
    scale = tl.maximum(tl.max(tl.abs(groups), 1), LEAST_LARGEST) / 448.0
    # The maximum may ignore NaN, and an 8-bit float can't be infinite. The scale of such a group is NaN.
    scale += tl.sum(groups * 0.0, 1)
    return to_float8(tl.reshape(groups / scale[:, None], [TILE]), dtype), scale
