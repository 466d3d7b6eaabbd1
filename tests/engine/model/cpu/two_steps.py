"""Steps for sequences of given lengths: one that fills the cache, and one that is computed behind it."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.cpu.small_models import BLOCK_SIZE

NUM_BLOCKS = 96
# Of each sequence: the tokens that are in the cache, and those that the last step computes.
Shape = list[tuple[int, int]]


def shapes(most_before: int, most_now: int) -> st.SearchStrategy[Shape]:
    """Shapes that the cache has room for."""
    sequence = st.tuples(st.integers(0, most_before), st.integers(1, most_now) | st.just(1))
    return st.lists(sequence, min_size=1, max_size=5).filter(
        lambda shape: sum(-(-sum(lens) // BLOCK_SIZE) for lens in shape) <= NUM_BLOCKS
    )


def two_steps(shape: Shape, generator: torch.Generator) -> list[Step]:
    """Return the last step, and one that fills the cache before, unless it is empty.

    Tokens are random, and blocks in random order.
    """
    blocks = iter(torch.randperm(NUM_BLOCKS, generator=generator).tolist())
    before, step = Step(), Step()
    for i, (num_before, num_now) in enumerate(shape):
        ids = torch.randint(97, (num_before + num_now,), generator=generator).tolist()
        sequence = Sequence(str(i), 0, ids, SamplingParams(), max_len=1024)
        sequence.blocks = [next(blocks) for _ in range(-(-len(ids) // BLOCK_SIZE))]
        sequence.wants_prompt_logprobs = True
        if num_before:
            before.chunks.append(Chunk(sequence, 0, num_before, max_draws=0))
        step.chunks.append(Chunk(sequence, num_before, num_now))
    for part in (before, step):
        part.chunks.sort(key=lambda chunk: chunk.num_tokens > 1)  # single tokens come first
    return [before, step] if before.chunks else [step]
