"""Compares an attention backend with the reference, in the model's own layers."""

from __future__ import annotations

import torch

from oaiserve.engine.model.attention import Backend, LayerCache, Scoring, StepAttention
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.rehearsal import prompts_and_decodes
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.start.compare import Difference, difference, layer_tolerance, worst
from oaiserve.engine.step import Chunk, Step

LENGTHS = (3, 20, 600, 75)  # of sequences whose attention is compared; one is read by several programs
CHUNK_TOKENS = 5  # of the longest, in a step in which the others decode


@torch.inference_mode()
def attention_problem(loaded: LoadedModel, backend: Backend, block_size: int) -> Difference | None:
    """Compare attention with the reference in the model's layers, in prompts, chunks and decodes."""
    if not loaded.kv_shapes:
        return None
    *lengths, longest = (max(3, min(length, loaded.max_model_len)) for length in LENGTHS)
    prompts, decodes = prompts_and_decodes([*lengths, longest], loaded.vocab_size, block_size)
    # The longest goes on with some tokens while the others decode.
    sequence, start = decodes.chunks.pop().sequence, longest - min(CHUNK_TOKENS, longest - 1)
    prompts.chunks[-1] = Chunk(sequence, 0, start, max_draws=0)
    decodes.chunks.append(Chunk(sequence, start, longest - start))
    compared = _Compared(backend)
    num_blocks = sequence.blocks[-1] + 1
    executor = EagerExecutor.with_cache(loaded, num_blocks=num_blocks, block_size=block_size, backend=compared.of_step)
    states = States(loaded.state_shapes, len(prompts.chunks), loaded.device) if loaded.state_shapes else None
    for step in (prompts, decodes):
        order = sorted(enumerate(step.chunks), key=lambda numbered: numbered[1].num_tokens > 1)
        batch = build_batch(Step([chunk for _, chunk in order]), block_size, loaded.device)
        if states is not None:
            batch.states = states.of_step([StateChunk(i, chunk.start, chunk.num_tokens) for i, chunk in order])
        executor.forward(batch)
    limit = layer_tolerance(loaded.dtype)
    return worst(Difference("attention in a layer", apart, limit) for apart in compared.found)


class _Compared:
    """Computes attention by the reference, and by another backend to compare."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.found: list[float] = []  # differences of results, and the share of keys and values that differ

    def of_step(self, batch: Batch) -> StepAttention:
        reference, fast = ReferenceAttention(batch), self._backend(batch)

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, scoring: Scoring
        ) -> torch.Tensor:
            copies = cache.copy()
            got = fast(query, key, value, copies, scoring)
            want = reference(query, key, value, cache, scoring)
            self.found.append(difference(got, want))
            for copy, kept in zip(copies, cache, strict=True):
                self.found.append(float((copy.float() != kept.float()).float().mean()))
            return want

        return attend
