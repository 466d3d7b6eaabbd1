"""The protocol of an executor, which computes a model's forward pass in one of several ways."""

from __future__ import annotations

from typing import Protocol

import torch

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch


class Executor(Protocol):
    """Runs the model, and owns the KV cache in its own layout."""

    is_exact: bool  # whether a token's logits are bitwise the same in any step

    @property
    def block_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the KV cache. Their first dimension is the block."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the logits [R, vocab] of `batch.logits_rows`, writable, until the next call overwrites them."""

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy the keys and values of whole blocks (from, to). Raises torch.OutOfMemoryError before any copy."""

    def prepare(self, adapter: Adapter) -> Adapter:
        """Return an adapter ready for steps. It has no weights if the executor copies them. Any thread may do this."""
