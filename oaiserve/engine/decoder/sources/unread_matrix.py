"""A matrix of a quantized checkpoint. Its files are read only when an executor copies it to its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.sources.integer_layouts import Floats, Integers

_NO_FORMAT = -1
_NO_DATA = np.empty((0, 0), np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class UnreadMatrix(Blocks):
    """A matrix [n, k] that takes no memory. Native code can't read the format of its blocks."""

    num_columns: int = 0
    read_whole: Callable[[], Integers | Floats] | None = None

    @classmethod
    def of(cls, shape: tuple[int, ...], read: Callable[[], Integers | Floats]) -> UnreadMatrix:
        rows, columns = shape
        return cls(_NO_DATA, _NO_FORMAT, np.arange(rows), num_columns=columns, read_whole=read)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.num_columns

    @property
    def nbytes(self) -> int:
        return 0

    def with_columns(self, columns: NDArray[np.int64]) -> Blocks:
        """Raise ValueError: the file's layout determines the order."""
        raise ValueError("a matrix that is read later has an order of its own")

    def read(self) -> Integers | Floats:
        """Read the rows of the matrix. Raises StartupError for a layout that does not fit together."""
        assert self.read_whole is not None
        whole = self.read_whole()
        if np.array_equal(self.rows, np.arange(len(whole.codes))):
            return whole
        rows = torch.from_numpy(self.rows)
        codes = whole.codes.view(torch.uint8)[rows].view(whole.codes.dtype)
        if isinstance(whole, Floats):
            return Floats(codes, whole.scales[rows])
        zeros = None if whole.zeros is None else whole.zeros[rows]
        return Integers(codes, whole.scales[rows], zeros, whole.bits, whole.columns)

    def expand(self, dtype: torch.dtype = torch.float32, into: Tensor | None = None) -> Tensor:
        weights = self.read().expand().to(dtype)
        if into is None:
            return weights
        return into.copy_(weights)
