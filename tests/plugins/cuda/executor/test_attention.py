"""The Triton backend, in Triton's interpreter, equals the reference backend."""

import math
from collections import Counter
from functools import partial
from itertools import accumulate, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.model.attention import FP8, FP8_MAX, LayerCache, Rotation, ScaledCache, Scoring
from oaiserve.engine.model.batch import Batch
from oaiserve.plugins.cuda.executor.kernels import PlainAttention
from tests.engine.model.attention_inputs import Inputs, make_inputs

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.executor import triton_attention as attention

# exp2 of a score far above the softcap is infinity, and the score becomes the softcap, which is right.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:overflow encountered in exp2")]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SCALES = (0.5, 0.0625)
MIXED = ((7, 1), (90, 1), (0, 5), (70, 40))  # (tokens in the cache, tokens of this step) of each sequence
PROMPTS = ((0, 5), (0, 40), (0, 17))  # whole prompts, with nothing in the cache


def of_heads(inputs: Inputs) -> torch.Tensor:
    """Return a number for each head."""
    return torch.linspace(0.1, 2.0, inputs.query.shape[1])


def copied(cache: LayerCache) -> LayerCache:
    return LayerCache(cache.keys.clone(), cache.values.clone())


def expected(inputs: Inputs, scoring: Scoring) -> torch.Tensor:
    """Return the reference's result in float32, for the same inputs. It works on a copy of the cache."""
    query, key, value, cache, batch = inputs
    copies = LayerCache(cache.keys.float().nan_to_num(), cache.values.float().nan_to_num())
    return PlainAttention(batch)(query.float(), key.float(), value.float(), copies, scoring)


def attend(inputs: Inputs, scoring: Scoring) -> torch.Tensor:
    *tensors, batch = inputs
    return attention.TritonAttention(batch)(*tensors, scoring)


def plan_of_decodes(batch: Batch, window: int, wanted: int, kv_heads: int, least_tokens: int) -> attention.Plan:
    cut = partial(attention.new_plan, least_tokens=least_tokens, alignment=16, of_decodes=True)
    return cut(batch, window, wanted, kv_heads, tile_tokens=1)


def check(inputs: Inputs, **scoring: Any) -> None:
    how = Scoring(inputs.query.shape[2] ** -0.5, **scoring)
    want = expected(inputs, how)
    got = attend(inputs, how)
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


# Tiles depend on the head dim and on the size of a number, so two types of 16 bits share the dims.
DIMS = [
    *((dim, torch.float32) for dim in (16, 64, 80, 96, 128, 256)),
    *((dim, torch.float16) for dim in (16, 80, 112, 128)),
    *((dim, torch.bfloat16) for dim in (64, 96, 256, 512)),
]
# Cards of which a multiprocessor has less shared memory than Hopper's: A100, and Ada and Blackwell for desktops.
AMPERE = attention.Card(163 << 10, 164 << 10, is_hopper=False)
ADA = attention.Card(99 << 10, 100 << 10, is_hopper=False)
# Groups of heads, block sizes.
SIZES = [
    *({"heads": heads, "kv_heads": kv_heads} for heads, kv_heads in ((3, 3), (9, 3), (8, 1), (20, 1))),
    *({"block_size": block_size} for block_size in (1, 5, 16, 128)),
]
# Tokens of sequences are MIXED; arguments of `make_inputs` and of `Scoring`.
CASES = [
    *(({"key_dim": dim, "dtype": dtype}, {}) for dim, dtype in DIMS),
    *((sizes, {}) for sizes in SIZES),
    *(
        ({"dtype": torch.bfloat16}, {"sliding_window": window, "softcap": softcap})
        for window, softcap in ((1, None), (30, None), (1000, None), (None, 2.0), (30, 2.0))
    ),
]


@pytest.mark.parametrize(("sizes", "scoring"), CASES, ids=str)
def test_it_equals_the_reference(sizes: dict[str, Any], scoring: dict[str, Any]) -> None:
    check(make_inputs(MIXED, **sizes), **scoring)


@pytest.mark.parametrize(("dim", "dtype"), [(512, torch.float32), (512, torch.bfloat16), (256, torch.bfloat16)])
def test_tiles_of_cards_with_little_memory_have_the_same_results(
    dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "card_of", lambda device: ADA)
    check(make_inputs(MIXED, key_dim=dim, dtype=dtype, heads=8, kv_heads=1))


@pytest.mark.parametrize("card", [AMPERE, attention.HOPPER, ADA], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (128, 128), (192, 128), (256, 256), (512, 512)], ids=str)
def test_tiles_fit_into_each_card(dims: tuple[int, int], card: attention.Card) -> None:
    """The most that a layer has for it: 16 query heads of 512 numbers for a key head, and 128 of 128."""
    tile_dims = attention.tile_dims(*dims)
    groups = (1, 4, 8, 16) if tile_dims.key == 512 else (1, 4, 8, 16, 71, 128)
    for group in groups:
        for itemsize in (2, 4) if group <= 16 else (2,):
            tiles = [attention.decode_tile(group, tile_dims, itemsize, cache, card) for cache in {itemsize, 1}]
            for longest in (1, 2048):
                tiles.append(attention.prefill_tile(group, tile_dims, itemsize, itemsize, longest, card))
            for tile in tiles:
                assert tile.rows >= group
                assert attention.shared_bytes(tile, tile_dims, itemsize, card) <= card.shared_bytes, tile


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_decodes_are_cut_for_two_programs_on_each_multiprocessor_at_least(dim: int) -> None:
    dims = attention.tile_dims(dim, dim)
    assert [attention.programs_per_sm(8, dims, 2, 2, card) for card in (attention.HOPPER, AMPERE, ADA)] == {
        64: [3, 2, 3],
        128: [3, 2, 2],
        256: [3, 2, 2],
        512: [2, 2, 2],
    }[dim]


def test_a_cache_in_eight_bits_is_loaded_one_tile_further_ahead_in_the_same_memory() -> None:
    dims = attention.tile_dims(128, 128)
    tiles = [attention.decode_tile(4, dims, 2, cache, attention.HOPPER) for cache in (2, 1)]
    assert [tile.num_stages for tile in tiles] == [2, 3]
    in_16_bits, in_8_bits = (
        attention.shared_bytes(tile, dims, 2, attention.HOPPER, cache)
        for tile, cache in zip(tiles, (2, 1), strict=True)
    )
    assert in_8_bits <= in_16_bits
    assert attention.programs_per_sm(4, dims, 2, 1, attention.HOPPER) == 3


@pytest.mark.parametrize("lengths", [MIXED, PROMPTS])
def test_keys_and_values_are_written_into_the_cache_unchanged(lengths: tuple[tuple[int, int], ...]) -> None:
    inputs = make_inputs(lengths, key_dim=20, value_dim=12)
    before = [blocks.clone() for blocks in inputs.cache]
    attend(inputs, Scoring(1.0))
    for cache, old, new in zip(inputs.cache, before, (inputs.key, inputs.value), strict=True):
        old.flatten(0, 1)[inputs.batch.slots] = new
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


def turned(heads: torch.Tensor, rotation: Rotation, norm: torch.Tensor | None) -> torch.Tensor:
    """Return heads [T, heads, dim] in float32, normed and rotated as `Rotation` says."""
    heads = heads.float()
    if norm is not None:
        heads = heads * (heads.square().mean(-1, keepdim=True) + rotation.epsilon).rsqrt() * norm
    if rotation.cosines is None or rotation.sines is None:
        return heads
    pairs = torch.arange(rotation.rotary_dim // 2)
    first = 2 * pairs if rotation.apart == 1 else pairs
    second = first + rotation.apart
    cosines, sines = (table[rotation.positions][:, None] for table in (rotation.cosines, rotation.sines))
    result = heads.clone()
    result[..., first] = heads[..., first] * cosines - heads[..., second] * sines
    result[..., second] = heads[..., second] * cosines + heads[..., first] * sines
    return result


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotary_dim", "apart"), [(16, 16, 8), (20, 8, 4), (20, 8, 10), (20, 20, 1), (24, 8, 1), (12, 0, 0)]
)
def test_keys_and_queries_are_normed_and_rotated_and_a_token_without_a_slot_is_left(
    dim: int, rotary_dim: int, apart: int, has_norms: bool
) -> None:
    query, key, value, cache, batch = make_inputs(((3, 1), (20, 37)), key_dim=dim, value_dim=10, heads=6)
    angles = torch.linspace(0.0, 40.0, 64 * rotary_dim // 2).view(64, -1)
    tables = (angles.cos(), angles.sin()) if rotary_dim else (None, None)
    norms = (torch.linspace(0.5, 2.0, dim), torch.linspace(2.0, 0.5, dim)) if has_norms else (None, None)
    rotation = Rotation(batch.positions, *tables, apart, *norms, epsilon=1e-6)
    without_slot = 5
    batch.slots[without_slot] = -1
    want = query.clone()
    want[1:] = turned(query, rotation, norms[0])[1:]
    want[without_slot] = query[without_slot]
    written = [row for row in range(1, len(key)) if row != without_slot]
    expected_cache = copied(cache)
    expected_cache.keys.flatten(0, 1)[batch.slots[written]] = turned(key, rotation, norms[1])[written]
    expected_cache.values.flatten(0, 1)[batch.slots[written]] = value[written]
    query = query.contiguous()
    attention.write(key, value, cache, batch.slots, first_token=1, query=query, rotation=rotation)
    torch.testing.assert_close(query, want, rtol=1e-5, atol=1e-5)
    for blocks, wanted in zip(cache, expected_cache, strict=True):
        torch.testing.assert_close(blocks, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_layer_without_keys_of_its_own_reads_those_of_an_earlier_one() -> None:
    query, key, value, cache, batch = make_inputs(MIXED)
    want = attention.TritonAttention(batch)(query, key, value, cache, Scoring(0.25))
    before = copied(cache)
    torch.testing.assert_close(attention.TritonAttention(batch)(query, None, None, cache, Scoring(0.25)), want)
    for blocks, old in zip(cache, before, strict=True):
        torch.testing.assert_close(blocks, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.float32), (30, torch.bfloat16)])
def test_a_cache_in_eight_bits_has_the_numbers_of_the_reference(window: int | None, dtype: torch.dtype) -> None:
    """Prompts and decodes, of which one is cut into items."""
    inputs = make_inputs(((300, 1), *MIXED), dtype=dtype)
    content = LayerCache(
        *(blocks.float().nan_to_num().div(scale).to(FP8) for blocks, scale in zip(inputs.cache, SCALES, strict=True))
    )
    caches = [ScaledCache.of(copied(content), SCALES) for _ in range(2)]
    scoring = Scoring(0.25, window)
    query, key, value, _, batch = inputs
    value[3] = 1e4  # too large for the cache's eight bits
    want = PlainAttention(batch)(query.float(), key.float(), value.float(), caches[0], scoring)
    got = attention.TritonAttention(batch)(query, key, value, caches[1], scoring)
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
    has_sinks=st.booleans(),
    wanted=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_it_equals_the_reference_for_any_mix_of_prefill_and_decode(
    lengths: list[tuple[int, int]],
    group: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    wanted: int,
    seed: int,
) -> None:
    lengths = sorted([*lengths, (40, 1)], key=lambda pair: pair[1] != 1)  # chunks of one token come first
    inputs = make_inputs(tuple(lengths), heads=2 * group, block_size=block_size, key_dim=8, value_dim=5, seed=seed)
    query, key, value, cache, batch = inputs
    scoring = Scoring(0.3, window, softcap, of_heads(inputs) if has_sinks else None)
    want = expected(inputs, scoring)
    out = torch.full_like(want, math.nan)
    tile = attention.Tile(rows=16, tokens=16, num_warps=4, num_stages=2)
    if batch.num_decodes < len(lengths):
        attention.write(key, value, cache, batch.slots, first_token=batch.num_decodes)
        cut = partial(attention.new_plan, least_tokens=16, alignment=16)
        plan_of = lambda window, kv_heads, tokens: cut(batch, window, wanted, kv_heads, tokens)  # noqa: E731
        attention.prefill(query, cache, batch, out, scoring, tile, plan_of=plan_of)
    plan = plan_of_decodes(batch, window or 0, wanted, 2, least_tokens=16)
    attention.decode(query, key, value, cache, batch, out, scoring, plan, tile)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("wanted", [1, 3])
def test_padded_rows_of_a_captured_batch_write_nothing_and_get_zeros(wanted: int, has_sinks: bool) -> None:
    inputs = make_inputs(((50, 1), (20, 1)))
    scoring = Scoring(0.25, sinks=of_heads(inputs) if has_sinks else None)
    want = expected(inputs, scoring)
    query, key, value, cache, batch = inputs
    batch.seq_lens[1] = 0
    batch.slots[1] = -1
    untouched = cache.keys[batch.block_tables[1]].clone()
    out = torch.full_like(want, math.nan)
    plan = plan_of_decodes(batch, 0, wanted, 2, least_tokens=16)
    attention.decode(query, key, value, cache, batch, out, scoring, plan, attention.Tile(16, 16, 4, 2))
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
    plan = plan_of_decodes(batch, window, wanted, 3, least_tokens=32)
    items = plan.items[: int(plan.num_items)].tolist()
    assert len(items) <= len(plan.items) == len(lengths) + wanted
    found = iter(items)
    seen = [min(length, window or length) for length in lengths]
    largest = max(32, -(-sum(seen) // wanted)) + 16
    for row, tokens in enumerate(seen):
        first = next(found)
        parts = first[3]
        others = [*islice(found, parts - 1)]
        assert [first, *others] == [[row, 0, part, parts, first[4] + part] for part in range(parts)]
        share = -(-tokens // parts // 16) * 16
        assert share <= largest
        assert (parts - 1) * share < max(tokens, 1)  # The last part has tokens, too.
    assert next(found, None) is None
    assert sum(item[3] > 1 for item in items) <= plan.num_places


def test_a_long_sequence_among_short_ones_is_read_by_many_programs() -> None:
    batch = make_inputs(((0, 1),) * 64).batch
    batch.seq_lens = torch.tensor([131_072] + [300] * 63)
    plan = attention.new_plan(batch, 0, 99, 2, 1, of_decodes=True)
    sequences = Counter(plan.items[: int(plan.num_items), 0].tolist())
    assert sequences[0] > 80
    assert set(sequences.values()) == {sequences[0], 1}  # None of the short ones is cut.
    assert len(sequences) == 64


@given(
    lengths=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 40)), min_size=1, max_size=9),
    num_decodes=st.integers(0, 3),
    window=st.sampled_from([0, 1, 100]),
    wanted=st.integers(1, 40),
)
@settings(max_examples=25)
def test_a_plan_of_prompts_has_each_tile_in_equal_parts(
    lengths: list[tuple[int, int]], num_decodes: int, window: int, wanted: int
) -> None:
    """Also next to sequences without tokens, as those of padding."""
    num_tokens = sum(count for _, count in lengths)
    batch = make_inputs(((0, 1),) * (num_decodes + len(lengths))).batch
    batch.num_decodes = num_decodes
    batch.input_ids = torch.zeros(num_decodes + num_tokens)
    starts = [*range(num_decodes), *accumulate((count for _, count in lengths), initial=num_decodes)]
    batch.query_start = torch.tensor(starts)
    batch.seq_lens = torch.tensor([7] * num_decodes + [start + count for start, count in lengths])
    plan = attention.new_plan(batch, window, wanted, 3, 8, least_tokens=32, alignment=16)
    num_items = int(plan.num_items)
    items = plan.items[:num_items].tolist()
    assert plan.num_done[:num_items].count_nonzero() == 0
    assert num_items <= len(plan.items)
    found = iter(items)
    for sequence, (_, count) in enumerate(lengths):
        parts = 0
        for tile in range(-(-count // 8)):
            first = next(found)
            parts = parts or first[3]
            assert parts <= wanted
            assert [first, *islice(found, parts - 1)] == [
                [sequence, tile, part, parts, first[4] + part] for part in range(parts)
            ]
    assert next(found, None) is None
    places = [item[4] for item in items if item[3] > 1]
    assert places == [*range(len(places))]
    assert len(places) <= plan.num_places


def test_few_tokens_after_a_long_context_are_read_by_many_programs() -> None:
    batch = make_inputs(((0, 64),)).batch
    batch.seq_lens[0] = 30_064
    plan = attention.new_plan(batch, 0, 16, 8, 32)
    assert plan.items[: int(plan.num_items)].tolist() == [[0, n // 8, n % 8, 8, n] for n in range(16)]
    batch.seq_lens[0] = 64
    assert int(attention.new_plan(batch, 0, 16, 8, 32).num_items) == 2
