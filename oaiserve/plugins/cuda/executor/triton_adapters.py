"""Adds adapters with Triton kernels. Two launches add all rows' adapters to the product of a linear layer.

Rows are sorted by adapter on the device, once for all layers, like the rows of experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
from torch import Tensor

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.transfer import on_device, pinned
from oaiserve.plugins.cuda.executor.product_ways import MatrixTiles, ProductWays
from oaiserve.plugins.cuda.executor.triton_adapter_kernels import expand_kernel, shrink_kernel
from oaiserve.plugins.cuda.executor.triton_products import planned

RANKS = 16
SHRINK_COLUMNS = 128
EXPAND_COLUMNS = 128
# The rows of an adapter are cut into tiles like the rows of an expert with few rows.
FEW_ROWS = ProductWays(expert_tiles=(MatrixTiles(16, 64, num_warps=4, num_stages=4),))
WIDEST_REPLAYED = 128  # the highest rank of an adapter in a replayed step


class TritonAdapters:
    """A table of the addresses of adapters' weights, for up to `most` adapters at once.

    `modules` are those that adapters may have parts for. Sums are in float32.
    """

    def __init__(self, modules: Iterable[str], most: int, device: torch.device) -> None:
        self.places = {module: place for place, module in enumerate(modules)}
        # The four words are the addresses of A and of B, the rank, and the bits of the scale. Row 0 is for tokens
        # without an adapter.
        self.table = torch.zeros(most + 1, len(self.places), 4, dtype=torch.int64, device=device)
        self._numbers: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()  # An unloaded adapter can be freed.

    def of_batch(self, batch: Batch) -> Addition:
        """Return an object that adds a batch's adapters to products of one step."""
        numbers = zip(self.numbers(batch.adapters), batch.query_lens, strict=True)
        of_tokens = [number for number, num_tokens in numbers for _ in range(num_tokens)]
        adapters = {adapter for adapter in batch.adapters if adapter is not None}
        modules = {module for adapter in adapters for module in adapter.parts}
        widest = max(adapter.rank for adapter in adapters)
        return Addition(self, modules, on_device(of_tokens, self.table.device), widest)

    def captured(self, numbers: Tensor) -> Addition:
        """Return the same for captured work, which reads its tokens' adapter numbers at each replay.

        It covers all modules, because each replay may have adapters of other modules.
        """
        return Addition(self, self.places.keys(), numbers, WIDEST_REPLAYED)

    def admit(self, adapters: Iterable[Adapter | None]) -> bool:
        """Return whether steps with these adapters can be replayed."""
        return all(adapter is None or adapter.rank <= WIDEST_REPLAYED for adapter in adapters)

    def numbers(self, adapters: Sequence[Adapter | None]) -> list[int]:
        """Return the number of each adapter.

        The addresses of new adapters are copied to the device. In a full table, they replace adapters that are not in
        use.
        """
        used = {adapter for adapter in adapters if adapter is not None}
        new = [adapter for adapter in used if adapter not in self._numbers]
        free = set(range(1, len(self.table))).difference(self._numbers.values()) if new else set()
        if len(free) < len(new):
            for adapter in set(self._numbers).difference(used):
                free.add(self._numbers.pop(adapter))
        for adapter in new:
            entries = np.zeros((len(self.places), 4), dtype=np.int64)
            for module, part in adapter.parts.items():
                bits = np.float32(part.scale).view(np.int32)
                entries[self.places[module]] = part.a.data_ptr(), part.b.data_ptr(), part.rank, bits
            self._numbers[adapter] = number = free.pop()
            self.table[number].copy_(pinned(torch.from_numpy(entries), self.table.device), non_blocking=True)
        return [0 if adapter is None else self._numbers[adapter] for adapter in adapters]


class Addition:
    """Adds the adapters with `numbers` int64 [tokens] to the products of `modules`, in bfloat16, float16 or float32."""

    def __init__(self, own: TritonAdapters, modules: Collection[str], numbers: Tensor, widest: int) -> None:
        self.modules = modules
        self._own = own
        self._plan = planned(numbers, len(own.table), FEW_ROWS)
        self._products = torch.empty(len(numbers), widest, dtype=torch.float32, device=numbers.device)

    def __call__(self, module: str, x: Tensor, out: Tensor) -> None:
        """Add to the products `out` [tokens, rows of W] of a module, given its input [tokens, columns]."""
        order, *tiles, tile = self._plan
        num_tiles = len(tiles[0])
        columns = x.shape[1]
        num_columns = out.shape[1]
        table = self._own.table[:, self._own.places[module]]
        products = self._products
        widest = products.shape[1]
        shared = (order, *tiles, table, table.stride(0))
        sizes = {"ROWS": tile.rows, "RANKS": RANKS}
        shrink_kernel[num_tiles, triton.cdiv(widest, RANKS)](
            x, *shared, products, x.stride(0), columns, widest, COLUMNS=SHRINK_COLUMNS, **sizes
        )
        expand_kernel[num_tiles, triton.cdiv(num_columns, EXPAND_COLUMNS)](
            products, *shared, out, out.stride(0), num_columns, widest, COLUMNS=EXPAND_COLUMNS, **sizes
        )
