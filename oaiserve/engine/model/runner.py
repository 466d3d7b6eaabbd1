"""Runs a step: builds its batch, calls the model, samples. The only owner of the KV cache."""

from __future__ import annotations

from typing import Protocol

import torch

from oaiserve.engine.model.attention import Backend, reference
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.load import LoadedModel
from oaiserve.engine.model.sampler import sample
from oaiserve.engine.sequence import ChunkResult, Sequence, Step

BAD_LOGITS = "The model produced no usable numbers (NaN or infinity) for this request."
NOTHING_LEFT = f"{BAD_LOGITS} Or its allowed_token_ids, bad_words and min_tokens leave no token to choose."


class Executor(Protocol):
    """A way to run the model, with the KV cache that belongs to it."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, vocab] of `batch.logits_rows`; the caller may write into them, and the next call does."""

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """The keys and values of these blocks: (from, to)."""


class ModelRunner:
    """`num_blocks` blocks of `block_size` tokens, on the model's device and in its dtype."""

    def __init__(
        self, loaded: LoadedModel, *, num_blocks: int, block_size: int, backend: Backend = reference.attend
    ) -> None:
        self._device = loaded.device
        self._block_size = block_size
        self._executor: Executor = EagerExecutor(loaded, num_blocks=num_blocks, block_size=block_size, backend=backend)
        self._next: NativeDecoder | None = None

    def use(self, native: NativeDecoder) -> None:
        """From the next step on, with all that has been computed. May be called from any thread, once."""
        self._next = native

    @torch.inference_mode()
    def run(self, step: Step) -> list[ChunkResult]:
        """One result per chunk, in the step's order."""
        if self._next is not None:
            self._switch(self._next)
        if step.copies:
            self._executor.copy_blocks(step.copies)
        batch = build_batch(step, self._block_size, self._device)
        return self._sample(step, batch, self.forward(batch))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, vocab] of `batch.logits_rows`."""
        return self._executor.forward(batch)

    def _switch(self, native: NativeDecoder) -> None:
        assert isinstance(self._executor, EagerExecutor)
        native.adopt(list(self._executor.caches.values()), self._executor.num_used_blocks)
        self._executor, self._next = native, None
        # It has threads of its own; torch's would compete with them, for the little that is left to torch.
        torch.set_num_threads(1)

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
