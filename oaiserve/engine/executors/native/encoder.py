"""Quantizes matrices to the blocks of GGUF files, for --quantize."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks, new_blocks
from oaiserve.engine.executors.native.library import Library

_ROWS_AT_ONCE = 4096  # rows that are expanded to float32 at the same time


class Encoder:
    def __init__(self, library: Library, num_threads: int) -> None:
        """Start the threads. Raises MemoryError if the system can't."""
        self._library = library
        self._pool = library.pool(num_threads)
        if self._pool is None:
            raise MemoryError(f"The system does not start {num_threads} threads.")

    def __del__(self) -> None:
        self._library.free_pool(self._pool)

    def __call__(self, weight: Tensor, kind: int, new: Callable[[int, int, int], Blocks] = new_blocks) -> Blocks:
        """Quantize a matrix [n, k] of floats to blocks, in memory from `new`. k must fill whole blocks."""
        n, k = weight.shape
        blocks = new(kind, n, k)
        row_bytes = blocks.data.shape[1]
        for first in range(0, n, _ROWS_AT_ONCE):
            rows = weight[first : first + _ROWS_AT_ONCE].to(torch.float32).contiguous()
            out = blocks.data.ctypes.data + first * row_bytes
            self._library.encode_blocks(self._pool, rows.data_ptr(), len(rows), k, kind, out)
        return blocks
