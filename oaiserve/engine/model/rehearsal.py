"""Builds rehearsal steps: artificial prompts and decodes that run before the first request. Their results are dropped.

They show what a model's layers store, whether another way of computing gives the same logits, and how much memory the
largest step takes, and they compile kernels. They overwrite blocks, so they must run before any request.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from dataclasses import replace
from itertools import product

from oaiserve.engine.model.sampling.sampler import NUM_TOP
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step

# Each of these ways to draw a token has its own kernels. Each is used on the model's logits and on edited ones.
_WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
)
_BIASES: tuple[dict[int, float], ...] = ({}, {0: 1.0})
# With these parameters, drawing a token takes the most memory. Log-probabilities of prompts take more; if they don't
# fit, they are computed in parts.
_COSTLY = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logit_bias={0: 1.0}, logprobs=NUM_TOP)


def prompt(num_tokens: int, vocab_size: int, block_size: int, *, start: int = 0) -> Step:
    """Return a step that computes a sequence of `num_tokens` varied tokens from `start` on, in the first blocks."""
    return prompt_of([(7 * position + 3) % vocab_size for position in range(num_tokens)], block_size, start=start)


def prompt_of(ids: list[int], block_size: int, *, start: int = 0) -> Step:
    """Return a step that computes a sequence of these tokens from `start` on, in the first blocks."""
    sequence = Sequence("rehearsal", 0, ids, SamplingParams(), max_len=len(ids) + 1)
    sequence.blocks = list(range(-(-len(ids) // block_size)))
    return Step([Chunk(sequence, start, len(ids) - start)])


def prompts_and_decodes(
    lengths: list[int],
    vocab_size: int,
    block_size: int,
    params: Sequenced[SamplingParams] = (),
    *,
    device_counts: bool = False,
) -> tuple[Step, Step]:
    """Return a step that computes sequences of these lengths up to their last token, and one that decodes that token.

    The lengths are 3 or more. Each sequence has its own blocks, from the first block on. Sequences are greedy, or use
    `params` in this order. If the device counts the tokens of a sequence, its answer has two tokens.
    """
    prompts = Step()
    decodes = Step()
    num_blocks = 0
    for index, length in enumerate(lengths):
        ids = [(7 * position + 13 * index + 3) % vocab_size for position in range(length)]
        of_sequence = params[index] if params else SamplingParams(temperature=0.0)
        sequence = Sequence("rehearsal", index, ids, of_sequence, max_len=length + 1, device_counts=device_counts)
        if sequence.is_counted:
            sequence.prompt_len -= 2
        blocks_end = num_blocks + -(-length // block_size)
        sequence.blocks = list(range(num_blocks, blocks_end))
        num_blocks = blocks_end
        prompts.chunks.append(Chunk(sequence, 0, length - 1, max_draws=0))
        decodes.chunks.append(Chunk(sequence, length - 1, 1))
    return prompts, decodes


def sampling_steps() -> list[Step]:
    """Return a step for each way of drawing a token that has its own kernels. The steps write into the first block."""
    steps = []
    for params, logit_bias in product(_WAYS, _BIASES):
        chunks = []
        for num_tokens in (1, 2):
            params = replace(params, logit_bias=logit_bias)
            sequence = Sequence("rehearsal", 0, [0] * num_tokens, params, max_len=num_tokens + 1)
            sequence.blocks = [0] * num_tokens
            chunks.append(Chunk(sequence, 0, num_tokens))
        steps.append(Step(chunks))
    return steps


def largest_step(*, max_step_tokens: int, max_running: int, longest: int, block_size: int) -> Step:
    """Return the step that takes the most memory: as many sequences as may run, each at the end of `longest` tokens.

    All of them draw a token, in the way that takes the most memory. They have one token each, except for some that
    prefill with the rest of the step's tokens. All their blocks are the first block, so the results mean nothing.
    """
    token_ids = [0] * longest
    blocks = [0] * -(-longest // block_size)
    prefills: list[Chunk] = []
    decodes: list[Chunk] = []
    left = max_step_tokens
    for index in range(max_running):
        num_tokens = max(1, min(longest, left - (max_running - index - 1)))
        left -= num_tokens
        sequence = Sequence("rehearsal", index, [0], _COSTLY, max_len=longest + 1)
        sequence.token_ids = token_ids
        sequence.num_tokens = longest
        sequence.blocks = blocks
        (decodes if num_tokens == 1 else prefills).append(Chunk(sequence, longest - num_tokens, num_tokens))
    return Step(decodes + prefills)
