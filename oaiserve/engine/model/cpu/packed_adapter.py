"""An adapter in the form that native code reads, see src/adapters.h."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.cpu.description import Matrix
from oaiserve.engine.model.cpu.kv_layout import LANES
from oaiserve.engine.model.cpu.library import Library

RANKS = 4  # the ranks of a linear layer are padded to a multiple of this, as src/adapters.h says


class _SiteWeights(NamedTuple):
    """The weights of an adapter for one site, as Adapter::set takes them."""

    a: Tensor  # [rank, k]
    scales: Tensor  # [rank]
    groups: Tensor  # [2, groups]: the first rank of each group of columns, and the number of its ranks
    b: Tensor

    @property
    def size(self) -> int:
        """Return how many numbers these are in native code."""
        rank, k = self.a.shape
        return _up(rank) * k + self.b.numel()


class PackedAdapter:
    """Owns the native form of an adapter. `sites` are those of the decoder, with the matrices of each."""

    def __init__(self, library: Library, adapter: Adapter, sites: list[list[Matrix]]) -> None:
        """Copy the weights of the adapter. Raises MemoryError."""
        self._library = library
        self.handle: int | None = None
        found = ((index, _weights_of(adapter, matrices)) for index, matrices in enumerate(sites))
        weights = {index: site for index, site in found if site is not None}
        self.handle = library.adapter(len(sites), sum(site.size for site in weights.values()))
        if self.handle is None:
            raise MemoryError("The system has no memory for an adapter.")
        for index, (a, scales, groups, b) in weights.items():
            rank, k = a.shape
            pointers = (a.data_ptr(), scales.data_ptr(), groups.shape[1], *(row.data_ptr() for row in groups))
            if library.set_adapter(self.handle, index, k, rank, *pointers, b.data_ptr()):
                raise MemoryError("The system has no memory for an adapter.")

    def __del__(self) -> None:
        self._library.free_adapter(self.handle)


def _weights_of(adapter: Adapter, matrices: list[Matrix]) -> _SiteWeights | None:
    """Return what an adapter has for a site, if anything. A module that is several of its matrices has its ranks
    once."""
    parts = {module: part for matrix in matrices if (part := adapter.parts.get(module := matrix.module)) is not None}
    if not parts:
        return None
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
        num_groups, count = _up(len(matrix.weight)) // LANES, 0
        if matrix.module in parts:
            rows = matrix.rows_of(parts[matrix.module].b)
            b = _padded(torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % LANES)))
            pack, count = _pack(b.dtype), b.shape[1]
            ups.append(b.view(num_groups, LANES, count // pack, pack).transpose(1, 2).flatten())
        firsts += [first_ranks.get(matrix.module, 0)] * num_groups
        counts += [count] * num_groups
    groups = torch.tensor([firsts, counts], dtype=torch.int32)
    return _SiteWeights(torch.cat(downs).contiguous(), torch.tensor(scales), groups, torch.cat(ups))


def _up(number: int) -> int:
    """Return the next multiple of LANES."""
    return -(-number // LANES) * LANES


def _pack(dtype: torch.dtype) -> int:
    """Return how many numbers a dot product multiplies at once, as in src/packs.h."""
    return 2 if dtype == torch.bfloat16 else 1


def _padded(matrix: Tensor) -> Tensor:
    """Return the matrix with as many columns of zeros as make a multiple of RANKS."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % RANKS))
