"""An adapter in the form that native code reads, see src/adapters.h."""

from __future__ import annotations

import torch
from torch import Tensor

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.cpu.description import Matrix
from oaiserve.engine.model.cpu.kv_layout import LANES
from oaiserve.engine.model.cpu.library import Library

RANKS = 4  # the ranks of a linear layer are padded to a multiple of this, as src/adapters.h says


class PackedAdapter:
    """Owns the native form of an adapter. `sites` are those of the decoder, with the matrices of each."""

    def __init__(self, library: Library, adapter: Adapter, sites: list[list[Matrix]]) -> None:
        """Copy the weights of the adapter. Raises MemoryError."""
        self._library = library
        self.handle = library.adapter(len(sites))
        if self.handle is None:
            raise MemoryError("The system has no memory for an adapter.")
        for index, matrices in enumerate(sites):
            self._set(index, adapter, matrices)

    def __del__(self) -> None:
        self._library.free_adapter(self.handle)

    def _set(self, index: int, adapter: Adapter, matrices: list[Matrix]) -> None:
        """Give a site its weights. A module that is several of its matrices has its ranks once."""
        parts = {
            module: part for matrix in matrices if (part := adapter.parts.get(module := matrix.module)) is not None
        }
        if not parts:
            return
        first_ranks: dict[str, int] = {}
        downs: list[Tensor] = []
        scales: list[float] = []
        for module, part in parts.items():
            first_ranks[module] = len(scales)
            downs.append(_padded(part.a.T).T)
            scales += [part.scale] * len(downs[-1])
        firsts: list[int] = []
        counts: list[int] = []
        ups: list[Tensor] = []
        for matrix in matrices:
            num_groups, count = -(-len(matrix.weight) // LANES), 0
            if matrix.module in parts:
                rows = matrix.rows_of(parts[matrix.module].b)
                b = _padded(torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % LANES)))
                pack, count = _pack(b.dtype), b.shape[1]
                ups.append(b.view(num_groups, LANES, count // pack, pack).transpose(1, 2).flatten())
            firsts += [first_ranks.get(matrix.module, 0)] * num_groups
            counts += [count] * num_groups
        a, b = torch.cat(downs).contiguous(), torch.cat(ups)
        scale, groups = torch.tensor(scales), torch.tensor([firsts, counts], dtype=torch.int32)
        rank, k = a.shape
        pointers = (a.data_ptr(), scale.data_ptr(), groups.shape[1], *(row.data_ptr() for row in groups), b.data_ptr())
        if self._library.set_adapter(self.handle, index, k, rank, *pointers):
            raise MemoryError("The system has no memory for an adapter.")


def _pack(dtype: torch.dtype) -> int:
    """Return how many numbers a dot product multiplies at once, as in src/packs.h."""
    return 2 if dtype == torch.bfloat16 else 1


def _padded(matrix: Tensor) -> Tensor:
    """Return the matrix with as many columns of zeros as make a multiple of RANKS."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % RANKS))
