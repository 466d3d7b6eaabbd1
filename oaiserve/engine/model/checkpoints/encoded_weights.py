"""The weights of a checkpoint, quantized to 8 bits or to about 4 when they are loaded: --quantize.

The blocks are those of GGUF files, and native code finds the scale of each (src/encode_blocks.h). Nothing else of the
model is needed for that, so a matrix is read, quantized and forgotten, and the whole model is never in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import FORMATS, Blocks, new_blocks
from oaiserve.engine.decoder.quantized_file import QuantizedFile, file_bytes
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from oaiserve.engine.model.cpu.library import Library

_IQ4_NL, _Q5_1, _Q8_0 = 20, 7, 8
# The matrices whose errors in 4 bits cost most: attention's values, the last matrix of a layer, and the two of tokens.
_MORE_BITS = re.compile(r"\.(v_proj|down_proj)\.weight$")
_MOST_BITS = re.compile(r"(embed_tokens|embed_tokens_per_layer|lm_head)\.weight$")
_ROWS_AT_ONCE = 4096  # which are in float32 meanwhile


class Encoder:
    """Quantizes matrices to blocks in native code, with threads of its own."""

    def __init__(self, library: Library, num_threads: int) -> None:
        """Start the threads. Raises MemoryError if the system does not."""
        self._library = library
        self._pool = library.pool(num_threads)
        if self._pool is None:
            raise MemoryError(f"The system does not start {num_threads} threads.")

    def __del__(self) -> None:
        self._library.free_pool(self._pool)

    def __call__(self, weight: Tensor, kind: int, new: Callable[[int, int, int], Blocks] = new_blocks) -> Blocks:
        """Return a matrix [n, k] of floats in blocks, in memory that `new` gives. k is a multiple of a block's."""
        n, k = weight.shape
        blocks = new(kind, n, k)
        row_bytes = blocks.data.shape[1]
        for first in range(0, n, _ROWS_AT_ONCE):
            rows = weight[first : first + _ROWS_AT_ONCE].to(torch.float32).contiguous()
            out = blocks.data.ctypes.data + first * row_bytes
            self._library.encode_blocks(self._pool, rows.data_ptr(), len(rows), k, kind, out)
        return blocks


class EncodedWeights(TensorFiles):
    """The weights in the mapped files of a checkpoint, quantized at each access."""

    def __init__(
        self, folder: Path, library: Library, num_threads: int, *, in_4_bits: bool, of_wrapper: bool = False
    ) -> None:
        """Map the files. Raises BadFile for a header that does not describe its file, and MemoryError."""
        super().__init__(folder, of_wrapper=of_wrapper)
        self._in_4_bits = in_4_bits
        self._encode = Encoder(library, num_threads)
        self.file: QuantizedFile | None = None  # which the blocks are in; None: in memory

    def names(self) -> set[str]:
        return {name for name in self._places if not name.endswith("inv_freq")}

    def write_to_file(self, most_bytes: int) -> None:
        """Have all blocks in a file of the cache, whose files may have so many bytes. Raises OSError and NotPrivate."""
        matrices = []
        for name in self.names():
            if (kind := self._kind(name)) is not None:
                n, k = self.shape(name)
                matrices.append((kind, n, k))
        self.file = QuantizedFile(file_bytes(matrices), most_bytes)

    def blocks(self, name: str) -> Blocks | None:
        """Return a quantized matrix, or None for a tensor that stays as it is. A file has space for each once."""
        kind = self._kind(name)
        if kind is None:
            return None
        blocks = self._encode(self.tensor(name), kind, new_blocks if self.file is None else self.file.blocks)
        self.give_back()
        return blocks

    def _kind(self, name: str) -> int | None:
        """Return the quantized format of a tensor, or None for one that stays as it is."""
        shape = self.shape(name)
        kind = _Q8_0
        if self._in_4_bits and not _MOST_BITS.search(name):
            kind = _Q5_1 if _MORE_BITS.search(name) else _IQ4_NL
        if len(shape) != 2 or shape[1] % FORMATS[kind].weights:
            return None
        return kind
