"""The eager executor: it runs transformers' own code, on any device, and is ready as soon as the model is loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from oaiserve.engine.model.adapted_modules import adapted
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.attention import FP8, Backend, LayerCache, ScaledCache
from oaiserve.engine.model.attention.hook import AttentionCall, run_model
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.families import family_of
from oaiserve.engine.model.kv_cache import copy_blocks, zeroed
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.placed_media import placed
from oaiserve.engine.model.plain_adapters import AddTo, plain


class EagerExecutor:
    """Runs the model operation by operation. `backend` computes attention, and reads and writes `caches`, by layer."""

    is_exact = False  # matrix products round by the number of rows

    def __init__(self, loaded: LoadedModel, caches: dict[int, LayerCache], backend: Backend) -> None:
        self._model = loaded.model
        self.weight_bytes = bytes_of(loaded.model)
        self._backend = backend
        self._looks_ahead_in_windows = family_of(loaded.model.config.model_type).looks_ahead_in_windows
        self.caches = caches
        self.add_adapters: Callable[[Batch], AddTo] = plain

    @classmethod
    def with_cache(
        cls, loaded: LoadedModel, *, num_blocks: int, block_size: int, backend: Backend = ReferenceAttention
    ) -> EagerExecutor:
        """Make an executor with a new KV cache in the plain layout, on the model's device, in its form."""
        tokens = (num_blocks, block_size)
        caches: dict[int, LayerCache] = {}
        for layer, kv in loaded.kv_shapes.items():
            dtype = loaded.dtype if kv.scales is None else FP8
            cache = LayerCache(
                zeroed((*tokens, kv.kv_heads, kv.key_dim), dtype, loaded.device),
                zeroed((*tokens, kv.kv_heads, kv.value_dim), dtype, loaded.device),
            )
            caches[layer] = cache if kv.scales is None else ScaledCache.of(cache, kv.scales)
        return cls(loaded, caches, backend)

    def forward(self, batch: Batch) -> torch.Tensor:
        with adapted(self._model, batch, self.add_adapters), placed(self._model, batch) as batch:
            call = AttentionCall(self._backend(batch), self.caches, batch.states, self._looks_ahead_in_windows)
            return run_model(self._model, batch, call=call)

    def prepare(self, adapter: Adapter) -> Adapter:
        return adapter  # which is used as it is

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if self.caches:  # or else no layer has attention
            copy_blocks(self.caches.values(), copies)


def bytes_of(model: PreTrainedModel) -> int:
    """Return the bytes of a model's weights that each step reads: all but a table of tokens that is not the head's."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    is_read = head is not None and head.weight is table
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if is_read or each is not table)
