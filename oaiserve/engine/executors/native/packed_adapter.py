"""An adapter packed for native code. See src/adapters.h."""

from __future__ import annotations

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import HeadRows, Matrix
from oaiserve.engine.executors.native.kv_layout import LANES
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.model.adapters import Adapter, AdapterPart

RANKS = 4  # Ranks of a linear layer are padded to a multiple of this, as in src/adapters.h.


class PackedAdapter:
    """Owns the native form of an adapter. `sites` are the decoder's sites, with the matrices of each."""

    def __init__(self, library: Library, adapter: Adapter, sites: list[list[Matrix] | HeadRows]) -> None:
        """Copy the weights of the adapter. Raises MemoryError."""
        self._library = library
        self.handle = library.adapter(len(sites))
        if self.handle is None:
            raise MemoryError("The system has no memory for an adapter.")
        for index, site in enumerate(sites):
            if not isinstance(site, HeadRows):
                self._set(index, adapter, site)
            elif (part := adapter.parts.get(site.module)) is not None:
                self._set_heads(index, part, site)

    def __del__(self) -> None:
        self._library.free_adapter(self.handle)

    def _set(self, index: int, adapter: Adapter, matrices: list[Matrix]) -> None:
        """Set the weights of a site. A module's ranks are stored only once, even if several matrices belong to it."""
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
            num_groups = -(-len(matrix.weight) // LANES)
            count = 0
            if matrix.module in parts:
                b = _padded(matrix.rows_of(parts[matrix.module].b))
                count = b.shape[1]
                ups.append(_in_groups(b))
            firsts += [first_ranks.get(matrix.module, 0)] * num_groups
            counts += [count] * num_groups
        self._give(index, torch.cat(downs), torch.tensor(scales), firsts, counts, torch.cat(ups))

    def _set_heads(self, index: int, part: AdapterPart, rows: HeadRows) -> None:
        """Set the weights of a site of heads. Each head has its own rows of `b`; all heads share `a`.

        To the product of a head's numbers x, scale * b (a x) is added; with transposed rows, scale * a^T (b^T x).
        """
        b = part.b.unflatten(0, (rows.heads, -1))[:, rows.first : rows.first + rows.count]
        shared = part.a.expand(rows.heads, -1, -1)
        down, up = (b.mT, shared.mT) if rows.is_transposed else (shared, b)
        down = torch.nn.functional.pad(down, (0, 0, 0, -part.rank % LANES))  # no vector spans two heads' ranks
        ups = [_padded(of_head) for of_head in up]
        num_groups = -(-len(ups[0]) // LANES)
        firsts = [head * down.shape[1] for head in range(rows.heads) for _ in range(num_groups)]
        counts = [ups[0].shape[1]] * len(firsts)
        scales = torch.full((rows.heads * down.shape[1],), part.scale)
        self._give(
            index, down.flatten(0, 1), scales, firsts, counts, torch.cat([_in_groups(of_head) for of_head in ups])
        )

    def _give(self, index: int, a: Tensor, scale: Tensor, firsts: list[int], counts: list[int], b: Tensor) -> None:
        a = a.contiguous()
        groups = torch.tensor([firsts, counts], dtype=torch.int32)
        rank, k = a.shape
        pointers = (a.data_ptr(), scale.data_ptr(), groups.shape[1], *(row.data_ptr() for row in groups), b.data_ptr())
        if self._library.set_adapter(self.handle, index, k, rank, *pointers):
            raise MemoryError("The system has no memory for an adapter.")


def _in_groups(b: Tensor) -> Tensor:
    """Return the rows of B in groups of sixteen. Within a group, packs of each rank are side by side."""
    b = torch.nn.functional.pad(b, (0, 0, 0, -len(b) % LANES))
    pack = _pack(b.dtype)
    return b.reshape(-1, LANES, b.shape[1] // pack, pack).transpose(1, 2).flatten()


def _pack(dtype: torch.dtype) -> int:
    """Return how many elements one dot-product instruction reads, as in src/packs.h."""
    if dtype == torch.bfloat16:
        return 2
    return 1


def _padded(matrix: Tensor) -> Tensor:
    """Pad the columns of a matrix with zeros, up to a multiple of RANKS."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % RANKS))
