"""The model as transformers wrote it, operation by operation: on any device, and ready as soon as it is loaded."""

from __future__ import annotations

import torch

from oaiserve.engine.model.attention import AttentionCall, Backend, LayerCache, reference
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.kv_cache import copy_blocks, zeroed
from oaiserve.engine.model.load import LoadedModel, model_inputs


class EagerExecutor:
    """With its KV cache, of `num_blocks` blocks of `block_size` tokens in the model's dtype and on its device."""

    def __init__(
        self, loaded: LoadedModel, *, num_blocks: int, block_size: int, backend: Backend = reference.attend
    ) -> None:
        self._model = loaded.model
        self.backend = backend
        self.num_used_blocks = 0  # the first ones; counted on a CPU only, where somebody may want to take them over
        tokens = (num_blocks, block_size)
        self.caches = {
            layer: LayerCache(
                zeroed((*tokens, kv.kv_heads, kv.key_dim), loaded.dtype, loaded.device),
                zeroed((*tokens, kv.kv_heads, kv.value_dim), loaded.dtype, loaded.device),
            )
            for layer, kv in loaded.kv_shapes.items()
        }

    def forward(self, batch: Batch) -> torch.Tensor:
        if batch.block_tables.device.type == "cpu":
            self.num_used_blocks = max(self.num_used_blocks, int(batch.block_tables.max()) + 1)
        call = AttentionCall(self.backend, self.caches, batch)
        logits: torch.Tensor = self._model(**model_inputs(batch), call=call).logits
        return logits[0]

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        copy_blocks(self.caches.values(), copies)
