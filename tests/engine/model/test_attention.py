"""The reference backend equals attention that is computed token by token."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.model.attention import LayerCache, Scoring
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.steps import CPU, sequence_of

BLOCK_SIZE, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 6, 2, 8, 5


def plain_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention of the last token's query [heads, dim] to all keys and values [L, kv_heads, dim]."""
    out = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = keys[:, kv_head] @ query[head] / math.sqrt(KEY_DIM)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if slopes is not None:
            scores = scores - slopes[head] * torch.arange(len(scores) - 1, -1, -1)
        if window is not None:
            scores[: max(0, len(scores) - window)] = -math.inf
        weights = scores.exp()
        total = weights.sum() + (0 if sinks is None else sinks[head].exp())
        out.append(weights / total @ values[:, kv_head])
    return torch.stack(out)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 9)), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 3, 100]),
    softcap=st.sampled_from([None, 2.0]),
    of_heads=st.sampled_from([None, "sinks", "slopes"]),
    seed=st.integers(0, 1000),
)
def test_it_equals_plain_attention_for_any_mix_of_prefill_and_decode(
    lengths: list[tuple[int, int]], window: int | None, softcap: float | None, of_heads: str | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths.sort(key=lambda pair: pair[1] != 1)  # chunks of one token come first
    num_blocks = sum(-(-(start + count) // BLOCK_SIZE) for start, count in lengths)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    # Parts of the cache that belong to no sequence must not matter, so they are NaN.
    cache = LayerCache(
        torch.full((num_blocks, BLOCK_SIZE, KV_HEADS, KEY_DIM), math.nan, dtype=torch.float64),
        torch.full((num_blocks, BLOCK_SIZE, KV_HEADS, VALUE_DIM), math.nan, dtype=torch.float64),
    )
    step, all_keys, all_values = Step(), [], []
    for start, count in lengths:
        sequence = sequence_of([0] * (start + count), [free.pop() for _ in range(-(-(start + count) // BLOCK_SIZE))])
        step.chunks.append(Chunk(sequence, start, count))
        all_keys.append(randn(start + count, KV_HEADS, KEY_DIM))
        all_values.append(randn(start + count, KV_HEADS, VALUE_DIM))
        for position in range(start):
            block, offset = sequence.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            cache.keys[block, offset] = all_keys[-1][position]
            cache.values[block, offset] = all_values[-1][position]
    # Padding is read and then masked, so it must be finite: a real cache is zeroed at the start.
    cache.keys.nan_to_num_()
    cache.values.nan_to_num_()
    sinks = 2 * randn(HEADS) if of_heads == "sinks" else None
    slopes = randn(HEADS).abs() if of_heads == "slopes" else None
    query = randn(sum(count for _, count in lengths), HEADS, KEY_DIM)
    attention = ReferenceAttention(build_batch(step, BLOCK_SIZE, CPU))
    got = attention(
        query,
        torch.cat([keys[start:] for keys, (start, _) in zip(all_keys, lengths, strict=True)]),
        torch.cat([values[start:] for values, (start, _) in zip(all_values, lengths, strict=True)]),
        cache,
        Scoring(KEY_DIM**-0.5, window, softcap, sinks, slopes),
    )
    row = 0
    for keys, values, (start, count) in zip(all_keys, all_values, lengths, strict=True):
        for position in range(start, start + count):
            seen = keys[: position + 1], values[: position + 1]
            expected = plain_attention(query[row], *seen, window, softcap, sinks, slopes)
            torch.testing.assert_close(got[row], expected, rtol=1e-6, atol=1e-6)  # softmax is in float32
            row += 1
