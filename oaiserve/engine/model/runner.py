"""Runs a step: builds its batch, calls the model, samples. The only owner of the KV cache."""

from __future__ import annotations

import math

import numpy as np
import torch

from oaiserve.engine.model.attention import AttentionCall, Backend, LayerCache, reference
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.load import LoadedModel, model_inputs
from oaiserve.engine.model.sampler import sample
from oaiserve.engine.sequence import ChunkResult, Sequence, Step

BAD_LOGITS = "The model produced no usable numbers (NaN or infinity) for this request."
NOTHING_LEFT = f"{BAD_LOGITS} Or its allowed_token_ids, bad_words and min_tokens leave no token to choose."


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
        return self._sample(step, batch, self.forward(batch))

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

    def _sample(self, step: Step, batch: Batch, logits: torch.Tensor) -> list[ChunkResult]:
        results = [ChunkResult() for _ in step.chunks]
        sequences = [step.chunks[index].sequence for index in batch.sample_chunks]
        known: list[tuple[int, int]] = []
        for index, _, num_rows in batch.prompt_rows:
            sequence, start, _ = step.chunks[index]
            num_top = sequence.params.prompt_logprobs or 0
            known += [(token_id, num_top) for token_id in sequence.token_ids[start + 1 : start + 1 + num_rows]]
        sampled = sample(logits, sequences, known)
        rows = zip(batch.sample_chunks, sampled.token_ids, sampled.are_finite, sampled.logprobs, strict=True)
        for index, token_id, is_finite, logprobs in rows:
            if is_finite:
                results[index].token_id, results[index].logprobs = token_id, logprobs
            else:
                results[index].error = NOTHING_LEFT if _masks(step.chunks[index].sequence) else BAD_LOGITS
        for index, first_row, num_rows in batch.prompt_rows:
            first = first_row - len(sequences)
            results[index].prompt_logprobs = sampled.known_logprobs[first : first + num_rows]
        return results


def _masks(sequence: Sequence) -> bool:
    return bool(sequence.params.allowed_token_ids is not None or sequence.bad_words or sequence.params.min_tokens)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because attention multiplies what it masks by 0, and 0 times a NaN left in memory is NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks the system for zeroed pages, which cost nothing until they are used; torch writes every byte, which
    # takes seconds for some GiB.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
