"""The Triton backend, in Triton's interpreter, equals the reference backend."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.model.attention import FP8, FP8_MAX, LayerCache, ScaledCache, Scoring
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.attention.select import select_backend
from oaiserve.engine.model.attention.tiles import BatchTiles
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Chunk, Step
from tests.engine.model import test_families
from tests.engine.model.runners import eager_runner
from tests.models.decoders import generate, random_model, with_layers

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.model.attention import triton as backend

# exp2 of a score far above the softcap is infinity, and the score becomes the softcap, which is right.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:overflow encountered in exp2")]

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SCALES = (0.5, 0.0625)
MIXED = ((7, 1), (90, 1), (0, 5), (70, 40))  # (tokens in the cache, tokens of this step) of each sequence


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
    cache = LayerCache(
        torch.full((num_blocks, block_size, kv_heads, key_dim), math.nan, dtype=dtype),
        torch.full((num_blocks, block_size, kv_heads, value_dim), math.nan, dtype=dtype),
    )
    step = Step()
    for start, count in lengths:
        sequence = Sequence("r", 0, [0] * (start + count), SamplingParams(), max_len=9999)
        sequence.blocks = [free.pop() for _ in range(-(-(start + count) // block_size))]
        step.chunks.append(Chunk(sequence, start, count))
        for position in range(start):
            place = sequence.blocks[position // block_size], position % block_size
            cache.keys[place], cache.values[place] = randn(kv_heads, key_dim), randn(kv_heads, value_dim)
    num_tokens = sum(count for _, count in lengths)
    # Heads come first in memory, as in transformers.
    query, key = randn(heads, num_tokens, key_dim).transpose(0, 1), randn(kv_heads, num_tokens, key_dim).transpose(0, 1)
    return Inputs(query, key, randn(num_tokens, kv_heads, value_dim), cache, build_batch(step, block_size, CPU))


def of_heads(inputs: Inputs) -> torch.Tensor:
    """Return a number for each head."""
    return torch.linspace(0.1, 2.0, inputs.query.shape[1])


def expected(inputs: Inputs, scoring: Scoring) -> torch.Tensor:
    """Return the reference's result in float32, for the same inputs. It works on a copy of the cache."""
    query, key, value, cache, batch = inputs
    copies = LayerCache(cache.keys.float().nan_to_num(), cache.values.float().nan_to_num())
    return ReferenceAttention(batch)(query.float(), key.float(), value.float(), copies, scoring)


def attend(inputs: Inputs, scoring: Scoring) -> torch.Tensor:
    *tensors, batch = inputs
    return backend.TritonAttention(batch)(*tensors, scoring)


def check(
    inputs: Inputs,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> None:
    scoring = Scoring(inputs.query.shape[2] ** -0.5, window, softcap, sinks, slopes)
    want, got = expected(inputs, scoring), attend(inputs, scoring)
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


# Tiles depend on the head dim and on the size of a number, so two types of 16 bits share the dims.
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        *((dim, torch.float32) for dim in (16, 64, 80, 96, 128, 256)),
        *((dim, torch.float16) for dim in (16, 80, 128)),
        *((dim, torch.bfloat16) for dim in (64, 96, 256)),
    ],
    ids=str,
)
def test_it_equals_the_reference_for_any_head_dim_and_dtype(dim: int, dtype: torch.dtype) -> None:
    check(make_inputs(MIXED, key_dim=dim, dtype=dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (9, 3), (8, 1), (20, 1)])
def test_it_equals_the_reference_for_any_group_of_heads(heads: int, kv_heads: int) -> None:
    check(make_inputs(MIXED, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
def test_it_equals_the_reference_for_any_block_size(block_size: int) -> None:
    check(make_inputs(MIXED, block_size=block_size))


def test_keys_and_values_may_have_different_dims() -> None:
    check(make_inputs(MIXED, key_dim=24, value_dim=40))


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (30, None), (1000, None), (None, 2.0), (30, 2.0)])
def test_it_equals_the_reference_with_windows_and_softcap(window: int | None, softcap: float | None) -> None:
    check(make_inputs(MIXED, dtype=torch.bfloat16), window=window, softcap=softcap)


@pytest.mark.parametrize("heads", [2, 6])
def test_it_equals_the_reference_with_sinks_or_slopes(heads: int) -> None:
    inputs = make_inputs(MIXED, heads=heads)
    check(inputs, window=30, sinks=3 * of_heads(inputs))
    check(inputs, slopes=of_heads(inputs))


def test_keys_and_values_are_written_into_the_cache_unchanged() -> None:
    inputs = make_inputs(MIXED, key_dim=20, value_dim=12)
    before = LayerCache(inputs.cache.keys.clone(), inputs.cache.values.clone())
    attend(inputs, Scoring(1.0))
    for cache, old, new in zip(inputs.cache, before, (inputs.key, inputs.value), strict=True):
        old.flatten(0, 1)[inputs.batch.slots] = new
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.float32), (30, torch.bfloat16)])
def test_a_cache_in_eight_bits_has_the_numbers_of_the_reference(window: int | None, dtype: torch.dtype) -> None:
    """Prompts and decodes, of which one is cut into items."""
    inputs = make_inputs(((300, 1), *MIXED), dtype=dtype)
    content = LayerCache(
        *(blocks.float().nan_to_num().div(scale).to(FP8) for blocks, scale in zip(inputs.cache, SCALES, strict=True))
    )
    caches = [ScaledCache.of(content.copy(), SCALES) for _ in range(2)]
    scoring = Scoring(0.25, window)
    query, key, value, _, batch = inputs
    value[3] = 1e4  # which the cache cannot hold
    want = ReferenceAttention(batch)(query.float(), key.float(), value.float(), caches[0], scoring)
    got = backend.TritonAttention(batch)(query, key, value, caches[1], scoring)
    torch.testing.assert_close(got.float(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 10)
    for one, other in zip(*caches, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0)
    assert float(caches[1].values.float().max()) == FP8_MAX


# Tiles are small, so that a few tokens make many tiles.
@settings(max_examples=8)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 24)), min_size=1, max_size=3),
    group=st.integers(1, 5),
    block_size=st.sampled_from([4, 7, 16]),
    window=st.sampled_from([None, 1, 3, 17, 100]),
    softcap=st.sampled_from([None, 2.0]),
    numbers=st.sampled_from([None, "sinks", "slopes"]),
    wanted=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_it_equals_the_reference_for_any_mix_of_prefill_and_decode(
    lengths: list[tuple[int, int]],
    group: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    numbers: str | None,
    wanted: int,
    seed: int,
) -> None:
    lengths = sorted([*lengths, (40, 1)], key=lambda pair: pair[1] != 1)  # chunks of one token come first
    inputs = make_inputs(tuple(lengths), heads=2 * group, block_size=block_size, key_dim=8, value_dim=5, seed=seed)
    query, key, value, cache, batch = inputs
    scoring = Scoring(0.3, window, softcap)
    if numbers is not None:
        scoring = scoring._replace(**{numbers: of_heads(inputs)})
    want = expected(inputs, scoring)
    out = torch.full_like(want, math.nan)
    tile = backend.Tile(rows=16, tokens=16, num_warps=4, num_stages=2)
    if batch.num_decodes < len(lengths):
        backend.write(key, value, cache, batch.slots, first_token=batch.num_decodes)
        backend.prefill(query, cache, batch, out, scoring, BatchTiles(batch), tile)
    plan = backend.plan_decodes(batch, window or 0, wanted, 2, least_tokens=16, alignment=16)
    backend.decode(query, key, value, cache, batch, out, scoring, plan, tile)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("wanted", [1, 3])
def test_padded_rows_of_a_captured_batch_write_nothing_and_get_zeros(wanted: int, has_sinks: bool) -> None:
    inputs = make_inputs(((50, 1), (20, 1)))
    scoring = Scoring(0.25, sinks=of_heads(inputs) if has_sinks else None)
    want = expected(inputs, scoring)
    query, key, value, cache, batch = inputs
    batch.seq_lens[1], batch.slots[1] = 0, -1
    untouched = cache.keys[batch.block_tables[1]].clone()
    out = torch.full_like(want, math.nan)
    plan = backend.plan_decodes(batch, 0, wanted, 2, least_tokens=16, alignment=16)
    backend.decode(query, key, value, cache, batch, out, scoring, plan, backend.Tile(16, 16, 4, 2))
    torch.testing.assert_close(out[0], want[0], rtol=1e-5, atol=1e-5)
    assert out[1].tolist() == torch.zeros_like(out[1]).tolist()
    torch.testing.assert_close(cache.keys[batch.block_tables[1]], untouched, rtol=0, atol=0, equal_nan=True)


@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=9),
    window=st.sampled_from([0, 1, 100, 1000]),
    wanted=st.integers(1, 40),
)
@settings(max_examples=25)
def test_a_plan_covers_each_token_once_in_few_items_of_about_the_same_size(
    lengths: list[int], window: int, wanted: int
) -> None:
    batch = make_inputs(((0, 1),) * len(lengths)).batch
    batch.seq_lens = torch.tensor(lengths)
    plan = backend.plan_decodes(batch, window, wanted, 3, least_tokens=32, alignment=16)
    first_items = plan.first_items.tolist()
    items = plan.items.tolist()[: first_items[-1]]
    assert len(items) <= len(plan.items) == len(lengths) + wanted
    seen = [min(length, window or length) for length in lengths]
    largest = max(32, -(-sum(seen) // wanted)) + 16
    for row, length in enumerate(lengths):
        own = items[first_items[row] : first_items[row + 1]]
        assert {(item[0], item[3]) for item in own} == {(row, len(own))}
        begins, ends = [item[1] for item in own], [item[2] for item in own]
        assert begins == [length - seen[row], *ends[:-1]]
        assert ends[-1] == length
        assert all(begin < end <= begin + largest for begin, end in zip(begins, ends, strict=True)) or not seen[row]


def test_a_long_sequence_among_short_ones_is_read_by_many_programs() -> None:
    batch = make_inputs(((0, 1),) * 64).batch
    batch.seq_lens = torch.tensor([131_072] + [300] * 63)
    first_items = backend.plan_decodes(batch, 0, 99, 2).first_items.tolist()
    assert first_items[1] > 80
    assert first_items[-1] - first_items[1] == 63  # none of the short ones is cut


def test_tiles_that_see_the_most_keys_come_first() -> None:
    batch = make_inputs(((9, 1), (0, 5), (100, 3))).batch
    assert BatchTiles(batch).of(2).tolist() == [
        [2, 8, 1, 102],
        [2, 6, 2, 100],
        [1, 5, 1, 4],
        [1, 3, 2, 2],
        [1, 1, 2, 0],
    ]


def test_answers_equal_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_families, "eager_runner", partial(eager_runner, backend=backend.TritonAttention))
    model = random_model(with_layers("gemma2", 2))  # grouped heads, a layer with a window and one without, softcap
    expected = generate(model, test_families.PROMPTS, test_families.NUM_TOKENS)
    assert test_families.run_all(prepare(model), num_blocks=64, max_step_tokens=40) == (expected, 0)


def test_the_device_decides_which_backend_is_used() -> None:
    assert select_backend(CPU) is ReferenceAttention
    assert select_backend(torch.device("cuda")) is backend.TritonAttention
