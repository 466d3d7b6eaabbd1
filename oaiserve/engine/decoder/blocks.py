"""Matrices in quantization blocks, as in GGUF files: a few bits per weight, with scales that neighbours share."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oaiserve.engine.decoder.sources.integer_layouts import Integers


class Format(NamedTuple):
    name: str
    weights: int
    num_bytes: int


# The formats that native code supports, keyed by their numbers in GGUF files. Must match src/block_formats.h.
FORMATS = {
    2: Format("Q4_0", 32, 18),
    3: Format("Q4_1", 32, 20),
    6: Format("Q5_0", 32, 22),
    7: Format("Q5_1", 32, 24),
    8: Format("Q8_0", 32, 34),
    10: Format("Q2_K", 256, 84),
    11: Format("Q3_K", 256, 110),
    12: Format("Q4_K", 256, 144),
    13: Format("Q5_K", 256, 176),
    14: Format("Q6_K", 256, 210),
    16: Format("IQ2_XXS", 256, 66),
    17: Format("IQ2_XS", 256, 74),
    18: Format("IQ3_XXS", 256, 98),
    19: Format("IQ1_S", 256, 50),
    20: Format("IQ4_NL", 32, 18),
    21: Format("IQ3_S", 256, 110),
    22: Format("IQ2_S", 256, 82),
    23: Format("IQ4_XS", 256, 136),
    29: Format("IQ1_M", 256, 56),
    34: Format("TQ1_0", 256, 54),
    35: Format("TQ2_0", 256, 66),
    39: Format("MXFP4", 32, 17),
    # These formats are our own: a zero point, also an integer, is subtracted from each integer before it is scaled.
    1004: Format("4 bits with zeros", 32, 19),
    1008: Format("8 bits with zeros", 32, 35),
    # Same as above, but 128 numbers share a scale.
    1104: Format("4 bits, scales of 128", 256, 134),
}
MXFP4 = 39
IQ1_M = 29
_Q4_0 = 2
_Q8_0 = 8
_Q4_Z = 1004
_Q8_Z = 1008
_Q4_128 = 1104
_WITH_ZEROS = (_Q4_Z, _Q8_Z, _Q4_128)
_LONG = 128
_EXPANDED_AT_ONCE = 2**18  # float32 numbers that fit into the L2 cache
_CONVERTED_AT_ONCE = 2**15  # torch would convert larger arrays with two threads, which then wait for each other
# `of_integers` refuses a scale whose relative error in 16 bits is larger than this.
_SCALE_ERROR = 2.0**-10


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A matrix [n, k] in a mapped file, or in memory, whose rows are not copied until native code packs them."""

    data: NDArray[np.uint8]  # [rows in the file, bytes of a row]
    kind: int  # the number of the format, a key of FORMATS
    rows: NDArray[np.int64]  # [n], the rows of the file in the order of the matrix
    file: mmap.mmap | None = None  # the mapped file
    offset: int = 0  # byte offset of the data in the file
    # The scales [rows, blocks of a row] of MXFP4 blocks if `data` doesn't include them. A byte then has two adjacent
    # codes.
    scales: NDArray[np.uint8] | None = None
    columns: NDArray[np.int32] | None = None  # [k], the matrix's column for each column of the data; None: the same
    part: str | None = None  # the name of the file if the model is in several

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        of_row: int = self.data.shape[1] + (0 if self.scales is None else self.scales.shape[1])
        return len(self.rows) * of_row

    @property
    def shape(self) -> tuple[int, int]:
        form = FORMATS[self.kind]
        if self.scales is not None:
            return len(self.rows), self.scales.shape[1] * form.weights
        return len(self.rows), self.data.shape[1] // form.num_bytes * form.weights

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> Blocks:
        return replace(self, rows=self.rows[rows])

    def with_columns(self, columns: NDArray[np.int64]) -> Blocks:
        """Return the matrix with its columns reordered. `columns` has the matrix's column for each of the data's."""
        return replace(self, columns=columns.astype(np.int32))

    def chunk(self, parts: int) -> list[Blocks]:
        """Split the matrix into `parts` of equal height, like `Tensor.chunk`."""
        return [replace(self, rows=rows) for rows in np.split(self.rows, parts)]

    def addresses(self) -> NDArray[np.uintp]:
        return _addresses(self.data, self.rows)

    def scale_addresses(self) -> NDArray[np.uintp] | None:
        """Return the address of each row's scales, or None if the rows include them."""
        if self.scales is None:
            return None
        return _addresses(self.scales, self.rows)

    def pages(self) -> tuple[int, int] | None:
        """Return the address and length in bytes of the mapped file's pages with the data, or None for data in memory.

        Other matrices may share the first and the last page. If these pages are dropped, they are read again.
        """
        if self.file is None:
            return None
        before = self.offset % mmap.PAGESIZE
        num_bytes = before + (len(self.data) - 1) * self.data.strides[0] + self.data.shape[1]
        return self.data.ctypes.data - before, num_bytes

    def expand(self, dtype: torch.dtype = torch.float32, into: Tensor | None = None) -> Tensor:
        """Return the weights in a dtype, rounded from the reference implementation's float32.

        They are written to `into` [rows, columns] if it is passed. Only some rows at a time are in float32, because
        writing to fresh memory takes longer than the arithmetic.
        """
        into = torch.empty(self.shape, dtype=dtype) if into is None else into
        at_once = max(1, _EXPANDED_AT_ONCE // self.shape[1])
        for start in range(0, len(self.rows), at_once):
            rows = self.rows[start : start + at_once]
            data = self.data[rows]
            weights = expand(data if self.scales is None else _joined(data, self.scales[rows]), self.kind)
            out = into[start : start + at_once]
            if self.columns is None:
                for part, values in zip(*(t.flatten().split(_CONVERTED_AT_ONCE) for t in (out, weights)), strict=True):
                    part.copy_(values)
            else:
                out.index_copy_(1, torch.from_numpy(self.columns).long(), weights.to(dtype))
        return into


def _addresses(data: NDArray[np.uint8], rows: NDArray[np.int64]) -> NDArray[np.uintp]:
    return (data.ctypes.data + rows * data.strides[0]).astype(np.uintp)


def _joined(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return MXFP4 rows in the layout of GGUF files: a scale, then bytes. Byte i has codes i and i + 16."""
    pairs = codes.reshape(*scales.shape, 16)
    in_order = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*scales.shape, 32)
    blocks = np.concatenate([scales[..., None], in_order[..., :16] | in_order[..., 16:] << 4], axis=-1)
    return blocks.reshape(len(codes), -1)


def one_behind_the_other(parts: list[Blocks]) -> Blocks:
    """Return matrices of one format and width from one file as one matrix.

    Its data begin with the part that comes first in the file. The row stride divides the width and all distances
    between the parts' offsets.
    """
    if len(parts) == 1:
        return parts[0]
    begins = [part.offset for part in parts]
    width = parts[0].data.shape[1]
    first = min(begins)
    step = math.gcd(width, *(begin - min(begins) for begin in begins))
    rows = np.concatenate([(part.offset - first + part.rows * width) // step for part in parts])
    start = parts[begins.index(first)].data
    data = np.lib.stride_tricks.as_strided(start, (int(rows.max()) + 1, width), (step, 1), writeable=False)
    return replace(parts[0], data=data, rows=rows, offset=first)


def expand(data: NDArray[np.uint8], kind: int) -> Tensor:
    """Return the weights of rows of any format in float32. Raises NotImplementedError for an unknown format."""
    if kind in _WITH_ZEROS:
        return _expand_integers(data, kind)
    if kind in EXPANDERS:
        num_bytes, expander = EXPANDERS[kind]
        blocks = torch.from_numpy(np.require(data, requirements=["C", "W"]))  # torch can't write a mapped file
        return expander(blocks.view(-1, num_bytes)).view(len(data), -1)
    import gguf  # imported here because it is rarely needed

    expanded = gguf.dequantize(data, gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(np.require(expanded, np.float32, "W"))  # unquantized numbers may be the file's


def _expand_integers(data: NDArray[np.uint8], kind: int) -> Tensor:
    scales, zeros, values = _parts(torch.from_numpy(np.ascontiguousarray(data)), kind)
    codes = values
    half = 128
    if _bits(kind) == 4:
        codes = torch.cat([values & 15, values >> 4], dim=-1)
        half = 8
    integers = codes.int() - half
    assert zeros is not None
    integers = integers - zeros.view(torch.int8)[..., None, None].int()
    return (integers.float() * scales.contiguous().view(torch.float16)[..., None].float()).flatten(1)


def _bits(kind: int) -> int:
    if kind in (_Q4_0, _Q4_Z, _Q4_128):
        return 4
    return 8


def _parts(data: Tensor, kind: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return views of the components of `of_integers`' blocks uint8 [n, bytes of a row].

    They are the scales [n, blocks, scales of a block, 2 bytes], the zeros [n, blocks, scales of a block], or None, and
    the values [n, blocks, scales of a block, groups of 32 that share it, bytes of a group].
    """
    form = FORMATS[kind]
    blocks = data.view(len(data), -1, form.num_bytes)
    scales = max(1, form.weights // _LONG)
    sizes = [2 * scales, scales if kind in _WITH_ZEROS else 0, form.weights * _bits(kind) // 8]
    of_scales, of_zeros, values = blocks.split(sizes, dim=-1)
    return (
        of_scales.unflatten(-1, (scales, 2)),
        of_zeros if kind in _WITH_ZEROS else None,
        values.unflatten(-1, (scales, form.weights // scales // 32, -1)),
    )


def of_integers(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    columns: Tensor | None = None,
    *,
    is_long: bool = False,
) -> Blocks | None:
    """Return the weights (codes - zeros) * scales as blocks, which keep codes and zeros as they are.

    `codes` are uint8 [n, k] of 4 or 8 `bits`. k / groups neighbours share one of the `scales` [n, groups] and one of
    the `zeros` uint8; without `zeros`, all are half of the range. `columns` are those of the Blocks. With `is_long`,
    128 numbers of 4 bits share a scale if the groups allow it. Returns None where blocks cannot hold this: a group is
    no multiple of 32, or a scale does not fit into 16 bits.
    """
    n, k = codes.shape
    groups = scales.shape[1]
    if k % groups or k // groups % 32:
        return None
    halves = scales.half()
    if not bool(((halves.float() - scales.float()).abs() <= scales.float().abs() * _SCALE_ERROR).all()):
        return None
    half = 1 << (bits - 1)
    if zeros is not None and bool((zeros == half).all()):
        zeros = None
    fits = k // groups % _LONG == 0 and k % FORMATS[_Q4_128].weights == 0
    if is_long and fits and bits == 4:
        kind = _Q4_128
    else:
        kind = {(4, False): _Q4_0, (8, False): _Q8_0, (4, True): _Q4_Z, (8, True): _Q8_Z}[bits, zeros is not None]
    blocks = new_blocks(kind, n, k, columns)
    of_scales, of_zeros, values = _parts(torch.from_numpy(blocks.data), kind)

    def of_blocks(of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(of_scales.shape[1] * of_scales.shape[2] // groups, dim=1)

    of_scales.copy_(of_blocks(halves).view(torch.uint8).view(of_scales.shape))
    if of_zeros is not None:
        if zeros is None:
            signed = torch.zeros(n, groups, dtype=torch.int8)
        else:
            signed = (zeros.int() - half).to(torch.int8)
        of_zeros.copy_(of_blocks(signed).view(torch.uint8).view(of_zeros.shape))
    if bits == 4:  # Each of the first 16 codes shares a byte with one of the last 16; eight bytes are one integer here.
        in_words = codes.contiguous().view(torch.int64).view(n, k // 32, 2, 2)
        both = in_words[:, :, 0] | in_words[:, :, 1] << 4
        values.copy_(both.view(torch.uint8).view(values.shape))
    else:  # Q8_0 has signed integers
        values.copy_((codes ^ 128 if kind == _Q8_0 else codes).reshape(values.shape))
    return blocks


def integers_of(data: Tensor, kind: int) -> Integers | None:
    """Return rows uint8 [n, bytes of a row] of Q4_0 or Q8_0 as integers; None for other formats."""
    if kind not in (_Q4_0, _Q8_0):
        return None
    scales, _, values = _parts(data, kind)
    if kind == _Q4_0:
        codes = torch.cat([values & 15, values >> 4], dim=-1)
    else:
        codes = values ^ 128
    return Integers(codes.flatten(1), scales.contiguous().view(torch.float16).flatten(1), None, _bits(kind))


def new_blocks(kind: int, n: int, k: int, columns: Tensor | None = None) -> Blocks:
    """Return blocks of a format in new memory, without values yet."""
    form = FORMATS[kind]
    row_bytes = k // form.weights * form.num_bytes
    order = None if columns is None else columns.numpy().astype(np.int32)
    return Blocks(np.empty((n, row_bytes), np.uint8), kind, np.arange(n), columns=order)


# -- the usual formats in plain torch, several times as fast as the reference implementation in NumPy


def _q8_0(blocks: Tensor) -> Tensor:
    """Return weights [blocks, 32]: signed codes times a scale."""
    return blocks[:, 2:].view(torch.int8) * _halves(blocks[:, :2])


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minimums(blocks, _low_codes(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth_bits = torch.stack([blocks[:, 16:48] >> place & 1 for place in range(8)], dim=1)
    return _with_minimums(blocks, _low_codes(blocks[:, 48:]) | fifth_bits << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    """Return weights [blocks, 16, 16]: codes of 6 bits less 32, times the scales of 16 neighbours."""
    low = blocks[:, :128].view(-1, 2, 1, 64)
    high = blocks[:, 128:192].view(-1, 2, 1, 32)
    low_bits = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    high_bits = torch.cat([(high & 3) << 4, high << 2 & 48, high & 48, high >> 2 & 48], dim=2)
    codes = (low_bits | high_bits).view(-1, 16, 16).sub_(32).view(torch.int8)  # values that wrap around are negative
    scales = blocks[:, 192:208].view(torch.int8) * _halves(blocks[:, 208:])
    return codes * scales[..., None]


def _low_codes(data: Tensor) -> Tensor:
    """Return codes of 4 bits [blocks, 8, 32] from bytes. Each 32 bytes have the codes of two groups."""
    pairs = data.reshape(-1, 4, 1, 32)
    return torch.cat([pairs & 15, pairs >> 4], dim=2).view(-1, 8, 32)


def _with_minimums(blocks: Tensor, codes: Tensor) -> Tensor:
    """Return codes [blocks, 8, 32] times their group's scale, less its minimum. Both have 6 bits and share 12 bytes."""
    both = _halves(blocks[:, :4])
    first, second, mixed = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, mixed & 15 | first >> 2 & 48], dim=1) * both[:, :1]
    minimums = torch.cat([second & 63, mixed >> 4 | second >> 2 & 48], dim=1) * both[:, 1:]
    return (codes * scales[..., None]).sub_(minimums[..., None])


def _halves(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16).float()


# Keyed by the format's number in GGUF files: the bytes of a block, and the function from blocks [n, bytes] to float32.
EXPANDERS: dict[int, tuple[int, Callable[[Tensor], Tensor]]] = {
    8: (34, _q8_0),
    12: (144, _q4_k),
    13: (176, _q5_k),
    14: (210, _q6_k),
}
