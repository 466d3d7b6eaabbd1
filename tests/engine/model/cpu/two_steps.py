"""Two steps for sequences of given lengths: one that fills the cache, and one that is computed behind it."""

from __future__ import annotations

import torch

from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.cpu.small_models import BLOCK_SIZE

NUM_BLOCKS = 96


def two_steps(shape: list[tuple[int, int]], generator: torch.Generator) -> tuple[Step, Step]:
    """Return steps for sequences of which so many random tokens are computed in the first, and so many in the second.

    The first has no chunk of a sequence without tokens before, and may be empty. Blocks are in random order.
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
    return before, step
