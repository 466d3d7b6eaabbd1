"""The reference backend equals attention that is computed token by token."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.model.attention import Scoring
from oaiserve.engine.model.attention.reference import ReferenceAttention
from tests.engine.model.attention_inputs import make_inputs

BLOCK_SIZE = 4
HEADS = 6
KV_HEADS = 2
KEY_DIM = 8
VALUE_DIM = 5


def plain_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention of the last token's query [heads, dim] to all keys and values [L, kv_heads, dim]."""
    out = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = keys[:, kv_head] @ query[head] / math.sqrt(KEY_DIM)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
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
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_equals_plain_attention_for_any_mix_of_prefill_and_decode(
    lengths: list[tuple[int, int]], window: int | None, softcap: float | None, has_sinks: bool, seed: int
) -> None:
    lengths.sort(key=lambda pair: pair[1] != 1)  # chunks of one token come first
    sizes = {"kv_heads": KV_HEADS, "key_dim": KEY_DIM, "value_dim": VALUE_DIM, "block_size": BLOCK_SIZE}
    query, key, value, cache, batch = make_inputs(lengths, heads=HEADS, **sizes, dtype=torch.float64, seed=seed)
    for numbers in cache:
        # padding is read and then masked, so it must be finite: a real cache is zeroed at the start
        numbers.nan_to_num_()
    sinks = torch.linspace(0.1, 2.0, HEADS, dtype=torch.float64) if has_sinks else None
    scoring = Scoring(KEY_DIM**-0.5, window, softcap, sinks)
    got = ReferenceAttention(batch)(query, key, value, cache, scoring)
    for numbers, written in zip(cache, (key, value), strict=True):
        assert torch.equal(numbers.flatten(0, 1)[batch.slots], written)
    row = 0
    for blocks, (start, count) in zip(batch.block_tables.long(), lengths, strict=True):
        keys, values = (numbers[blocks].flatten(0, 1) for numbers in cache)
        for position in range(start, start + count):
            seen = keys[: position + 1], values[: position + 1]
            expected = plain_attention(query[row], *seen, window, softcap, sinks)
            torch.testing.assert_close(got[row], expected, rtol=1e-6, atol=1e-6)  # softmax is in float32
            row += 1
