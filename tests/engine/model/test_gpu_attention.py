"""The Triton backend, in Triton's interpreter, equals the reference backend, and so does the varlen backend, with a
double of the one function of torch that needs a GPU."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.model.attention import FP8, FP8_MAX, Backend, LayerCache, ScaledCache, Scoring
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.attention.select import select_backend
from oaiserve.engine.model.attention.tiles import BatchTiles
from oaiserve.engine.model.spec import KVShape
from oaiserve.engine.start.prepare import prepare
from oaiserve.errors import StartupError
from tests.engine.model.attention_inputs import Inputs, make_inputs
from tests.engine.model.steps import CPU
from tests.models.decoders import FAMILIES, random_model

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.model.attention import triton, varlen

# exp2 of a score far above the softcap is infinity, and the score becomes the softcap, which is right.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:overflow encountered in exp2")]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SCALES = (0.5, 0.0625)
MIXED = ((7, 1), (90, 1), (0, 5), (70, 40))  # (tokens in the cache, tokens of this step) of each sequence
PROMPTS = ((0, 5), (0, 40), (0, 17))  # whole prompts, with nothing in the cache
BACKENDS = [triton.TritonAttention, varlen.VarlenAttention]


def of_heads(inputs: Inputs) -> torch.Tensor:
    """Return a number for each head."""
    return torch.linspace(0.1, 2.0, inputs.query.shape[1])


def expected(inputs: Inputs, scoring: Scoring) -> torch.Tensor:
    """Return the reference's result in float32, for the same inputs. It works on a copy of the cache."""
    query, key, value, cache, batch = inputs
    copies = LayerCache(cache.keys.float().nan_to_num(), cache.values.float().nan_to_num())
    return ReferenceAttention(batch)(query.float(), key.float(), value.float(), copies, scoring)


def attend(inputs: Inputs, scoring: Scoring, backend: Backend = triton.TritonAttention) -> torch.Tensor:
    *tensors, batch = inputs
    return backend(batch)(*tensors, scoring)


def check(inputs: Inputs, backend: Backend = triton.TritonAttention, **scoring: Any) -> None:
    how = Scoring(inputs.query.shape[2] ** -0.5, **scoring)
    want, got = expected(inputs, how), attend(inputs, how, backend)
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


# Tiles depend on the head dim and on the size of a number, so two types of 16 bits share the dims.
DIMS = [
    *((dim, torch.float32) for dim in (16, 64, 80, 96, 128, 256)),
    *((dim, torch.float16) for dim in (16, 80, 128)),
    *((dim, torch.bfloat16) for dim in (64, 96, 256)),
]
# Groups of heads, block sizes.
SIZES = [
    *({"heads": heads, "kv_heads": kv_heads} for heads, kv_heads in ((3, 3), (9, 3), (8, 1), (20, 1))),
    *({"block_size": block_size} for block_size in (1, 5, 16, 128)),
]
HALVES = (torch.float16, torch.bfloat16)
# Backend, tokens of sequences, arguments of `make_inputs` and of `Scoring`.
CASES = [
    *((triton.TritonAttention, MIXED, {"key_dim": dim, "dtype": dtype}, {}) for dim, dtype in DIMS),
    *((backend, MIXED, sizes, {}) for backend in BACKENDS for sizes in SIZES),
    *(
        (triton.TritonAttention, MIXED, {"dtype": torch.bfloat16}, {"sliding_window": window, "softcap": softcap})
        for window, softcap in ((1, None), (30, None), (1000, None), (None, 2.0), (30, 2.0))
    ),
    *(
        (varlen.VarlenAttention, lengths, {"key_dim": 64, "dtype": dtype}, {})
        for lengths in (MIXED, PROMPTS, ((7, 1), *PROMPTS), ((0, 3), (20, 9)))
        for dtype in HALVES
    ),
    *(
        (varlen.VarlenAttention, lengths, {}, {"sliding_window": window})
        for lengths in (MIXED, PROMPTS)
        for window in (1, 3, 30, 1000)
    ),
]


@pytest.mark.parametrize(("backend", "lengths", "sizes", "scoring"), CASES, ids=str)
def test_it_equals_the_reference(
    backend: Backend, lengths: tuple[tuple[int, int], ...], sizes: dict[str, Any], scoring: dict[str, Any]
) -> None:
    check(make_inputs(lengths, **sizes), backend, **scoring)


@pytest.mark.parametrize("lengths", [MIXED, PROMPTS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_are_written_into_the_cache_unchanged(
    backend: Backend, lengths: tuple[tuple[int, int], ...]
) -> None:
    inputs = make_inputs(lengths, key_dim=20, value_dim=12 if backend is triton.TritonAttention else 20)
    before = [blocks.clone() for blocks in inputs.cache]
    attend(inputs, Scoring(1.0), backend)
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
    got = triton.TritonAttention(batch)(query, key, value, caches[1], scoring)
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
    tile = triton.Tile(rows=16, tokens=16, num_warps=4, num_stages=2)
    if batch.num_decodes < len(lengths):
        triton.write(key, value, cache, batch.slots, first_token=batch.num_decodes)
        triton.prefill(query, cache, batch, out, scoring, BatchTiles(batch), tile)
    plan = triton.plan_decodes(batch, window or 0, wanted, 2, least_tokens=16, alignment=16)
    triton.decode(query, key, value, cache, batch, out, scoring, plan, tile)
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
    plan = triton.plan_decodes(batch, 0, wanted, 2, least_tokens=16, alignment=16)
    triton.decode(query, key, value, cache, batch, out, scoring, plan, triton.Tile(16, 16, 4, 2))
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
    plan = triton.plan_decodes(batch, window, wanted, 3, least_tokens=32, alignment=16)
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
    first_items = triton.plan_decodes(batch, 0, 99, 2).first_items.tolist()
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


# -- varlen -----------------------------------------------------------------------------------------------------------


def plain_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute what torch documents for `varlen_attn`: the last query is at the position of the last key."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert query.dtype == key.dtype == value.dtype
    assert {tensor.stride(-1) for tensor in (query, key, value)} == {1}
    assert enable_gqa or not varlen._GROUPED or query.shape[1] == key.shape[1]
    out = torch.full_like(query, torch.nan)
    group = query.shape[1] // key.shape[1]
    left, right = window_size
    bounds_q, bounds_k = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert (bounds_q[0], bounds_q[-1], bounds_k[0], bounds_k[-1]) == (0, query.shape[0], 0, key.shape[0])
    for index in range(len(bounds_q) - 1):
        rows = slice(*bounds_q[index : index + 2])
        keys = slice(*bounds_k[index : index + 2])
        q, k, v = query[rows].float(), key[keys].float(), value[keys].float()
        assert len(q) <= max_q
        assert len(k) <= max_k
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        visible = distance >= -right if right >= 0 else torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            visible &= distance <= left
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
    return out


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen_attn)


def test_the_double_has_the_parameters_of_the_function() -> None:
    from torch.nn.attention.varlen import varlen_attn

    installed = inspect.signature(varlen_attn).parameters
    for name, parameter in inspect.signature(plain_varlen_attn).parameters.items():
        if name != "enable_gqa" or varlen._GROUPED:
            assert (installed[name].kind, installed[name].default) == (parameter.kind, parameter.default)


def test_long_contexts_and_decode_steps_are_computed_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError

    monkeypatch.setattr(varlen, "varlen_attn", fail)
    monkeypatch.setattr(varlen, "MAX_COPIED_TOKENS", 114)
    check(make_inputs(MIXED), varlen.VarlenAttention)  # 5 + 110
    check(make_inputs(((7, 1), (90, 1))), varlen.VarlenAttention)
    monkeypatch.setattr(varlen, "MAX_COPIED_TOKENS", 115)
    with pytest.raises(AssertionError):
        check(make_inputs(MIXED), varlen.VarlenAttention)


def test_the_places_of_keys_are_computed_once_a_step() -> None:
    *tensors, batch = make_inputs(MIXED)
    scoring = Scoring(1.0)
    attention = varlen.VarlenAttention(batch)
    attention(*tensors, scoring)
    packed = attention._packed_keys
    assert packed is not None
    attention(*tensors, scoring)
    assert attention._packed_keys is packed


@pytest.mark.parametrize("name", ["triton", "varlen"])
def test_backends_for_gpus_are_refused_elsewhere(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=rf"^--attention {name} is for NVIDIA GPUs; the model is on cpu\."):
        select_backend(CPU, name)
    monkeypatch.setattr("oaiserve.engine.model.attention.select.find_spec", lambda _: None)
    with pytest.raises(StartupError, match=rf"^--attention {name} needs the package triton\."):
        select_backend(torch.device("cuda"), name)
    assert select_backend(torch.device("cuda")) is ReferenceAttention


def test_name_and_device_decide_which_backend_is_used() -> None:
    cuda = torch.device("cuda")
    assert select_backend(cuda, "varlen") is varlen.VarlenAttention
    assert select_backend(cuda, "triton") is select_backend(cuda, "auto") is triton.TritonAttention
    assert select_backend(cuda, "reference") is select_backend(CPU, "reference") is ReferenceAttention
    assert select_backend(CPU) is ReferenceAttention


@pytest.mark.parametrize(
    ("capability", "dtype", "shape", "family", "message"),
    [
        ((7, 5), torch.float16, KVShape(2, 64, 64), "llama", r"compute capability 8\.0 or higher; a GPU is older"),
        ((9, 0), torch.float32, KVShape(2, 64, 64), "llama", "--dtype float16 or bfloat16, not float32"),
        ((9, 0), torch.bfloat16, KVShape(2, 192, 128), "llama", "this model's have 192 and 128"),
        ((9, 0), torch.bfloat16, KVShape(2, 20, 20), "llama", "a multiple of 8 up to 256; this model's have 20 and 20"),
        ((9, 0), torch.bfloat16, KVShape(2, 64, 64), "gemma2", "attention without softcap"),
        ((9, 0), torch.bfloat16, KVShape(2, 64, 64), "llama", None),
    ],
)
def test_gpus_and_models_that_flash_attention_does_not_support_are_refused(
    capability: tuple[int, int],
    dtype: torch.dtype,
    shape: KVShape,
    family: str,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    loaded = dataclasses.replace(prepare(random_model(FAMILIES[family])), dtype=dtype, kv_shapes={0: shape})
    if message is None:
        varlen.refuse_unless_supported(loaded)
        return
    with pytest.raises(StartupError, match=message):
        varlen.refuse_unless_supported(loaded)
