"""Memory is measured before the KV cache is allocated: with a small model, and readings from a double of a GPU."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.config import Bytes, EngineOptions
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.rehearsal import largest_step
from oaiserve.engine.model.sampling.sampler import NUM_TOP
from oaiserve.engine.sequences.step import Step
from oaiserve.errors import StartupError
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels, PlainAttention
from oaiserve.plugins.cuda.start import memory
from oaiserve.plugins.cuda.start.memory import MemoryReading, gpu_sizes
from tests.models.described import SmallModel

GIB = 2**30


@given(
    max_running=st.integers(1, 40),
    further=st.integers(0, 200),
    longest=st.integers(1, 90),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_the_largest_step_has_the_most_tokens_and_sequences_that_a_step_can_have(
    max_running: int, further: int, longest: int, block_size: int
) -> None:
    max_step_tokens = max_running + further
    step = largest_step(
        max_step_tokens=max_step_tokens, max_running=max_running, longest=longest, block_size=block_size
    )
    assert step.num_tokens == min(max_step_tokens, max_running * longest)
    assert len(step.chunks) == max_running
    ones = [chunk.num_tokens == 1 for chunk in step.chunks]
    assert ones == sorted(ones, reverse=True)
    assert all(chunk.max_draws == 1 and chunk.start >= 0 and chunk.end == longest for chunk in step.chunks)
    batch = build_batch(step, block_size, torch.device("cpu"))
    assert len(batch.unknown_rows) == 0
    assert batch.logits_rows.shape == (max_running,)
    assert batch.block_tables.shape == (max_running, -(-longest // block_size))
    assert batch.block_tables.max() == 0
    assert batch.slots.max() < block_size


BEFORE = MemoryReading(total=80 * GIB, free=60 * GIB, reserved=16 * GIB, in_tensors=15 * GIB, peak_in_tensors=15 * GIB)
# The step took two GiB, of which a library keeps one. Another program took one GiB meanwhile.
AFTER = MemoryReading(total=80 * GIB, free=58 * GIB, reserved=17 * GIB, in_tensors=16 * GIB, peak_in_tensors=17 * GIB)


def measured(loaded: SmallModel, backend: Callable[..., Any], **options: Any) -> tuple[int, int]:
    """Return the blocks and the states of a GPU with two readings."""
    readings = iter((BEFORE, AFTER))
    asked = EngineOptions(max_running=6, max_step_tokens=40, **options)
    return gpu_sizes(loaded, asked, making(loaded, backend), graph_bytes=GIB, read=lambda device: next(readings))


def making(loaded: SmallModel, backend: Callable[..., Any]) -> Callable[[], ModelRunner]:
    weights = CudaWeights(loaded.decoder, dtype=loaded.dtype, device=loaded.device)
    kernels = Kernels(attention=backend)
    executor = partial(CudaExecutor, weights, loaded.kv_shapes, num_blocks=1, block_size=16, kernels=kernels)
    return lambda: ModelRunner(executor(), loaded.device, 16)


def test_the_cache_gets_what_the_largest_step_and_other_uses_leave(
    loaded: SmallModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "oaiserve")
    steps = []

    class Attention(PlainAttention):
        def __init__(self, batch: Batch) -> None:
            super().__init__(batch)
            self._batch = batch

        def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: Any, how: Any) -> Any:
            batch = self._batch
            steps.append((len(query), len(batch.query_lens), cache.keys.shape[0], max(batch.context_lens)))
            return super().__call__(query, key, value, cache, how)

    blocks, states = measured(loaded, Attention, gpu_memory_utilization=0.8, kv_cache_memory=Bytes("1GiB"))
    assert (blocks, states) == (GIB // (16 * loaded.kv_bytes_per_token), 0)
    assert caplog.messages == [
        "Memory of cpu: 64.0 of 80.0 GiB may be in use by --gpu-memory-utilization 0.8, of which weights take 15.0, "
        "the largest step 2.0, CUDA graphs 1.0, the driver and other programs 5.0; the KV cache gets 1.0, and 40.0 are "
        "left"
    ]
    assert set(steps) == {(40, 6, 1, loaded.max_model_len)}  # all sequences share one block


def test_the_step_that_is_measured_has_a_bounded_context(loaded: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def recorded(*, longest: int, **sizes: int) -> Step:
        found.append(longest)
        return largest_step(longest=loaded.max_model_len, **sizes)

    monkeypatch.setattr(memory, "largest_step", recorded)
    measured(replace(loaded, max_model_len=1_000_000), PlainAttention)
    assert found == [memory.MOST_CONTEXT]


def test_a_gpu_without_memory_for_the_largest_step_stops_the_start(loaded: SmallModel) -> None:
    def prepare(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 70 GiB.")

    with pytest.raises(StartupError) as error:
        measured(loaded, prepare)
    assert str(error.value).startswith(
        "The model's weights take 15.0 GiB, and the 60.0 GiB that are free beside them are too little for its largest "
        "step, of 40 tokens of 6 sequences: lower --max-step-tokens or --max-running"
    )


def test_the_largest_step_samples_in_the_way_that_takes_the_most_memory() -> None:
    params = largest_step(max_step_tokens=8, max_running=2, longest=8, block_size=4).chunks[0].sequence.params
    assert (params.logprobs, params.temperature > 0, params.top_k > 0, params.top_p < 1) == (NUM_TOP, True, True, True)
