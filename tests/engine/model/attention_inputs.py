"""Inputs of a layer's attention: queries, keys and values of some sequences, and a cache with what they had before."""

import math
from typing import NamedTuple

import torch

from oaiserve.engine.model.attention import LayerCache
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.sequences.step import Chunk, Step
from tests.engine.model.steps import CPU, sequence_of


class Inputs(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: LayerCache
    batch: Batch


def make_inputs(
    lengths: tuple[tuple[int, int], ...],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 16,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    """Return the inputs of sequences with random blocks. Parts of the cache that belong to no token are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_blocks = sum(-(-(start + count) // block_size) for start, count in lengths) + 1
    free = torch.randperm(num_blocks, generator=generator).tolist()
    value_dim = value_dim or key_dim
    shapes = ((num_blocks, block_size, kv_heads, dim) for dim in (key_dim, value_dim))
    cache = LayerCache(*(torch.full(shape, math.nan, dtype=dtype) for shape in shapes))
    step = Step()
    for start, count in lengths:
        blocks = [free.pop() for _ in range(-(-(start + count) // block_size))]
        sequence = sequence_of([0] * (start + count), blocks)
        step.chunks.append(Chunk(sequence, start, count))
        for position in range(start):
            place = sequence.blocks[position // block_size], position % block_size
            cache.keys[place] = randn(kv_heads, key_dim)
            cache.values[place] = randn(kv_heads, value_dim)
    num_tokens = sum(count for _, count in lengths)
    # Queries and keys are views of one product, as in models.
    query, key = randn(num_tokens, (heads + kv_heads) * key_dim).split([heads * key_dim, kv_heads * key_dim], dim=1)
    of_heads = query.unflatten(1, (heads, key_dim)), key.unflatten(1, (kv_heads, key_dim))
    return Inputs(*of_heads, randn(num_tokens, kv_heads, value_dim), cache, build_batch(step, block_size, CPU))
