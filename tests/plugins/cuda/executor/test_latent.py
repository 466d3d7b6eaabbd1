"""Attention to latent vectors by Triton's kernels, in its interpreter, equals the reference."""

from functools import partial
from typing import Any

import pytest
import torch

from oaiserve.engine.decoder.description import RotaryTable
from oaiserve.engine.model.attention import Scoring
from oaiserve.plugins.cuda.executor.kernels import PlainLatentAttention
from tests.engine.model.attention_inputs import make_inputs

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.executor import triton_attention
from oaiserve.plugins.cuda.executor.triton_latent import TritonLatentAttention

pytestmark = pytest.mark.kernels

MIXED = ((7, 1), (90, 1), (0, 5), (70, 40))  # (tokens in the cache, tokens of this step) of each sequence
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def attended(backend: Any, inputs: Any, rank: int, rotary: Any, **scoring: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention to latent vectors, which are the keys of the inputs, and the cache after it."""
    query, key, _, cache, batch = inputs
    width = query.shape[2] - rank
    keys = cache.keys.clone()
    attention = backend(batch)
    of_heads = query[..., rank - 7 :].contiguous()  # with seven numbers of their own
    absorbed = attention.write(of_heads, key[:, 0, :rank], key[:, 0, rank:], keys, rotary, angles_of(batch))
    turned = absorbed[..., rank:].clone()
    absorbed[..., :rank] = query[..., :rank]
    out = attention.attend(absorbed, keys, rank, Scoring(query.shape[2] ** -0.5, **scoring))
    assert turned.shape[2] == width
    return torch.cat([out, turned], dim=-1), keys


def angles_of(batch: Any) -> Any:
    return lambda rotary: (batch.positions, rotary.cosines, rotary.sines)


def rotary_of(width: int, kind: str) -> RotaryTable | None:
    if kind == "none":
        return None
    angles = torch.outer(torch.arange(200.0), torch.logspace(0, -2, width // 2))
    return RotaryTable(angles.cos(), angles.sin(), kind == "neighbours", width // 2)


def check(inputs: Any, rank: int, kind: str = "halves", **scoring: Any) -> None:
    rotary = rotary_of(inputs.query.shape[2] - rank, kind)
    want, want_keys = attended(PlainLatentAttention, inputs, rank, rotary, **scoring)
    got, keys = attended(TritonLatentAttention, inputs, rank, rotary, **scoring)
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(keys, want_keys, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture(params=[False, True], ids=["whole", "cut"])
def are_cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the keys of a tile are cut into parts."""
    if request.param:
        cut = partial(triton_attention.new_plan, least_tokens=16, alignment=32)
        monkeypatch.setattr(triton_attention, "new_plan", cut)
        monkeypatch.setattr(triton_attention, "num_items", lambda kv_heads, programs, device: 9)
    return bool(request.param)


@pytest.mark.parametrize(
    ("heads", "rank", "shared", "dtype"),
    [
        (3, 32, 16, torch.float32),
        (20, 48, 16, torch.float32),
        (40, 32, 16, torch.bfloat16),
        (16, 512, 64, torch.bfloat16),
    ],
    ids=str,
)
def test_it_equals_the_reference(heads: int, rank: int, shared: int, dtype: torch.dtype, are_cut: bool) -> None:
    inputs = make_inputs(MIXED, heads=heads, kv_heads=1, key_dim=rank + shared, value_dim=rank, dtype=dtype)
    check(inputs, rank)


@pytest.mark.parametrize("kind", ["none", "neighbours"])
def test_shared_numbers_are_rotated_as_in_the_reference(kind: str) -> None:
    check(make_inputs(((7, 1), (0, 5)), heads=3, kv_heads=1, key_dim=48, value_dim=32), 32, kind)


@pytest.mark.parametrize("window", [1, 30, 1000])
def test_a_sliding_window_hides_earlier_tokens(window: int, are_cut: bool) -> None:
    check(make_inputs(MIXED, heads=4, kv_heads=1, key_dim=48, value_dim=32), 32, sliding_window=window)


def test_padded_rows_of_a_captured_batch_write_nothing_and_get_zeros() -> None:
    inputs = make_inputs(((50, 1), (20, 1)), heads=4, kv_heads=1, key_dim=48, value_dim=32)
    want, _ = attended(PlainLatentAttention, inputs, 32, None)
    batch = inputs.batch
    batch.seq_lens[1] = 0
    batch.slots[1] = -1
    got, keys = attended(TritonLatentAttention, inputs, 32, None)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert got[1, :, :32].count_nonzero() == 0
    own = batch.block_tables[1]
    torch.testing.assert_close(keys[own], inputs.cache.keys[own], rtol=0, atol=0, equal_nan=True)
