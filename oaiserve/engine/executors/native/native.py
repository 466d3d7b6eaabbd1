"""The native executor: one native call, without the GIL, computes all layers of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from oaiserve.engine.decoder.description import Decoder
from oaiserve.engine.executors.native.library import Library, StepInput
from oaiserve.engine.executors.native.operations import Operations
from oaiserve.engine.executors.native.pack_weights import WeightPacker
from oaiserve.engine.executors.native.packed_adapter import PackedAdapter
from oaiserve.engine.executors.native.reserved import ReservedMemory
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.kv_cache import block_tensors, copy_blocks


class NativeDecoder:
    """Runs one decoder in native code, and owns its KV cache, whose layout is in `kv_layout.py`."""

    # The decoder has threads of its own. Torch has little left to do, and its threads would only compete with them.
    torch_threads = 1
    is_exact = True

    def __init__(
        self,
        library: Library,
        decoder: Decoder,
        *,
        num_threads: int,
        num_blocks: int,
        block_size: int,
        has_adapters: bool = False,
        reserved: ReservedMemory | None = None,
        before_packing: Callable[[], object] = lambda: None,
    ) -> None:
        """Copy the weights, except for embeddings of floats.

        They are copied into `reserved` if it is passed, and its unused rest is released. With `has_adapters`, rows of a
        step may have adapters. `before_packing` is called each time before blocks are packed, without the GIL. Raises
        NotKnown for sizes that the native code does not support, and MemoryError.
        """
        self._library = library
        self.library_name = library.name
        self.vocab_size = decoder.head.weight.shape[0]
        self._logits = torch.empty(0, self.vocab_size)
        self._packed: WeakKeyDictionary[Adapter, PackedAdapter] = WeakKeyDictionary()
        self._padding_id = decoder.padding_id
        self._handle = library.decoder()
        self._pool = library.pool(num_threads)
        if self._handle is None or self._pool is None:
            raise MemoryError(f"The system has no memory for a decoder, or does not start {num_threads} threads.")
        self._reserved = reserved  # Keeps the memory alive as long as the decoder.
        if reserved is not None:
            reserved.stop()
            library.lend_memory(self._handle, reserved.address, reserved.num_bytes)
        weights = WeightPacker(library, self._handle, self._pool, before_packing)
        self._operations = Operations(
            library,
            self._handle,
            weights,
            decoder,
            num_blocks=num_blocks,
            block_size=block_size,
            has_adapters=has_adapters,
        )
        weights.finish()
        if reserved is not None:
            reserved.keep(library.lent_bytes(self._handle))
        self.caches = self._operations.caches
        self.weight_bytes = self._operations.weight_bytes

    def __del__(self) -> None:
        self._library.free_decoder(self._handle)
        self._library.free_pool(self._pool)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float32 [R, vocab] of `batch.logits_rows`, which the next call overwrites."""
        num_logits = len(batch.logits_rows)
        if len(self._logits) < num_logits:
            self._logits = torch.empty(num_logits, self.vocab_size)
        logits = self._logits[:num_logits]
        arrays = [
            tensor.numpy().astype(np.int32)
            for tensor in (
                batch.input_ids,
                batch.positions,
                batch.slots,
                batch.query_start,
                batch.seq_lens,
                batch.block_tables,
                batch.logits_rows,
            )
        ]
        step = StepInput(
            len(batch.input_ids),
            len(batch.seq_lens),
            batch.block_tables.shape[1],
            num_logits,
            *(array.ctypes.data for array in arrays),
            logits.data_ptr(),
        )
        if batch.adapters:
            packed = {adapter: self._packed[adapter] for adapter in batch.adapters if adapter is not None}
            places = {adapter: place for place, adapter in enumerate(packed)}
            handles = np.array([one.handle for one in packed.values()], np.uintp)
            of_chunks = [-1 if adapter is None else places[adapter] for adapter in batch.adapters]
            of_tokens = np.repeat(np.array(of_chunks, np.int32), batch.query_lens)
            step.num_adapters = len(packed)
            step.adapters = handles.ctypes.data
            step.token_adapters = of_tokens.ctypes.data
        if batch.states is not None:
            state_places = np.array(batch.states.places, np.int32)
            state_addresses = np.array(batch.states.addresses(), np.uintp)
            step.state_places = state_places.ctypes.data
            step.states = state_addresses.ctypes.data
        if (media := batch.media) is not None:
            sets = torch.stack([media.vectors, *media.deep]).float()
            vector_rows = media.rows.numpy().astype(np.int32)
            arrays[0][vector_rows] = self._padding_id  # the ids of images may be outside the vocabulary
            step.num_sets, step.num_vectors, _ = sets.shape
            step.vectors = sets.data_ptr()
            step.vector_rows = vector_rows.ctypes.data
        if batch.axes is not None:
            axes = batch.axes.numpy().astype(np.int32)
            step.axes = axes.ctypes.data
        if batch.last_visible is not None:
            last_visible = batch.last_visible.numpy().astype(np.int32)
            step.last_visible = last_visible.ctypes.data
        if self._library.step(self._handle, self._pool, ctypes.byref(step)):
            raise MemoryError(f"No memory for a step of {len(batch.input_ids)} tokens.")
        return logits

    def prepare(self, adapter: Adapter) -> Adapter:
        ready = Adapter(adapter.name, {})
        self._packed[ready] = PackedAdapter(self._library, adapter, self._operations.sites)
        return ready

    def durations_seconds(self) -> dict[str, float]:
        """Return the total seconds of each kind of operation in all steps so far."""
        durations_ns = np.zeros(len(self._operations.names), np.int64)
        self._library.durations(self._handle, durations_ns.ctypes.data)
        totals = dict.fromkeys(self._operations.names, 0.0)
        for name, duration_ns in zip(self._operations.names, durations_ns.tolist(), strict=True):
            totals[name] += duration_ns / 1e9
        return totals

    @property
    def block_tensors(self) -> list[torch.Tensor]:
        return block_tensors(self.caches)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if self.caches:  # Without caches, no layer has attention.
            copy_blocks(self.caches, copies)
