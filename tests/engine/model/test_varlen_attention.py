"""The varlen backend equals the reference, with a double of the one function of torch that needs a GPU.

The Triton backend computes decodes, in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

from oaiserve.engine.model.attention import Scoring
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.attention.select import select_backend
from oaiserve.engine.model.spec import KVShape
from oaiserve.engine.start.prepare import prepare
from oaiserve.errors import StartupError
from tests.models.decoders import FAMILIES, random_model

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.model.attention import triton, varlen
from tests.engine.model.test_triton_attention import CPU, MIXED, TOLERANCE, Inputs, expected, make_inputs

PROMPTS = ((0, 5), (0, 40), (0, 17))  # whole prompts, with nothing in the cache


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
    """Compute what torch documents for `varlen_attn`, with the windows of FlashAttention.

    The last query is at the position of the last key.
    """
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
        assert scale is not None
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
    return out


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen_attn)


def attend(inputs: Inputs, scoring: Scoring) -> torch.Tensor:
    *tensors, batch = inputs
    return varlen.VarlenAttention(batch)(*tensors, scoring)


def check(inputs: Inputs, *, window: int | None = None) -> None:
    scoring = Scoring(inputs.query.shape[2] ** -0.5, window)
    want, got = expected(inputs, scoring), attend(inputs, scoring)
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


def test_the_double_has_the_parameters_of_the_function() -> None:
    from torch.nn.attention.varlen import varlen_attn

    installed = inspect.signature(varlen_attn).parameters
    for name, parameter in inspect.signature(plain_varlen_attn).parameters.items():
        if name != "enable_gqa" or varlen._GROUPED:
            assert (installed[name].kind, installed[name].default) == (parameter.kind, parameter.default)


@pytest.mark.parametrize("lengths", [MIXED, PROMPTS, ((7, 1), *PROMPTS), ((0, 3), (20, 9))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_it_equals_the_reference(lengths: tuple[tuple[int, int], ...], dtype: torch.dtype) -> None:
    check(make_inputs(lengths, key_dim=64, dtype=dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (9, 3), (8, 1)])
def test_it_equals_the_reference_for_any_group_of_heads(heads: int, kv_heads: int) -> None:
    check(make_inputs(MIXED, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
def test_it_equals_the_reference_for_any_block_size(block_size: int) -> None:
    check(make_inputs(MIXED, block_size=block_size))


@pytest.mark.parametrize("window", [1, 3, 30, 1000])
@pytest.mark.parametrize("lengths", [MIXED, PROMPTS])
def test_it_equals_the_reference_with_windows(lengths: tuple[tuple[int, int], ...], window: int) -> None:
    check(make_inputs(lengths), window=window)


def test_keys_and_values_are_written_into_the_cache_unchanged() -> None:
    for lengths in (MIXED, PROMPTS):
        inputs = make_inputs(lengths)
        before = [blocks.clone() for blocks in inputs.cache]
        attend(inputs, Scoring(1.0))
        for cache, old, new in zip(inputs.cache, before, (inputs.key, inputs.value), strict=True):
            old.flatten(0, 1)[inputs.batch.slots] = new
            torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


def test_long_contexts_and_decode_steps_are_computed_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError

    monkeypatch.setattr(varlen, "varlen_attn", fail)
    monkeypatch.setattr(varlen, "MAX_COPIED_TOKENS", 114)
    check(make_inputs(MIXED))  # 5 + 110
    check(make_inputs(((7, 1), (90, 1))))
    monkeypatch.setattr(varlen, "MAX_COPIED_TOKENS", 115)
    with pytest.raises(AssertionError):
        check(make_inputs(MIXED))


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


def test_the_name_decides_which_backend_is_used() -> None:
    cuda = torch.device("cuda")
    assert select_backend(cuda, "varlen") is varlen.VarlenAttention
    assert select_backend(cuda, "triton") is select_backend(cuda, "auto") is triton.TritonAttention
    assert select_backend(cuda, "reference") is select_backend(CPU, "reference") is ReferenceAttention


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
