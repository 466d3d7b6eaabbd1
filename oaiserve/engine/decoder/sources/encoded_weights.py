"""The weights of a checkpoint, quantized to 8 bits or to about 4 when they are loaded: --quantize.

The blocks have GGUF formats. Native code, which is passed in, chooses the scale of each block from that block alone. So
each matrix is read, quantized and released in turn, and the whole model is never in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.engine.decoder.blocks import FORMATS, Blocks, new_blocks
from oaiserve.engine.decoder.quantized_file import FinishedFile, QuantizedFile, file_bytes
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles

_IQ4_NL = 20
_Q5_1 = 7
_Q8_0 = 8
# The matrices that suffer most from 4 bits: attention's values, the last matrix of a layer, the embedding and the head.
_MORE_BITS = re.compile(r"\.(v_proj|down_proj|dense_4h_to_h|fc2|w2|mlp\.c_proj)\.weight$")
_MOST_BITS = re.compile(r"(embed_tokens|embed_tokens_per_layer|embed_in|embed_out|embeddings|wte|lm_head)\.weight$")


# Quantizes a matrix [n, k] of floats to blocks of a format, in memory that the passed function provides.
Encode = Callable[[Tensor, int, Callable[[int, int, int], Blocks]], Blocks]


class EncodedWeights(TensorFiles):
    """The weights in the mapped files of a checkpoint, quantized at each access."""

    def __init__(self, checkpoint: Checkpoint, encode: Encode, *, in_4_bits: bool, of_wrapper: bool = False) -> None:
        """Map the files. Raises BadFile for a header that doesn't match its file."""
        super().__init__(checkpoint, of_wrapper=of_wrapper)
        self._in_4_bits = in_4_bits
        self._encode = encode
        self._in_file: dict[str, Blocks] = {}  # keyed by name; empty if blocks stay in memory
        self._is_finished = False  # whether the blocks in the file have values
        self.file: QuantizedFile | None = None  # The quantized blocks are written to this file.

    def names(self) -> set[str]:
        return {name for name in self._places if not name.endswith("inv_freq")}

    def has_blocks(self) -> bool:
        return True

    def write_to_file(self, most_bytes: int) -> None:
        """Write all blocks to a file in the cache, of at most `most_bytes`. Raises OSError and NotPrivate."""
        matrices = self._matrices()
        self.file = QuantizedFile(file_bytes(list(matrices.values())), most_bytes)
        self._in_file = {name: self.file.blocks(*matrix) for name, matrix in matrices.items()}

    def read_from_file(self, path: Path) -> bool:
        """Use the blocks in the file of an earlier start.

        Returns False if the file's length differs, or if another start has removed it meanwhile. Raises OSError.
        """
        matrices = self._matrices()
        try:
            finished = FinishedFile(path)
        except FileNotFoundError:
            return False
        if finished.num_bytes != file_bytes(list(matrices.values())):
            return False
        self._in_file = {name: finished.blocks(*matrix) for name, matrix in matrices.items()}
        self._is_finished = True
        return True

    def blocks(self, name: str) -> Blocks | None:
        """Return a quantized matrix, or None for a tensor that isn't quantized. The file has space for each once."""
        kind = self._kind(name)
        if kind is None:
            return None
        if self._is_finished:
            return self._in_file[name]
        blocks = self._encode(self.tensor(name), kind, lambda *matrix: self._in_file.get(name) or new_blocks(*matrix))
        self.give_back()
        return blocks

    def _matrices(self) -> dict[str, tuple[int, int, int]]:
        """Return the format and the shape [n, k] of all matrices that are quantized, in the order of their names."""
        matrices = {}
        for name in sorted(self.names()):
            if (kind := self._kind(name)) is not None:
                n, k = self.shape(name)
                matrices[name] = (kind, n, k)
        return matrices

    def _kind(self, name: str) -> int | None:
        """Return the quantized format of a tensor, or None if it isn't quantized."""
        shape = self.shape(name)
        kind = _Q8_0
        if self._in_4_bits and not _MOST_BITS.search(name):
            kind = _Q5_1 if _MORE_BITS.search(name) else _IQ4_NL
        if len(shape) != 2 or shape[1] % FORMATS[kind].weights:
            return None
        return kind
