"""Expands the usual formats of GGUF files in plain torch: several times as fast as the reference in NumPy.

It knows nothing of native code, whose reading of blocks is compared with these results at the start. Tests
compare each number with the reference. The layouts are those of GGUF: a block is bytes, with 256 weights but for Q8_0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_Q8_0, _Q4_K, _Q5_K, _Q6_K = 8, 12, 13, 14  # as GGUF numbers them


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
    low, high = blocks[:, :128].view(-1, 2, 1, 64), blocks[:, 128:192].view(-1, 2, 1, 32)
    low_bits = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    high_bits = torch.cat([(high & 3) << 4, high << 2 & 48, high & 48, high >> 2 & 48], dim=2)
    codes = (low_bits | high_bits).view(-1, 16, 16).sub_(32).view(torch.int8)  # values that wrap around are negative
    scales = blocks[:, 192:208].view(torch.int8) * _halves(blocks[:, 208:])
    return codes * scales[..., None]


def _low_codes(data: Tensor) -> Tensor:
    """Return codes of 4 bits [blocks, 8, 32] of bytes, of which 32 have those of two groups."""
    pairs = data.reshape(-1, 4, 1, 32)
    return torch.cat([pairs & 15, pairs >> 4], dim=2).view(-1, 8, 32)


def _with_minimums(blocks: Tensor, codes: Tensor) -> Tensor:
    """Return codes [blocks, 8, 32] times the scale of their group, less its minimum. Both have 6 bits, in 12 bytes."""
    both = _halves(blocks[:, :4])
    first, second, mixed = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, mixed & 15 | first >> 2 & 48], dim=1) * both[:, :1]
    minimums = torch.cat([second & 63, mixed >> 4 | second >> 2 & 48], dim=1) * both[:, 1:]
    return (codes * scales[..., None]).sub_(minimums[..., None])


def _halves(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16).float()


# By format: the bytes of a block, and the function from blocks [n, bytes] to float32.
EXPANDERS: dict[int, tuple[int, Callable[[Tensor], Tensor]]] = {
    _Q8_0: (34, _q8_0),
    _Q4_K: (144, _q4_k),
    _Q5_K: (176, _q5_k),
    _Q6_K: (210, _q6_k),
}
