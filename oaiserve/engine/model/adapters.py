"""Low-rank adapters (LoRA) as tensors: additions to the products of some linear layers of a model.

A layer with weights W computes x W^T + scale * (x A^T) B^T for the rows of a step with the adapter. This module knows
neither the files of adapters nor the computation of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_PROBE_RANK, _PROBE_SCALE = 3, 0.3  # about half as large as usual weights


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """The two narrow matrices of an adapter for one linear layer."""

    a: Tensor  # [rank, columns of W], in the model's dtype
    b: Tensor  # [rows of W, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)

    def added(self, x: Tensor) -> Tensor:
        """Return the addition to the product of the rows `x` [..., columns]."""
        return (x @ self.a.T * self.scale) @ self.b.T


@dataclass(frozen=True, eq=False)  # each is a key, by its identity
class Adapter:
    """An adapter, by the names of its modules."""

    name: str
    parts: Mapping[str, AdapterPart]


def probe_adapter(shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> Adapter:
    """Return an adapter for linear layers of these shapes, by their names, which changes the model's results.

    It is the same each time, so that a model's results with it can be stored.
    """
    generator = torch.Generator().manual_seed(0)
    parts = {}
    for name, (rows, columns) in sorted(shapes.items()):
        a = torch.randn(_PROBE_RANK, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, _PROBE_RANK, generator=generator)
        parts[name] = AdapterPart(a.to(dtype), b.to(dtype), _PROBE_SCALE)
    return Adapter("probe", parts)
