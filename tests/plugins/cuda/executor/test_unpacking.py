"""The instructions that unpack codes give the codes' numbers, for all codes: computed in Python, without a GPU."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from oaiserve.plugins.cuda.executor.device_matrices import FLOATS_OF_4_BITS

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.executor import triton_unpacking as unpacking

pytestmark = pytest.mark.kernels

Words = np.ndarray  # uint32
HALVES = np.arange(1 << 16, dtype=np.uint32)  # each number of 16 bits
WORDS = HALVES | HALVES[::-1] << 16


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    """Select four of the eight bytes of `a` and `b`."""
    found = np.zeros_like(WORDS)
    for place in range(4):
        number = int(selector[0]) >> 4 * place & 15
        assert number < 8  # The instruction would repeat a sign.
        source = a if number < 4 else b
        found |= (source >> 8 * (number % 4) & 255) << 8 * place
    return found


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Look up each bit in a table, by the bits of `a`, `b` and `c`."""
    found = np.zeros_like(WORDS)
    for row in range(8):
        if int(table[0]) >> row & 1:
            found |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return found


def _fma(a: Words, b: Words, c: Words) -> Words:
    """Compute a * b + c for two numbers in bfloat16, whose results must be exact."""
    found = np.zeros_like(WORDS)
    for shift in (0, 16):
        numbers = [(one >> shift << 16).view(np.float32).astype(np.float64) for one in (a, b, c)]
        bits = (numbers[0] * numbers[1] + numbers[2]).astype(np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any()
        found |= bits >> 16 << shift
    return found


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "cvt.u32.u16": lambda a: a & 0xFFFF,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma,
}


def computed(code: str, words: Words) -> list[Words]:
    """Compute PTX whose last operand is `words`. Return its results, each with two numbers of 16 bits."""
    lines = [line.strip(" ;") for line in code.splitlines() if line[0] not in "{}."]
    operands = sorted({word for line in lines for word in line.replace(",", "").split() if word.startswith("$")})
    values = {operands[-1]: words}

    def value(name: str) -> Words:
        return values[name] if name in values else np.full_like(WORDS, int(name, 0))

    for line in lines:
        instruction, target, *sources = line.replace(",", "").split()
        values[target] = INSTRUCTIONS[instruction](*map(value, sources))
    return [values[name] for name in operands[:-1]]


def numbers(words: Words, dtype: torch.dtype) -> torch.Tensor:
    """Return the two numbers of each word, the lower ones first: float64 [2, words]."""
    halves = np.stack([words & 0xFFFF, words >> 16]).astype(np.uint16)
    return torch.from_numpy(halves.view(np.int16)).view(dtype).double()


def codes(bits: int, part: int) -> torch.Tensor:
    """Return a code in each half of the words: int64 [2, words]."""
    halves = np.stack([WORDS & 0xFFFF, WORDS >> 16]).astype(np.int64)
    return torch.from_numpy(halves >> bits * part & (1 << bits) - 1)


BF16 = torch.bfloat16
FP16 = torch.float16


@pytest.mark.parametrize(("name", "dtype", "ones"), [("INT4_BF16", BF16, 128), ("INT4_FP16", FP16, 1024)])
def test_integers_of_4_bits(name: str, dtype: torch.dtype, ones: int) -> None:
    for part, words in enumerate(computed(getattr(unpacking, name).value, WORDS)):
        assert torch.equal(numbers(words, dtype), codes(4, part).double() + ones)


def test_floats_of_4_bits() -> None:
    table = torch.tensor(FLOATS_OF_4_BITS, dtype=torch.float64) * 2.0**-126
    for part, words in enumerate(computed(unpacking.FLOAT4_BF16.value, WORDS)):
        found = numbers(words, BF16)
        wanted = table[codes(4, part)]
        assert torch.equal(found, wanted)
        assert torch.equal(found.signbit(), wanted.signbit())


@pytest.mark.parametrize(("name", "dtype", "added"), [("INT8_BF16", BF16, -128), ("INT8_FP16", FP16, 1024)])
def test_integers_of_8_bits(name: str, dtype: torch.dtype, added: int) -> None:
    for part, words in enumerate(computed(getattr(unpacking, name).value, WORDS)):
        assert torch.equal(numbers(words, dtype), codes(8, part).double() + added)


@pytest.mark.parametrize(("name", "dtype", "factor"), [("BF16", BF16, 2.0**-120), ("FP16", FP16, 2.0**-8)])
@pytest.mark.parametrize("count", ["TWO", "FOUR"])
def test_floats_of_8_bits(name: str, dtype: torch.dtype, factor: float, count: str) -> None:
    found = computed(getattr(unpacking, f"{count}_FLOAT8_{name}").value, WORDS)
    assert len(found) == (1 if count == "TWO" else 2)
    for place, words in enumerate(found):
        pair = torch.from_numpy((WORDS >> 16 * place & 0xFFFF).astype(np.uint16).view(np.uint8).reshape(-1, 2).T.copy())
        wanted = pair.view(torch.float8_e4m3fn).double() * factor
        is_number = ~wanted.isnan()
        assert torch.equal(numbers(words, dtype)[is_number], wanted[is_number])
