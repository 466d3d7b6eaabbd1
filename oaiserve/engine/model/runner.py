"""Runs a step: builds its batch, calls the model, samples. The only owner of the KV cache."""

from __future__ import annotations

import math

import numpy as np
import torch

from oaiserve.engine.model.attention import AttentionCall, Backend, LayerCache, reference
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.load import LoadedModel, model_inputs
from oaiserve.engine.model.sampler import logprobs_of, sample
from oaiserve.engine.sequence import ChunkResult, Step

BAD_LOGITS = "The model produced no usable numbers (NaN or infinity) for this request."


class ModelRunner:
    """`num_blocks` blocks of `block_size` tokens, on the model's device and in its dtype."""

    def __init__(
        self, loaded: LoadedModel, *, num_blocks: int, block_size: int, backend: Backend = reference.attend
    ) -> None:
        self._loaded = loaded
        self._block_size = block_size
        self._backend = backend
        tokens = (num_blocks, block_size)
        self._caches = {
            layer: LayerCache(
                _zeros((*tokens, kv.kv_heads, kv.key_dim), loaded.dtype, loaded.device),
                _zeros((*tokens, kv.kv_heads, kv.value_dim), loaded.dtype, loaded.device),
            )
            for layer, kv in loaded.kv_shapes.items()
        }

    @torch.inference_mode()
    def run(self, step: Step) -> list[ChunkResult]:
        """One result per chunk, in the step's order."""
        self._copy_blocks(step.copies)
        batch = build_batch(step, self._block_size, self._loaded.device)
        logits = self.forward(batch)
        results = [ChunkResult() for _ in step.chunks]
        self._sample(step, batch, logits, results)
        self._report_prompt(step, batch, logits, results)
        return results

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        source, target = torch.tensor(copies, device=self._loaded.device).T
        for cache in self._caches.values():
            for blocks in cache:
                blocks.index_copy_(0, target, blocks.index_select(0, source))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, vocab] of `batch.logits_rows`."""
        call = AttentionCall(self._backend, self._caches, batch)
        logits: torch.Tensor = self._loaded.model(**model_inputs(batch), call=call).logits
        return logits[0]

    def _sample(self, step: Step, batch: Batch, logits: torch.Tensor, results: list[ChunkResult]) -> None:
        if not batch.sample_chunks:
            return
        sequences = [step.chunks[index].sequence for index in batch.sample_chunks]
        rows = logits[: len(sequences)]
        token_ids, are_finite = sample(rows, sequences)
        for index, token_id, is_finite in zip(batch.sample_chunks, token_ids, are_finite, strict=True):
            if is_finite:
                results[index].token_id = token_id
            else:
                results[index].error = BAD_LOGITS
        asking = [
            row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None and are_finite[row]
        ]
        if asking:
            logprobs = logprobs_of(
                rows[torch.tensor(asking, device=rows.device)],
                [token_ids[row] for row in asking],
                [sequences[row].params.logprobs or 0 for row in asking],
            )
            for row, of_row in zip(asking, logprobs, strict=True):
                results[batch.sample_chunks[row]].logprobs = of_row

    def _report_prompt(self, step: Step, batch: Batch, logits: torch.Tensor, results: list[ChunkResult]) -> None:
        for index, first_row, num_rows in batch.prompt_rows:
            chunk = step.chunks[index]
            next_ids = chunk.sequence.token_ids[chunk.start + 1 : chunk.start + 1 + num_rows]
            num_top = [chunk.sequence.params.prompt_logprobs or 0] * num_rows
            rows = logits[first_row : first_row + num_rows]
            results[index].prompt_logprobs = logprobs_of(rows, next_ids, num_top) if num_rows else []


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because attention multiplies what it masks by 0, and 0 times a NaN left in memory is NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks the system for zeroed pages, which cost nothing until they are used; torch writes every byte, which
    # takes seconds for some GiB.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
