"""Allocates the memory of the KV cache, and copies its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from oaiserve.engine.model.transfer import on_device

ALIGNMENT = 64  # Native code then never reads a vector from two lines of a CPU's cache.
# Linux allocates and zeroes a huge page at the first write to it. All layers' caches fill up equally. If all began at
# the same place of a huge page, all would need a new page in the same step, which took 0.1 s longer. The system puts
# large allocations next to each other, so with this many bytes after each, fifty of them begin at fifty places.
HUGE_PAGE_BYTES = 2 << 20
APART_BYTES = 36 << 10


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Return zeros for keys or values: attention multiplies masked ones by 0, and 0 times a NaN would be NaN."""
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
    """Return the tensors of caches, without those that a layer has no use for."""
    return [blocks for cache in caches for blocks in cache if blocks.numel()]


def copy_blocks(caches: Iterable[tuple[torch.Tensor, torch.Tensor]], copies: list[tuple[int, int]]) -> None:
    """Copy the keys and values of whole blocks (from, to) in every layer; blocks are the tensors' first dimension.

    In each tensor, all blocks are read before any is written, so a block may be copied from and to. Raises
    torch.OutOfMemoryError before any block is copied.
    """
    # Torch can't index floats of eight bits, but it can index their bytes.
    all_blocks = [blocks.view(torch.uint8) if blocks.itemsize == 1 else blocks for cache in caches for blocks in cache]
    source, target = on_device(copies, all_blocks[0].device).T
    # All memory is allocated before the first block is copied: if there is none, all blocks stay as they are.
    room = all_blocks[0].new_empty(len(copies) * max(blocks[0].numel() for blocks in all_blocks))
    for blocks in all_blocks:
        copied = room[: len(copies) * blocks[0].numel()].view(len(copies), *blocks.shape[1:])
        torch.index_select(blocks, 0, source, out=copied)
        blocks.index_copy_(0, target, copied)
