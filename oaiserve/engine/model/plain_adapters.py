"""Adds the adapters of a step to products in plain torch, one adapter after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oaiserve.engine.model.batch import Batch, rows_of

# Adds to the products `out` [tokens, rows of W] of a module of this name, given its input [tokens, columns].
AddTo = Callable[[str, Tensor, Tensor], None]


def plain(batch: Batch) -> AddTo:
    """Return the addition of a batch's adapters."""
    device = batch.input_ids.device
    on_device = {
        adapter: torch.tensor(indices, device=device)
        for adapter, indices in rows_of(batch.adapters, batch.query_lens).items()
    }

    def add_to(name: str, x: Tensor, out: Tensor) -> None:
        for adapter, indices in on_device.items():
            if (part := adapter.parts.get(name)) is not None:
                out.index_add_(0, indices, part.added(x[indices]))

    return add_to
