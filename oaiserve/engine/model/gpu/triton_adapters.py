"""Adapters with Triton kernels: two launches add all rows' adapters to the product of a linear layer.

The rows of a step are sorted into tiles on the host, once for all layers. The host waits for nothing.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.gpu.triton_adapter_kernels import expand_kernel, shrink_kernel
from oaiserve.engine.model.transfer import on_device

ROWS = 16  # of a tile: the least that tensor cores take
RANKS = 16
SHRINK_COLUMNS = 128
EXPAND_COLUMNS = 128


class TritonAdapters:
    """Adds the adapters of a batch, in bfloat16, float16 or float32. Sums are in float32."""

    def __init__(self, batch: Batch) -> None:
        rows = batch.adapter_rows()
        device = batch.input_ids.device
        sorted_rows: list[int] = []
        of_tiles: list[int] = []
        for number, indices in enumerate(rows.values()):
            num_tiles = -(-len(indices) // ROWS)
            sorted_rows += indices + [-1] * (num_tiles * ROWS - len(indices))
            of_tiles += [number] * num_tiles
        modules = sorted({module for adapter in rows for module in adapter.parts})
        table: list[tuple[int, int, int]] = []
        scales: list[float] = []
        for module in modules:
            for adapter in rows:
                part = adapter.parts.get(module)
                table.append((0, 0, 0) if part is None else (part.a.data_ptr(), part.b.data_ptr(), part.rank))
                scales.append(0.0 if part is None else part.scale)
        self._rows, self._of_tiles = on_device(sorted_rows, device), on_device(of_tiles, device)
        self._num_tiles = len(of_tiles)
        tables = on_device(table, device).view(len(modules), len(rows), 3)
        all_scales = on_device(scales, device, torch.float32).view(len(modules), len(rows))
        self._modules = dict(zip(modules, zip(tables, all_scales, strict=True), strict=True))
        self._widest = max(part.rank for adapter in rows for part in adapter.parts.values())
        self._products = torch.empty(len(sorted_rows), self._widest, dtype=torch.float32, device=device)

    def __call__(self, module: str, x: Tensor, out: Tensor) -> None:
        """Add to the products `out` [tokens, rows of W] of a module, given its input [tokens, columns]."""
        table, scales = self._modules[module]
        columns, num_columns = x.shape[1], out.shape[1]
        shared = (self._rows, self._of_tiles, table)
        sizes = {"ROWS": ROWS, "RANKS": RANKS}
        shrink_kernel[self._num_tiles, triton.cdiv(self._widest, RANKS)](
            x, *shared, scales, self._products, x.stride(0), columns, self._widest, COLUMNS=SHRINK_COLUMNS, **sizes
        )
        expand_kernel[self._num_tiles, triton.cdiv(num_columns, EXPAND_COLUMNS)](
            self._products, *shared, out, out.stride(0), num_columns, self._widest, COLUMNS=EXPAND_COLUMNS, **sizes
        )
