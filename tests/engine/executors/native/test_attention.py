"""Native attention of all sizes, windows, soft caps and sinks equals the reference."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oaiserve.engine.decoder.spec import KVShape
from oaiserve.engine.executors.reference.attention import PlainAttention
from oaiserve.engine.model.batch import build_batch
from tests.engine.executors.native.attention_layers import NUM_BLOCKS, QKV, Layer, NativeLayer
from tests.engine.model.steps import BLOCK_SIZE, CPU, Shape, shapes, two_steps

pytestmark = pytest.mark.compiler
# Each has something that no other has.
LAYERS = [
    Layer(6, KVShape(2, 48, 32)),
    Layer(6, KVShape(2, 16, 32), softcap=2.0),
    Layer(6, KVShape(2, 48, 32), sliding_window=21),
    Layer(4, KVShape(4, 32, 32), sliding_window=1, softcap=0.5),
    Layer(5, KVShape(1, 256, 240), sliding_window=1000),
    Layer(5, KVShape(1, 512, 496), sliding_window=400),
    Layer(6, KVShape(2, 48, 32), sliding_window=21, has_sinks=True),
    Layer(4, KVShape(2, 32, 32), softcap=3.0),
]


@pytest.fixture(scope="module")
def natives() -> list[NativeLayer]:
    return [NativeLayer(layer, torch.float32) for layer in LAYERS]


@given(shape=shapes(200, 150, NUM_BLOCKS), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
@example(shape=[(0, 1)], seed=0)
@example(shape=[(15, 1), (16, 1), (17, 1), (200, 1), (0, 1)], seed=1)
@example(shape=[(300, 1), (0, 150), (31, 2), (3, 128)], seed=2)
def test_every_layer_equals_the_reference(natives: list[NativeLayer], shape: Shape, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    caches = [native.plain_cache() for native in natives]
    for step in two_steps(shape, generator, num_blocks=NUM_BLOCKS):
        batch = build_batch(step, BLOCK_SIZE, CPU)
        attend = PlainAttention(batch)
        for native, cache in zip(natives, caches, strict=True):
            x = native.inputs(len(batch.slots), generator)
            expected = native.expected(x, native.qkv(x), attend, cache)
            torch.testing.assert_close(native.forward(batch, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_bfloat16_is_as_close_to_float32_as_the_reference(layer: Layer) -> None:
    native = NativeLayer(layer, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    exact_cache = native.plain_cache()
    cache = native.plain_cache(torch.bfloat16)
    for step in two_steps([(40, 1), (200, 1), (70, 90), (0, 130)], generator, num_blocks=NUM_BLOCKS):
        batch = build_batch(step, BLOCK_SIZE, CPU)
        x = native.inputs(len(batch.slots), generator)
        qkv = native.qkv(x)
        exact = native.expected(x, qkv, PlainAttention(batch), exact_cache)
        own = native.expected(x, QKV(*(part.bfloat16() for part in qkv)), PlainAttention(batch), cache)
        own_error, error = (float((out - exact).norm() / exact.norm()) for out in (own, native.forward(batch, x)))
        assert error < max(1.5 * own_error, 0.004)
