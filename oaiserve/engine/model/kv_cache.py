"""Allocates the memory of the KV cache, and copies its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from oaiserve.engine.model.transfer import on_device

ALIGNMENT = 64  # so that no vector of native code spans two cache lines of a CPU
# Linux allocates and zeroes a huge page at the first write to it. All layers' caches fill up equally. If all began at
# the same offset in a huge page, all would need a new page in the same step, which took 0.1 s longer. The system puts
# large allocations next to each other, so with this padding after each, fifty of them begin at fifty different offsets.
HUGE_PAGE_BYTES = 2 << 20
APART_BYTES = 36 << 10


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Return zeros for keys or values. Attention multiplies masked ones by 0, and 0 times NaN would be NaN."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks the system for zeroed pages, which cost nothing until they are used; torch writes every byte, which
    # takes seconds for some GiB.
    num_bytes = math.prod(shape) * dtype.itemsize
    apart_bytes = APART_BYTES if num_bytes > HUGE_PAGE_BYTES else 0
    memory = np.zeros(num_bytes + ALIGNMENT + apart_bytes, dtype=np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(shape)


def block_tensors(caches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the tensors of caches, without those that a layer doesn't use."""
    return [blocks for cache in caches for blocks in cache if blocks.numel()]


def copy_blocks(caches: Iterable[tuple[torch.Tensor, torch.Tensor]], copies: list[tuple[int, int]]) -> None:
    """Copy the keys and values of whole blocks (from, to) in every layer. The tensors' first dimension is the block.

    In each tensor, all blocks are read before any is written, so a block may be both source and destination. Raises
    torch.OutOfMemoryError before any block is copied.
    """
    # Torch can't index 8-bit floats, but it can index their bytes.
    all_blocks = [blocks.view(torch.uint8) if blocks.itemsize == 1 else blocks for cache in caches for blocks in cache]
    source, target = on_device(copies, all_blocks[0].device).T
    # All memory is allocated before the first block is copied. If that fails, all blocks stay unchanged.
    room = all_blocks[0].new_empty(len(copies) * max(blocks[0].numel() for blocks in all_blocks))
    for blocks in all_blocks:
        copied = room[: len(copies) * blocks[0].numel()].view(len(copies), *blocks.shape[1:])
        torch.index_select(blocks, 0, source, out=copied)
        blocks.index_copy_(0, target, copied)
