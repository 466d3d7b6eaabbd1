"""Adds adapters with Triton kernels: two launches add the adapters of all rows to the product of a linear layer.

The host sorts the rows of a step into tiles, once for all layers. It never waits for the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
from torch import Tensor

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch, rows_of
from oaiserve.engine.model.gpu.triton_adapter_kernels import expand_kernel, shrink_kernel
from oaiserve.engine.model.transfer import on_device, pinned

ROWS = 16  # rows of a tile, the fewest that tensor cores accept
RANKS = 16
SHRINK_COLUMNS = 128
EXPAND_COLUMNS = 128
# Limits of a replayed step: the number of its adapters, and the rank of each.
MOST_REPLAYED = 16
WIDEST_REPLAYED = 128


def most_tiles(num_tokens: int) -> int:
    """Return the most tiles that this number of rows can take in a replayed step."""
    return min(num_tokens, (num_tokens + (ROWS - 1) * MOST_REPLAYED) // ROWS)


class TritonAdapters:
    """A table of the addresses of adapters' weights, for up to `most` adapters at once.

    `modules` may be adapted. Captured steps of up to `captured_tokens` tokens read their tiles at fixed addresses, to
    which `upload` copies the tiles of a step. Sums are in float32.
    """

    def __init__(self, modules: Iterable[str], most: int, device: torch.device, captured_tokens: int = 0) -> None:
        self.places = {module: place for place, module in enumerate(modules)}
        # The four words are the addresses of A and of B, the rank, and the bits of the scale. Number 0 is no adapter.
        self.table = torch.zeros(most + 1, len(self.places), 4, dtype=torch.int64, device=device)
        self._numbers: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()  # An unloaded adapter can be freed.
        number = most_tiles(captured_tokens)
        self._tiles = torch.zeros(number, 1 + ROWS, dtype=torch.int64, device=device)
        self._products = torch.zeros(number * ROWS, WIDEST_REPLAYED, dtype=torch.float32, device=device)

    def of_batch(self, batch: Batch) -> Addition:
        """Return the addition of a batch's adapters, for one step."""
        rows = rows_of(batch.adapters, batch.query_lens)
        self._bring(rows)
        tiles = on_device(self._sorted(rows), self.table.device)
        widest = max(adapter.rank for adapter in rows)
        products = torch.empty(len(tiles) * ROWS, widest, dtype=torch.float32, device=tiles.device)
        return Addition(self, {module for adapter in rows for module in adapter.parts}, tiles, products)

    # -- captured work ------------------------------------------------------------------------------------------------

    def captured(self, num_tokens: int) -> Addition:
        """Return the addition for captured work of `num_tokens` tokens. Until the next upload, they have no adapter.

        It adds to all modules, because each replay may adapt other ones.
        """
        self._tiles.zero_()
        return Addition(self, self.places.keys(), self._tiles[: most_tiles(num_tokens)], self._products)

    def admit(self, adapters: Iterable[Adapter | None]) -> bool:
        """Return whether steps with these adapters can be replayed."""
        used = {adapter for adapter in adapters if adapter is not None}
        if len(used) > MOST_REPLAYED or any(adapter.rank > WIDEST_REPLAYED for adapter in used):
            return False
        self._bring(used)
        return True

    def upload(self, adapters: Sequence[Adapter | None], query_lens: list[int], num_tokens: int) -> None:
        """Copy the tiles of sequences with these adapters to where captured work of `num_tokens` tokens reads them."""
        tiles = self._sorted(rows_of(adapters, query_lens))
        tiles += [[0] + [-1] * ROWS] * (most_tiles(num_tokens) - len(tiles))
        self._tiles[: len(tiles)].copy_(pinned(torch.tensor(tiles), self._tiles.device), non_blocking=True)

    # -----------------------------------------------------------------------------------------------------------------

    def _bring(self, adapters: Collection[Adapter]) -> None:
        """Copy the addresses of new adapters to the device. In a full table, they replace adapters that are not in
        use."""
        new = [adapter for adapter in adapters if adapter not in self._numbers]
        if not new:
            return
        free = set(range(1, len(self.table))).difference(self._numbers.values())
        if len(free) < len(new):
            for adapter in set(self._numbers).difference(adapters):
                free.add(self._numbers.pop(adapter))
        for adapter in new:
            entries = np.zeros((len(self.places), 4), dtype=np.int64)
            for module, part in adapter.parts.items():
                bits = np.float32(part.scale).view(np.int32)
                entries[self.places[module]] = part.a.data_ptr(), part.b.data_ptr(), part.rank, bits
            self._numbers[adapter] = number = free.pop()
            self.table[number].copy_(pinned(torch.from_numpy(entries), self.table.device), non_blocking=True)

    def _sorted(self, rows: dict[Adapter, list[int]]) -> list[list[int]]:
        """Return tiles of rows with one adapter each: its number, then the rows, padded with -1."""
        tiles = []
        for adapter, indices in rows.items():
            number = self._numbers[adapter]
            for first in range(0, len(indices), ROWS):
                of_tile = indices[first : first + ROWS]
                tiles.append([number, *of_tile, *[-1] * (ROWS - len(of_tile))])
        return tiles


class Addition:
    """Adds the adapters of a step's rows to the products of `modules`, in bfloat16, float16 or float32."""

    def __init__(self, own: TritonAdapters, modules: Collection[str], tiles: Tensor, products: Tensor) -> None:
        self.modules = modules
        self._own = own
        self._tiles = tiles
        self._products = products

    def __call__(self, module: str, x: Tensor, out: Tensor) -> None:
        """Add to the products `out` [tokens, rows of W] of a module, given its input [tokens, columns]."""
        columns = x.shape[1]
        num_columns = out.shape[1]
        (num_tiles, _) = self._tiles.shape
        table = self._own.table[:, self._own.places[module]]
        products = self._products
        widest = self._products.shape[1]
        shared = (self._tiles, table, table.stride(0))
        sizes = {"ROWS": ROWS, "RANKS": RANKS}
        shrink_kernel[num_tiles, triton.cdiv(widest, RANKS)](
            x, *shared, products, x.stride(0), columns, widest, COLUMNS=SHRINK_COLUMNS, **sizes
        )
        expand_kernel[num_tiles, triton.cdiv(num_columns, EXPAND_COLUMNS)](
            products, *shared, out, out.stride(0), num_columns, widest, COLUMNS=EXPAND_COLUMNS, **sizes
        )
