"""Products with joined matrices, including the additions of the step's adapters."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from oaiserve.engine.decoder.description import Matrix
from oaiserve.engine.executors.reference.products import Products
from oaiserve.engine.model.adapters import AdapterPart
from oaiserve.engine.model.batch import Batch, CapturedAdapters
from oaiserve.plugins.cuda.executor.device_matrices import PackedMatrix, Rounded
from oaiserve.plugins.cuda.executor.kernels import Kernels
from oaiserve.plugins.cuda.executor.place import JoinedMatrix


class StepProducts(Products):
    """The products of one step, which may be captured. Adapters have their rows in the order of the description."""

    def __init__(self, batch: Batch, dtype: torch.dtype, kernels: Kernels, adapters: CapturedAdapters | None) -> None:
        if adapters is not None:
            batch = replace(batch, adapters=[])
        super().__init__(batch)
        self._dtype = dtype  # the dtype of the model
        self._kernels = kernels
        # Rows, and the same rows rounded. Other products still have to round their rows.
        self._rounded: tuple[Tensor | None, Rounded | None] = None, None
        self._captured = adapters

    def keep(self, x: Tensor, rounded: Rounded | None) -> None:
        """Use these rounded rows, if any, in the next products with `x`."""
        self._rounded = x, rounded

    def joined(self, x: Tensor, matrix: JoinedMatrix) -> Tensor:
        """Return the product [T, n] of `x` [T, k], both in the model's dtype."""
        if isinstance(matrix.weight, PackedMatrix):
            rounded = self._rounded[1] if self._rounded[0] is x else None
            out = self._kernels.multiply(x, matrix.weight, matrix.bias, self._kernels.ways, rounded)
        else:
            out = linear(x, matrix.weight, matrix.bias)
        if not self._rows and self._captured is None:
            return out
        for adapted in matrix.adapted:
            numbers = out[:, adapted.begin : adapted.end]
            rows_of_module = slice(adapted.first_row, adapted.first_row + numbers.shape[1])
            for rows, part in self.parts_of(adapted.module):
                own = AdapterPart(part.a, part.b[rows_of_module], part.scale)
                numbers.index_add_(0, rows, own.added(x[rows]))
            self._add_captured(adapted.module, adapted.first_row, x, numbers)
        return out

    def __call__(self, x: Tensor, matrix: Matrix) -> Tensor:
        """Return the product float32 [T, n] of `x` [T, k] with a matrix that is not joined."""
        out = super().__call__(x, matrix)
        if self._captured is not None and matrix.module in self._captured.modules:
            added = torch.zeros_like(out, dtype=self._dtype)  # Kernels need the dtype of the adapters.
            self._add_captured(matrix.module, matrix.first_row, x.to(self._dtype), added)
            out += added
        return out

    def _add_captured(self, module: str, first_row: int, x: Tensor, out: Tensor) -> None:
        if self._captured is not None and module in self._captured.modules:
            assert first_row == 0, f"rows of {module} are in several products"
            self._captured(module, x, out)
