"""The layouts of matrices in AWQ, GPTQ and compressed-tensors, as integers, scales and zeros, and in FP8, as floats.

A weight is (integer - zero) * scale, and neighbours in a row share the scale and the zero. All layouts pack several
integers into one of 32 bits, the first into the lowest bits; they differ in the direction, the order, and the zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # order of the eight columns in an integer: column 0, column 2, and so on


class Integers(NamedTuple):
    """A matrix [n, k] of integers. Its columns may be reordered, so that each group consists of neighbours."""

    codes: Tensor  # uint8 [n, k]
    scales: Tensor  # [n, groups]
    zeros: Tensor | None  # uint8 [n, groups]; None: half of the range
    bits: int
    columns: Tensor | None = None  # [k], the matrix's column for each column of codes; None: the same

    def expand(self) -> Tensor:
        """Return the weights in float32."""
        n, k = self.codes.shape
        groups = self.scales.shape[1]
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros.float()[..., None]
        grouped = self.codes.view(n, groups, k // groups).float()
        weights = ((grouped - zeros) * self.scales.float()[..., None]).view(n, k)
        if self.columns is None:
            return weights
        return torch.empty_like(weights).index_copy_(1, self.columns, weights)


class Floats(NamedTuple):
    """A matrix [n, k] of 8-bit floats."""

    codes: Tensor  # float8_e4m3fn [n, k]
    scales: Tensor  # float32 [n, groups]

    def expand(self) -> Tensor:
        """Return the weights in float32."""
        n, k = self.codes.shape
        groups = self.scales.shape[1]
        return (self.codes.float().view(n, groups, k // groups) * self.scales[..., None]).view(n, k)


class BadLayout(Exception):
    """The parts of a matrix do not fit together. The message says which; its implied subject is the matrix."""


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Integers:
    """Return a matrix of 4 bits: `qweight` int32 [k, n / 8], `qzeros` int32 [groups, n / 8], `scales` [groups, n]."""
    _check_packed(scales, qweight=qweight, qzeros=qzeros)
    k, words = qweight.shape
    groups, n = scales.shape
    _check(words * 8 == n, f"has the shape {tuple(qweight.shape)}, but its scales are for {n} rows")
    _check_shape("qzeros", qzeros, (groups, words))
    _check_groups(k, groups)

    def columns(packed: Tensor) -> Tensor:
        length, width = packed.shape
        turned = packed.T.clone(memory_format=torch.contiguous_format)  # `contiguous` would not copy one row.
        in_bytes = turned.view(torch.uint8).view(width, length, 4)
        codes = torch.empty(width, 8, length, dtype=torch.uint8)
        for place, column in enumerate(_AWQ_ORDER):
            byte = in_bytes[..., place // 2]
            codes[:, column] = byte >> 4 if place % 2 else byte & 15
        return codes.flatten(0, 1)

    return Integers(columns(qweight), scales.T.contiguous(), columns(qzeros), 4)


def gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, bits: int, *, zeros_less_one: bool
) -> Integers:
    """Return a matrix: `qweight` int32 [k * bits / 32, n] and `qzeros` int32 [groups, n * bits / 32].

    `scales` are [groups, n], and `g_idx` [k] has the group of each column.
    """
    _check_packed(scales, qweight=qweight, qzeros=qzeros)
    words, n = qweight.shape
    groups = len(scales)
    k = words * 32 // bits
    _check(scales.shape == (groups, n), f"has scales for {scales.shape[-1]} rows, but {n} rows")
    _check_shape("qzeros", qzeros, (groups, n * bits // 32))
    _check_groups(k, groups)
    codes = _fields(qweight.T.contiguous(), bits)
    zeros = _fields(qzeros, bits)
    if zeros_less_one:  # A zero of 0 was stored as the largest number.
        zeros = (zeros + 1) & (1 << bits) - 1
    return _grouped(codes, scales.T.contiguous(), zeros.T.contiguous(), bits, g_idx)


def packed(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, g_idx: Tensor | None, bits: int, k: int
) -> Integers:
    """Return a matrix as compressed-tensors packs it: `weight` int32 [n, k * bits / 32] and `scale` [n, groups].

    `zero_point` is int32 [n * bits / 32, groups], or int8 [n, groups] and signed.
    """
    _check_packed(scale, weight_packed=weight)
    n, words = weight.shape
    groups = scale.shape[-1]
    _check(words == -(-k * bits // 32), f"has the shape {tuple(weight.shape)}, which does not hold {k} columns")
    _check(scale.shape == (n, groups), f"has scales of the shape {tuple(scale.shape)}, but {n} rows")
    _check_groups(k, groups)
    zeros = None
    if zero_point is not None and zero_point.dtype == torch.int32:
        _check_shape("zeros", zero_point, (-(-n * bits // 32), groups))
        zeros = _fields(zero_point.T.contiguous(), bits)[:, :n].T.contiguous()
    elif zero_point is not None:
        zeros = _signed_zeros(zero_point, n, groups, bits)
    return _grouped(_fields(weight, bits)[:, :k].contiguous(), scale, zeros, bits, g_idx)


def whole(weight: Tensor, scale: Tensor, zero_point: Tensor | None, g_idx: Tensor | None) -> Integers:
    """Return a matrix of integers int8 [n, k], with `scale` [n, groups] and `zero_point` int8 [n, groups].

    Each of the two may also be a single number for the whole matrix.
    """
    is_right = weight.dtype == torch.int8 and weight.dim() == 2
    _check(is_right, f"has {weight.dim()} dimensions and numbers of the type {weight.dtype}, and not 2 and int8")
    n, k = weight.shape
    if scale.numel() == 1:
        scale = scale.expand(n, 1).contiguous()
    else:
        scale = scale.view(len(scale), -1)
    _check(len(scale) == n, f"has scales of the shape {tuple(scale.shape)}, but {n} rows")
    groups = scale.shape[1]
    _check_groups(k, groups)
    zeros = None
    if zero_point is not None:
        zeros = _signed_zeros(zero_point.expand(n, 1) if zero_point.numel() == 1 else zero_point, n, groups, 8)
    return _grouped(weight.contiguous().view(torch.uint8) ^ 128, scale, zeros, 8, g_idx)


def floats(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Floats:
    """Return a matrix of 8-bit floats [n, k], with one scale for the matrix, for each row, or for each `block`."""
    is_right = weight.dtype == torch.float8_e4m3fn and weight.dim() == 2
    _check(is_right, f"has {weight.dim()} dimensions and numbers of the type {weight.dtype}, and not 2 and FP8 (E4M3)")
    n, k = weight.shape
    scale = scale.float()
    if scale.numel() == 1:
        scale = scale.view(1, 1).expand(n, 1)
    elif scale.numel() == n and scale.shape[0] == n:
        scale = scale.view(n, 1)
    else:
        shape = tuple(scale.shape)
        _check(block is not None, f"has scales of the shape {shape}, and config.json says nothing of blocks")
        rows, columns = block or (0, 0)
        _check_shape("scales", scale, (-(-n // rows), -(-k // columns)))
        _check(k % columns == 0, f"has {k} columns, which make no whole blocks of {columns}")
        scale = scale.repeat_interleave(rows, 0)[:n]
    return Floats(weight, scale.contiguous())


def _grouped(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, g_idx: Tensor | None) -> Integers:
    """Return the integers with the columns of each group side by side, in the order of the groups."""
    k = codes.shape[1]
    groups = scales.shape[1]
    if g_idx is None:
        return Integers(codes, scales, zeros, bits)
    _check(g_idx.shape == (k,), f"has a group for each of {g_idx.numel()} columns, and not {k}")
    if bool((g_idx == torch.arange(k) // (k // groups)).all()):
        return Integers(codes, scales, zeros, bits)
    least = int(g_idx.min())
    most = int(g_idx.max())
    _check(least >= 0 and most < groups, f"has columns of the groups {least} to {most}, but only {groups} groups")
    columns = g_idx.long().argsort(stable=True)
    sizes = g_idx.long().bincount(minlength=groups)
    _check(bool((sizes == k // groups).all()), f"has groups of {int(sizes.min())} to {int(sizes.max())} columns")
    return Integers(codes[:, columns], scales, zeros, bits, columns)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Unpack the unsigned numbers of 4 or 8 bits in each row, lowest bits first."""
    in_bytes = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return in_bytes
    return torch.stack([in_bytes & 15, in_bytes >> 4], dim=-1).flatten(1)


def _signed_zeros(zero_point: Tensor, n: int, groups: int, bits: int) -> Tensor:
    half = 1 << (bits - 1)
    _check_shape("zeros", zero_point, (n, groups))
    zeros = zero_point.int() + half
    _check(bool(((zeros >= 0) & (zeros < 2 * half)).all()), f"has zeros beyond {bits} bits")
    return zeros.to(torch.uint8)


def _check_shape(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    _check(tensor.shape == shape, f"has {what} of the shape {tuple(tensor.shape)}, and not {shape}")


def _check_packed(scales: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        is_right = tensor.dtype == torch.int32 and tensor.dim() == 2
        _check(is_right, f"has a {name} of {tensor.dim()} dimensions of {tensor.dtype}, and not 2 of int32")
    _check(scales.dim() == 2, f"has scales of the shape {tuple(scales.shape)}")


def _check_groups(k: int, groups: int) -> None:
    _check(0 < groups <= k and k % groups == 0, f"has {k} columns, which make no {groups} groups of one size")


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise BadLayout(problem)
