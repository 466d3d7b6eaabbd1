"""Native attention as an attention backend, for models whose other operations run in transformers' code."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from oaiserve.engine.decoder.spec import KVShape
from oaiserve.engine.model.attention import LayerCache, Scoring, StepAttention
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.cpu.kv_layout import new_cache
from oaiserve.engine.model.cpu.library import AttentionOptions, CacheMemory, Library, StepInput


class NativeAttention:
    """Attention by the native library, and the KV cache that it reads, in the layout of `kv_layout.py`.

    It computes on torch's own threads. Other threads would share the cores with torch's, which go on spinning for some
    milliseconds after each of torch's operations.
    """

    def __init__(
        self,
        library: Library,
        shapes: dict[int, KVShape],
        dtype: torch.dtype,
        *,
        num_threads: int,
        num_blocks: int,
        block_size: int,
    ) -> None:
        """Allocate a cache for `shapes`, by layer index, in `dtype`, which is the library's.

        The library starts `num_threads` threads if those of torch cannot be used. The layout must fit the shapes, see
        `kv_layout.refuse_unless_it_fits`. Raises MemoryError.
        """
        self.torch_threads = num_threads
        self._library, self._dtype, self._block_size = library, dtype, block_size
        self._handle = library.attention(num_threads, openmp())
        if self._handle is None:
            raise MemoryError(f"The system does not start {num_threads} threads.")
        self.caches = {
            layer: new_cache(shape, dtype, num_blocks=num_blocks, block_size=block_size)
            for layer, shape in shapes.items()
        }
        # The native code reads these during the step.
        self._arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]] = []

    def __del__(self) -> None:
        self._library.free_attention(self._handle)

    def prepare(self, batch: Batch) -> StepAttention:
        """Return the attention of a step, see `attention.Backend`. It is valid until the next call.

        The work of a layer is divided among the threads once, for all layers.
        """
        tensors = [batch.slots, batch.query_start, batch.seq_lens, batch.block_tables]
        if batch.last_visible is not None:
            tensors.append(batch.last_visible)
        self._arrays = [tensor.numpy().astype(np.int32) for tensor in tensors]
        step = StepInput(num_tokens=len(batch.slots), num_sequences=len(batch.seq_lens))
        step.table_width = batch.block_tables.shape[1]
        names = ("slots", "query_start", "seq_lens", "block_tables", "last_visible")
        for name, array in zip(names, self._arrays, strict=False):
            setattr(step, name, array.ctypes.data)
        if self._library.attention_step(self._handle, ctypes.byref(step)):
            raise MemoryError(f"No memory for a step of {len(batch.slots)} tokens.")
        return self._attend

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        scoring: Scoring,
    ) -> Tensor:
        """Compute the attention of one layer, see `StepAttention`; `cache` is one of `caches`."""
        query, key, value = (tensor.to(self._dtype).contiguous() for tensor in (query, key, value))
        num_tokens, heads, key_dim = query.shape
        kv_heads, value_dim = value.shape[1:]
        out = query.new_empty(num_tokens, heads, value_dim)
        pointers = (cache.keys.data_ptr(), cache.values.data_ptr())
        is_int8 = cache.keys.dtype == torch.int8
        memory = CacheMemory(*pointers, kv_heads, key_dim, value_dim, self._block_size, is_int8)
        sinks = None if scoring.sinks is None else scoring.sinks.contiguous()
        options = AttentionOptions(
            heads,
            scoring.scaling,
            scoring.sliding_window or 0,
            scoring.softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
            scoring.looks_ahead,
        )
        tensors = (tensor.data_ptr() for tensor in (query, key, value, out))
        if self._library.attention_layer(self._handle, memory, options, *tensors):
            raise MemoryError(f"No memory for the attention of {num_tokens} tokens.")
        return out


def openmp() -> int | None:
    """Return the address of OpenMP's function that runs another one on all threads of torch, or None without it.

    GCC's, LLVM's and Intel's OpenMP all have it.
    """
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return ctypes.cast(function, ctypes.c_void_p).value if function else None
