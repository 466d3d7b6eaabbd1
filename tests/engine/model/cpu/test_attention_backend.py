"""Native attention as a backend of transformers' code equals the reference backend, and serves mixtures of experts."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oaiserve.engine.decoder.spec import KVShape
from oaiserve.engine.model.attention import Backend, LayerCache
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.cpu import attention
from oaiserve.engine.model.cpu.attention import NativeAttention
from oaiserve.engine.step import Step
from tests.engine.model.cpu.attention_layers import NUM_BLOCKS, Layer, native_attention, plain_caches
from tests.engine.model.steps import BLOCK_SIZE, CPU, Shape, shapes, two_steps

pytestmark = pytest.mark.compiler
# The first three have the same window, which is none; each of the others has something that no other has.
LAYERS = [
    Layer(6, KVShape(2, 48, 32)),
    Layer(6, KVShape(2, 16, 32), softcap=2.0),
    Layer(6, KVShape(2, 48, 32)),
    Layer(6, KVShape(2, 48, 32), sliding_window=21),
    Layer(4, KVShape(4, 32, 32), sliding_window=1, softcap=0.5),
    Layer(5, KVShape(1, 256, 240), sliding_window=1000),
    Layer(5, KVShape(1, 512, 496), sliding_window=400),
    Layer(6, KVShape(2, 48, 32), sliding_window=21, has_sinks=True),
    Layer(4, KVShape(2, 32, 32), softcap=3.0),
]


def outputs(
    backend: Backend, caches: dict[int, LayerCache], steps: list[Step], dtype: torch.dtype, seed: int
) -> list[Tensor]:
    """Return the outputs of each layer in each step, for random inputs that depend on the seed only.

    The inputs are rounded to bfloat16, whatever the dtype.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(heads: int, num_tokens: int, dim: int) -> Tensor:
        """Return [num_tokens, heads, dim], not contiguous, because transformers' code has the heads first."""
        numbers = torch.randn(heads, num_tokens, dim, generator=generator)
        return numbers.to(torch.bfloat16).to(dtype).transpose(0, 1)

    found = []
    for step in steps:
        batch = build_batch(step, BLOCK_SIZE, CPU)
        attend = backend(batch)
        num_tokens = len(batch.slots)
        for index, layer in enumerate(LAYERS):
            heads, shape = layer.heads, layer.shape
            query = randn(heads, num_tokens, shape.key_dim)
            key = randn(shape.kv_heads, num_tokens, shape.key_dim)
            value = randn(shape.kv_heads, num_tokens, shape.value_dim)
            found.append(attend(query, key, value, caches[index], layer.scoring()))
    return found


@pytest.fixture(scope="module", params=["torch's threads", "own threads"])
def native(request: pytest.FixtureRequest) -> NativeAttention:
    assert attention.openmp() is not None, "torch's threads can be used"
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "own threads":
            patch.setattr(attention, "openmp", lambda: None)
        return native_attention(LAYERS, torch.float32)


@given(shape=shapes(200, 150, NUM_BLOCKS), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
@example(shape=[(0, 1)], seed=0)
@example(shape=[(15, 1), (16, 1), (17, 1), (200, 1), (0, 1)], seed=1)
@example(shape=[(300, 1), (0, 150), (31, 2), (3, 128)], seed=2)
def test_every_layer_equals_the_reference(native: NativeAttention, shape: Shape, seed: int) -> None:
    steps = two_steps(shape, torch.Generator().manual_seed(seed), num_blocks=NUM_BLOCKS)
    expected = outputs(ReferenceAttention, plain_caches(LAYERS, torch.float32), steps, torch.float32, seed)
    found = outputs(native.prepare, native.caches, steps, torch.float32, seed)
    for result, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_as_close_to_float32_as_the_reference() -> None:
    dtype = torch.bfloat16
    shape = [(40, 1), (200, 1), (70, 90), (0, 130)]
    steps = two_steps(shape, torch.Generator().manual_seed(3), num_blocks=NUM_BLOCKS)
    exact = outputs(ReferenceAttention, plain_caches(LAYERS, torch.float32), steps, torch.float32, 3)
    expected = outputs(ReferenceAttention, plain_caches(LAYERS, dtype), steps, dtype, 3)
    native = native_attention(LAYERS, dtype)
    found = outputs(native.prepare, native.caches, steps, dtype, 3)
    for result, wanted, right in zip(found, expected, exact, strict=True):
        assert result.dtype == dtype
        own_error, error = (float((out.float() - right).norm() / right.norm()) for out in (wanted, result))
        assert error < max(1.5 * own_error, 0.004)
