"""Sequences with their blocks, and steps of them that tests compute without a scheduler."""

from collections.abc import Iterable
from typing import Any

import torch
from hypothesis import strategies as st

from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.rehearsal import prompts_and_decodes
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 96
# For each sequence: the number of tokens in the cache, and of those that the last step computes.
Shape = list[tuple[int, int]]
_OF_SEQUENCE = {"draw_key", "rules", "stop_ids", "bad_words", "adapter", "constraint", "device_counts"}
_SET_LATER = {"state", "wants_prompt_logprobs"}


def sequence_of(
    token_ids: list[int], blocks: Iterable[int] = (), *, name: str = "r", max_len: int = 1024, **others: Any
) -> Sequence:
    """Return a sequence with these blocks. `others` are parameters of its request, or fields of `Sequence`."""
    own = {key: others.pop(key) for key in _OF_SEQUENCE & others.keys()}
    later = {key: others.pop(key) for key in _SET_LATER & others.keys()}
    sequence = Sequence(name, 0, token_ids, SamplingParams(**others), max_len=max_len, **own)
    sequence.blocks = list(blocks)
    for key, value in later.items():
        setattr(sequence, key, value)
    return sequence


def batch_of_prompt(num_tokens: int, start: int = 0, *, num_blocks: int = 8, **others: Any) -> Batch:
    """Return the batch of a text of `num_tokens` from `start` on, which has the first blocks of the cache."""
    sequence = sequence_of([(7 * i + 3) % 97 for i in range(num_tokens)], range(num_blocks), **others)
    return build_batch(Step([Chunk(sequence, start, num_tokens - start)]), BLOCK_SIZE, CPU)


@torch.inference_mode()
def logits_of(executor: Executor, lengths: list[int], vocab_size: int) -> list[torch.Tensor]:
    """Return the logits of a step of prompts of these lengths, and of one of their next tokens."""
    steps = prompts_and_decodes(lengths, vocab_size, BLOCK_SIZE)
    return [executor.forward(build_batch(step, BLOCK_SIZE, CPU)).clone() for step in steps]


def shapes(most_before: int, most_now: int, num_blocks: int = NUM_BLOCKS) -> st.SearchStrategy[Shape]:
    """Shapes that the cache has room for."""
    sequence = st.tuples(st.integers(0, most_before), st.integers(1, most_now) | st.just(1))
    return st.lists(sequence, min_size=1, max_size=5).filter(
        lambda shape: sum(-(-sum(lens) // BLOCK_SIZE) for lens in shape) <= num_blocks
    )


def two_steps(
    shape: Iterable[tuple[int, int]], generator: torch.Generator, *, num_blocks: int = NUM_BLOCKS, **others: Any
) -> list[Step]:
    """Return the last step, and one that fills the cache before, unless it is empty.

    Tokens are random, and blocks in random order. `others` are those of `sequence_of`.
    """
    blocks = iter(torch.randperm(num_blocks, generator=generator).tolist())
    before = Step()
    step = Step()
    for i, (num_before, num_now) in enumerate(shape):
        ids = torch.randint(97, (num_before + num_now,), generator=generator).tolist()
        own = [next(blocks) for _ in range(-(-len(ids) // BLOCK_SIZE))]
        sequence = sequence_of(ids, own, name=str(i), **others)
        if num_before:
            before.chunks.append(Chunk(sequence, 0, num_before, max_draws=0))
        step.chunks.append(Chunk(sequence, num_before, num_now))
    for part in (before, step):
        part.chunks.sort(key=lambda chunk: chunk.num_tokens > 1)  # single tokens come first
    return [before, step] if before.chunks else [step]
