"""Native attention as a backend of transformers' code equals the reference backend, and serves mixtures of experts."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oaiserve.engine.model.attention import Backend, LayerCache, reference
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.cpu import attention
from oaiserve.engine.model.cpu.attention import NativeAttention
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import KVShape, LoadedModel
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.cpu.attention_layers import NUM_BLOCKS, Layer, native_attention, plain_caches
from tests.engine.model.cpu.small_models import EXPERTS, WITHOUT_STEP, config, load, make_model, started_runner
from tests.engine.model.runners import greedy_answers, make_engine
from tests.engine.model.steps import BLOCK_SIZE, CPU, Shape, sequence_of, shapes, two_steps
from tests.models.decoders import generate

pytestmark = pytest.mark.compiler
PROMPTS = [[5, 9, 3, 17], list(range(20, 75)), [90], [7] * 20, [11, 40, 11]]


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


def start(loaded: LoadedModel, block_size: int = BLOCK_SIZE) -> ModelRunner:
    """Return a runner after `start_native` has finished, which it does at once when the library is on disk."""
    Library(loaded.dtype)
    return started_runner(loaded, block_size=block_size)


def answers(loaded: LoadedModel, runner: ModelRunner, **options: int) -> list[list[int]]:
    with make_engine(loaded, runner, **options) as engine:
        return greedy_answers(engine, PROMPTS)


def test_a_family_without_a_native_step_answers_as_generate_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loaded = load(WITHOUT_STEP)
    runner = start(loaded)
    monkeypatch.delattr(reference, "_attention")  # the reference backend must not be used from now on
    said = [record.message for record in caplog.records if record.name.startswith("oaiserve.")]
    assert [text.split(" after ")[0] for text in said][1:] == ["Its attention is native"]
    expected = generate(make_model(WITHOUT_STEP), PROMPTS, 12)
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS), "the answers must be able to differ"
    assert answers(loaded, runner, max_running=5, max_step_tokens=23) == expected


@pytest.mark.parametrize(
    ("head_dim", "block_size", "reason"),
    [
        (8, 16, "its heads have 8 numbers, which is no multiple of 16 up to 512"),
        (528, 16, "its heads have 528 numbers, which is no multiple of 16 up to 512"),
        (16, 24, "the block size 24 is no multiple of 16"),
    ],
)
def test_unsupported_sizes_keep_the_reference_backend(
    head_dim: int, block_size: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loaded = load(config("phimoe", **EXPERTS, head_dim=head_dim, num_hidden_layers=1))
    runner = start(loaded, block_size)
    assert caplog.messages[1:] == [f"Its attention is in plain torch: {reason}"]
    (result,) = runner.collect(runner.launch(Step([Chunk(sequence_of([5, 9, 3], [1]), 0, 3)]))).chunks
    assert result.error is None
