"""Device code that converts codes of 4 and 8 bits to 16-bit numbers, several at a time.

The instructions put codes where floats have their bits, so no conversion is needed. A test computes them in Python for
all codes. Triton's interpreter has no inline assembly, so it computes in the plain way.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_hip
from triton.runtime.jit import constexpr_function

from oaiserve.plugins.cuda.executor.triton_tiles import IS_INTERPRETED

# In all of these, a 32-bit number holds two 16-bit numbers. `$0` to `$3` become the 4-bit codes in `$4`, from the
# lowest on. An integer is added to a float whose last bit counts as one.
_INTEGERS_OF_4_BITS = """{
.reg .b32 u;
lop3.b32 $0, $4, 0x000F000F, ONES, 0xEA;
shr.u32 u, $4, 4;
lop3.b32 $1, u, 0x000F000F, ONES, 0xEA;
shr.u32 u, $4, 8;
lop3.b32 $2, u, 0x000F000F, ONES, 0xEA;
shr.u32 u, $4, 12;
lop3.b32 $3, u, 0x000F000F, ONES, 0xEA;
}"""
INT4_BF16 = tl.constexpr(_INTEGERS_OF_4_BITS.replace("ONES", "0x43004300"))  # 128 + code
INT4_FP16 = tl.constexpr(_INTEGERS_OF_4_BITS.replace("ONES", "0x64006400"))  # 1024 + code
# E2M1 times 2^-126: its exponent becomes the last bits of bfloat16's exponent, and its fraction the first bit of the
# fraction.
FLOAT4_BF16 = tl.constexpr("""{
.reg .b32 u, s;
shl.b32 s, $4, 12;
and.b32 s, s, 0x80008000;
shl.b32 u, $4, 6;
lop3.b32 $0, u, 0x01C001C0, s, 0xEA;
shl.b32 s, $4, 8;
and.b32 s, s, 0x80008000;
shl.b32 u, $4, 2;
lop3.b32 $1, u, 0x01C001C0, s, 0xEA;
shl.b32 s, $4, 4;
and.b32 s, s, 0x80008000;
shr.u32 u, $4, 2;
lop3.b32 $2, u, 0x01C001C0, s, 0xEA;
and.b32 s, $4, 0x80008000;
shr.u32 u, $4, 6;
lop3.b32 $3, u, 0x01C001C0, s, 0xEA;
}""")
# `$0` and `$1` become the lower and the upper bytes of `$2`. In bfloat16, these are the integers minus 128: 128 plus
# the last seven bits, minus 256, or minus 128 if the first bit is set. In float16, they are 1024 + code.
INT8_BF16 = tl.constexpr("""{
.reg .b32 u, y, z, one;
mov.b32 one, 0x3F803F80;
lop3.b32 y, $2, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 z, $2, 0x00800080, 0xC380C380, 0x6A;
fma.rn.bf16x2 $0, y, one, z;
shr.u32 u, $2, 8;
lop3.b32 y, u, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 z, u, 0x00800080, 0xC380C380, 0x6A;
fma.rn.bf16x2 $1, y, one, z;
}""")
INT8_FP16 = tl.constexpr("""{
.reg .b32 u;
lop3.b32 $0, $2, 0x00FF00FF, 0x64006400, 0xEA;
shr.u32 u, $2, 8;
lop3.b32 $1, u, 0x00FF00FF, 0x64006400, 0xEA;
}""")
# Expand E4M3 numbers to bfloat16 (times 2^-120) or float16 (times 2^-8). One form expands the two bytes of the 16-bit
# register `$1` into `$0`, with fewer instructions on Hopper. The other expands the four bytes of `$2` into `$0`, `$1`.
_TWO_FLOATS_OF_8_BITS = """{
.reg .b32 t, s;
cvt.u32.u16 t, $1;
prmt.b32 t, t, 0, 0x1404;
and.b32 s, t, 0x80008000;
shr.u32 t, t, SHIFT;
lop3.b32 $0, t, MASK, s, 0xEA;
}"""
_FOUR_FLOATS_OF_8_BITS = """{
.reg .b32 t, s;
prmt.b32 t, $2, 0, 0x1404;
and.b32 s, t, 0x80008000;
shr.u32 t, t, SHIFT;
lop3.b32 $0, t, MASK, s, 0xEA;
prmt.b32 t, $2, 0, 0x3424;
and.b32 s, t, 0x80008000;
shr.u32 t, t, SHIFT;
lop3.b32 $1, t, MASK, s, 0xEA;
}"""
TWO_FLOAT8_BF16 = tl.constexpr(_TWO_FLOATS_OF_8_BITS.replace("SHIFT", "4").replace("MASK", "0x07F007F0"))
TWO_FLOAT8_FP16 = tl.constexpr(_TWO_FLOATS_OF_8_BITS.replace("SHIFT", "1").replace("MASK", "0x3F803F80"))
FOUR_FLOAT8_BF16 = tl.constexpr(_FOUR_FLOATS_OF_8_BITS.replace("SHIFT", "4").replace("MASK", "0x07F007F0"))
FOUR_FLOAT8_FP16 = tl.constexpr(_FOUR_FLOATS_OF_8_BITS.replace("SHIFT", "1").replace("MASK", "0x3F803F80"))


@constexpr_function
def _is_plain(kind, dtype):
    """Return whether numbers are computed in float32, without the instructions above, which only CUDA has."""
    is_fast = dtype == tl.bfloat16 or (dtype == tl.float16 and kind != "mxfp4")
    return IS_INTERPRETED.value or is_hip() or not is_fast


@constexpr_function
def factor_of(kind, dtype):
    """Return the factor by which products are too small.

    With it, one multiplication of MXFP4 in bfloat16 covers scales from 2^-66 to 2^61. Smaller scales become 0, and
    larger ones the largest.
    """
    return 2.0**60 if kind == "mxfp4" and not _is_plain(kind, dtype) else 1.0


@triton.jit
def _plain(code, zero, KIND: tl.constexpr):
    """Return the values of codes, in float32."""
    if KIND == "mxfp4":  # E2M1 has a sign bit, two exponent bits and one fraction bit.
        size = (code & 7).to(tl.int32)
        bits = tl.where(size < 2, size * 0x3F000000, (size << 22) + (126 << 23)) | ((code & 8).to(tl.int32) << 28)
        return bits.to(tl.float32, bitcast=True)
    elif KIND == "float8":
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return code.to(tl.float32) - zero


@triton.jit
def of_4_bits(codes, zero, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of the four codes in each of `codes`, from the lowest on: integers minus zeros, or floats.

    They are in `DTYPE`, or in float32. For "mxfp4" in bfloat16, they are too small by a factor of 2^126.
    """
    if _is_plain(KIND, DTYPE):
        first = _plain(codes & 15, zero, KIND)
        second = _plain((codes >> 4) & 15, zero, KIND)
        third = _plain((codes >> 8) & 15, zero, KIND)
        return first, second, third, _plain((codes >> 12) & 15, zero, KIND)
    elif KIND == "mxfp4":
        return _four(codes, FLOAT4_BF16, tl.bfloat16)
    else:
        IS_BF16: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
        first, second, third, fourth = _four(codes, INT4_BF16 if IS_BF16 else INT4_FP16, DTYPE)
        zero = (zero + (128.0 if IS_BF16 else 1024.0)).to(DTYPE)
        return first - zero, second - zero, third - zero, fourth - zero


@triton.jit
def of_8_bits(codes, zero, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the values of the two bytes in each of `codes`, from the lower on, as integers minus zeros.

    They are in `DTYPE` or float32.
    """
    if _is_plain("int8", DTYPE):
        return _plain(codes & 255, zero, "int8"), _plain((codes >> 8) & 255, zero, "int8")
    elif DTYPE == tl.bfloat16:  # noqa: SIM300
        low, high = tl.inline_asm_elementwise(
            INT8_BF16, "=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
        if HAS_ZEROS:
            rest = (128.0 - zero).to(tl.bfloat16)
            low += rest
            high += rest
        return low, high
    else:
        low, high = tl.inline_asm_elementwise(
            INT8_FP16, "=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        zero = (zero + 1024.0).to(tl.float16)
        return low - zero, high - zero


@triton.jit
def of_float8(codes, DTYPE: tl.constexpr):
    """Return the values of 8-bit floats (E4M3) in `DTYPE`, or in float32. NaN becomes a number."""
    IN_PAIRS: tl.constexpr = cuda_capability_geq(9) and not cuda_capability_geq(10)
    if _is_plain("float8", DTYPE):
        return _plain(codes, 0, "float8")
    else:
        IS_BF16: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
        dtype = DTYPE
        if IN_PAIRS:
            two: tl.constexpr = TWO_FLOAT8_BF16 if IS_BF16 else TWO_FLOAT8_FP16
            small = tl.inline_asm_elementwise(two, "=r,h", [codes], dtype=dtype, is_pure=True, pack=2)
        else:
            four: tl.constexpr = FOUR_FLOAT8_BF16 if IS_BF16 else FOUR_FLOAT8_FP16
            small = tl.inline_asm_elementwise(four, "=r,=r,r", [codes], dtype=dtype, is_pure=True, pack=4)
        return small * tl.full([1, 1], 2.0**120 if IS_BF16 else 2.0**8, DTYPE)


@triton.jit
def _four(codes, ASM: tl.constexpr, DTYPE: tl.constexpr):
    dtype = DTYPE  # An assignment makes a type of the constant.
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r", [codes], dtype=(dtype, dtype, dtype, dtype), is_pure=True, pack=2
    )


@triton.jit
def scale_of(stored, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Return the scales of groups in float32. If `of_4_bits` returns "mxfp4" in bfloat16, they are 2^66 times as large,
    and in bfloat16, too."""
    if KIND != "mxfp4":
        return stored.to(tl.float32)
    elif _is_plain(KIND, DTYPE):
        return (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        exponent = tl.minimum(stored.to(tl.int32) + 66, 254)
        return (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def by_column(of_groups, COLUMNS: tl.constexpr):
    """Repeat the numbers [n, groups] of groups for each of their columns: [n, COLUMNS], or [n, 1] for one group."""
    N: tl.constexpr = of_groups.shape[0]
    GROUPS: tl.constexpr = of_groups.shape[1]
    if GROUPS == 1:
        return of_groups
    else:
        of_columns = tl.broadcast_to(of_groups[:, :, None], [N, GROUPS, COLUMNS // GROUPS])
        return tl.reshape(of_columns, [N, COLUMNS])
