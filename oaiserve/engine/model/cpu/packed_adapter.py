"""An adapter in the form that native code reads, see src/adapters.h."""

from __future__ import annotations

import torch
from torch import Tensor

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.cpu.describe import Matrix
from oaiserve.engine.model.cpu.kv_layout import LANES
from oaiserve.engine.model.cpu.library import Library


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
        first_ranks: dict[str, int] = {}
        downs: list[Tensor] = []
        scales: list[float] = []
        for module in dict.fromkeys(matrix.module for matrix in matrices):
            if (part := adapter.parts.get(module)) is not None:
                first_ranks[module] = len(scales)
                downs.append(part.a)
                scales += [part.scale] * part.rank
        if not scales:
            return
        firsts: list[int] = []
        counts: list[int] = []
        ups: list[Tensor] = []
        for matrix in matrices:
            rows, part = len(matrix.weight), adapter.parts.get(matrix.module)
            firsts += [first_ranks.get(matrix.module, 0)] * (rows // LANES)
            counts += [0 if part is None else part.rank] * (rows // LANES)
            if part is not None:
                ups.append(matrix.rows_of(part.b).view(-1, LANES, part.rank).transpose(1, 2).flatten())
        a, b = torch.cat(downs).contiguous(), torch.cat(ups)
        scale, groups = torch.tensor(scales), torch.tensor([firsts, counts], dtype=torch.int32)
        rank, k = a.shape
        pointers = (a.data_ptr(), scale.data_ptr(), groups.shape[1], *(row.data_ptr() for row in groups), b.data_ptr())
        if self._library.set_adapter(self.handle, index, k, rank, *pointers):
            raise MemoryError("The system has no memory for an adapter.")
