"""Matrices that stay in the blocks of a GGUF file: a few bits a weight, and scales that neighbours share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The formats that native code multiplies with, by their numbers in GGUF files. src/block_formats.h has the same.
FORMATS = {
    kind.value: kind.name
    for kind in (
        *(gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")),
        *(gguf.GGMLQuantizationType[name] for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A matrix [n, k] in a mapped file, whose rows are not copied until native code packs them."""

    data: NDArray[np.uint8]  # [rows in the file, bytes of a row]
    kind: int  # the number of the format
    rows: NDArray[np.int64]  # [n], those of the file in the order of the matrix

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        weights, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(self.kind)]
        return len(self.rows), self.data.shape[1] // num_bytes * weights

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> Blocks:
        return replace(self, rows=self.rows[rows])

    def chunk(self, parts: int) -> list[Blocks]:
        """Return the matrix in parts of as many rows each, as a tensor does."""
        return [replace(self, rows=rows) for rows in np.split(self.rows, parts)]

    def addresses(self) -> NDArray[np.uintp]:
        """Return where each row is in memory."""
        return (self.data.ctypes.data + self.rows * self.data.strides[0]).astype(np.uintp)

    def expand(self) -> Tensor:
        """Return the weights in float32, as the reference implementation of the format has them."""
        return expand(self.data[self.rows], self.kind)


def expand(data: NDArray[np.uint8], kind: int) -> Tensor:
    """Return the weights of rows of any format in float32. Raises NotImplementedError for one that is not known."""
    return torch.from_numpy(np.array(gguf.dequantize(data, gguf.GGMLQuantizationType(kind)), np.float32))
