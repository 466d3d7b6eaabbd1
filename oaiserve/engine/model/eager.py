"""The eager executor: the model as transformers wrote it, on any device, and ready as soon as it is loaded."""

from __future__ import annotations

import torch

from oaiserve.engine.model.attention import AttentionCall, Backend, LayerCache, run_model
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.kv_cache import copy_blocks, zeroed
from oaiserve.engine.model.spec import LoadedModel


class EagerExecutor:
    """Runs the model operation by operation, with the attention of `backend`, which can read `caches` (by layer)."""

    def __init__(self, loaded: LoadedModel, caches: dict[int, LayerCache], backend: Backend) -> None:
        self._model = loaded.model
        self._backend = backend
        self.caches = caches
        self.num_used_blocks = 0  # the first blocks that hold anything; counted on a CPU, where they can be handed over

    @classmethod
    def with_cache(
        cls, loaded: LoadedModel, *, num_blocks: int, block_size: int, backend: Backend = ReferenceAttention
    ) -> EagerExecutor:
        """Make an executor with a new KV cache in the plain layout, on the model's device and in its dtype."""
        tokens = (num_blocks, block_size)
        caches = {
            layer: LayerCache(
                zeroed((*tokens, kv.kv_heads, kv.key_dim), loaded.dtype, loaded.device),
                zeroed((*tokens, kv.kv_heads, kv.value_dim), loaded.dtype, loaded.device),
            )
            for layer, kv in loaded.kv_shapes.items()
        }
        return cls(loaded, caches, backend)

    def forward(self, batch: Batch) -> torch.Tensor:
        if batch.block_tables.device.type == "cpu":
            self.num_used_blocks = max(self.num_used_blocks, int(batch.block_tables.max()) + 1)
        return run_model(self._model, batch, call=AttentionCall(self._backend(batch), self.caches))

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        copy_blocks(self.caches.values(), copies)
