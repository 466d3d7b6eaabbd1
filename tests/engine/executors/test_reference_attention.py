"""The reference's attention equals a softmax over all keys, and its memory does not grow with the context."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oaiserve.engine.decoder.description import AttentionParameters
from oaiserve.engine.executors.reference import attention
from oaiserve.engine.executors.reference.attention import PagedAttention
from oaiserve.engine.model.attention import FP8, LayerCache, ScaledCache
from oaiserve.engine.model.batch import Batch
from tests.engine.model.attention_inputs import make_inputs

BLOCK_SIZE = 4
HEADS = 6
KV_HEADS = 2
KEY_DIM = 8
VALUE_DIM = 5


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return the attention [Q, heads, value_dim] of one sequence, whose queries see the keys [Q, L] in `visible`."""
    keys, values = (numbers.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for numbers in (keys, values))
    scores = torch.einsum("qhd,lhd->hql", query.double(), keys) * KEY_DIM**-0.5
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    weights = scores.exp().masked_fill(~visible, 0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return torch.einsum("hql,lhd->qhd", weights / total, values)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9) | st.just(1)), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 3, 10, 100]),
    chunk=st.sampled_from([None, None, 1, 6, 16, 100]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    looks_ahead=st.booleans(),
    has_media=st.booleans(),
    is_in_eight_bits=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_equals_softmax_over_all_keys_for_any_mix_of_prefill_and_decode(
    lengths: list[tuple[int, int]],
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    has_sinks: bool,
    looks_ahead: bool,
    has_media: bool,
    is_in_eight_bits: bool,
    seed: int,
) -> None:
    lengths.sort(key=lambda pair: pair[1] != 1)  # chunks of one token come first
    sizes = {"kv_heads": KV_HEADS, "key_dim": KEY_DIM, "value_dim": VALUE_DIM, "block_size": BLOCK_SIZE}
    query, key, value, cache, batch = make_inputs(tuple(lengths), heads=HEADS, **sizes, seed=seed)
    if has_media:  # each prompt is one image
        ends = [start + count - 1 for start, count in lengths for _ in range(count)]
        batch.last_visible = torch.tensor(ends)
    if is_in_eight_bits:
        cache = ScaledCache.of(LayerCache(*(blocks.to(FP8) for blocks in cache)), (0.5, 2.0))
    sinks = torch.linspace(0.1, 2.0, HEADS) if has_sinks else None
    parameters = AttentionParameters(KEY_DIM**-0.5, window, softcap, looks_ahead, chunk)
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("PIECE_TOKENS", 16), ("TILE_QUERIES", 4), ("GROUP_DECODES", 2)):
            patch.setattr(attention, name, size)
        paged = PagedAttention(batch)
        for blocks, new, scale in zip(cache, (key, value), cache.scales, strict=True):
            paged.write(blocks, new, scale)
        found = paged.attend(query, cache, parameters, sinks)
    first = 0
    for blocks, (start, count) in zip(batch.block_tables, lengths, strict=True):
        end = start + count
        keys, values = (
            numbers[blocks].flatten(0, 1)[:end].float() * scale
            for numbers, scale in zip(cache, cache.scales, strict=True)
        )
        rows = slice(first, first + count)
        own = torch.arange(start, end)[:, None]
        places = torch.arange(end)
        last = batch.last_visible[rows, None] if looks_ahead and batch.last_visible is not None else own
        visible = (places <= last) & (own - places < (window or math.inf))
        if chunk is not None:
            visible &= own // chunk == places // chunk
        expected = plain_attention(query[rows], keys, values, visible, softcap, sinks)
        torch.testing.assert_close(found[rows].double(), expected, rtol=1e-4, atol=1e-5)
        first += count


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation makes. Views, and operations in place, make none."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        results = out if isinstance(out, tuple | list) else [out]
        for result, returned in zip(results, func._schema.returns, strict=False):
            if isinstance(result, Tensor) and returned.alias_info is None:
                self.num_bytes = max(self.num_bytes, result.nbytes)
        return out


class Sizes(NamedTuple):
    """The sizes of a model's attention."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


LLAMA_3_1_8B = Sizes(32, 8, 128, 128)
LATENT_OF_DEEPSEEK = Sizes(128, 1, 576, 512)


def largest_bytes(
    context: int, sizes: Sizes, *, num_decodes: int = 0, prompt: int = 0, window: int | None = None
) -> int:
    """Return the bytes of the largest tensor that attention makes, computed without numbers."""
    lens = [1] * num_decodes + ([prompt] if prompt else [])
    num_blocks = context // 16
    with torch.device("meta"):
        batch = Batch(
            *(torch.empty(sum(lens), dtype=torch.int64) for _ in range(3)),
            block_tables=torch.empty(len(lens), num_blocks, dtype=torch.int64),
            table_rows=torch.empty(len(lens), dtype=torch.int64),
            query_start=torch.empty(len(lens) + 1, dtype=torch.int64),
            seq_lens=torch.empty(len(lens), dtype=torch.int64),
            logits_rows=torch.empty(1, dtype=torch.int64),
            num_decodes=num_decodes,
            query_lens=lens,
            context_lens=[context] * len(lens),
        )
        keys = torch.empty(num_blocks, 16, sizes.kv_heads, sizes.key_dim, dtype=torch.bfloat16)
        # Latent vectors are the first numbers of keys.
        values = keys[..., : sizes.value_dim] if sizes.kv_heads == 1 else torch.empty_like(keys)
        query = torch.empty(sum(lens), sizes.heads, sizes.key_dim)
        new = torch.empty(sum(lens), sizes.kv_heads, sizes.key_dim)
        with LargestTensor() as largest:
            paged = PagedAttention(batch)
            paged.write(keys, new)
            out = paged.attend(query, LayerCache(keys, values), AttentionParameters(0.1, window, None), None)
    assert out.shape == (sum(lens), sizes.heads, sizes.value_dim)
    return largest.num_bytes


@pytest.mark.parametrize(
    ("sizes", "step"),
    [
        (LLAMA_3_1_8B, {"prompt": 512}),
        (LLAMA_3_1_8B, {"num_decodes": 5}),
        (LLAMA_3_1_8B, {"num_decodes": 3, "prompt": 200, "window": 4096}),
        (LATENT_OF_DEEPSEEK, {"num_decodes": 3, "prompt": 100}),
    ],
)
def test_no_tensor_of_attention_grows_with_the_context(sizes: Sizes, step: dict[str, Any]) -> None:
    long = largest_bytes(131_072, sizes, **step)
    assert long <= 64 << 20
    assert long == largest_bytes(32_768, sizes, **step)
    whole = 131_072 * sizes.kv_heads * sizes.key_dim * 2  # the keys of one sequence
    assert 2 * long < whole, "the measurement must be able to see a gathered context"
