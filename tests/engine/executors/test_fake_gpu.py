"""The executor of GPUs runs each family on the fake GPU: in few launches, without reads from the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Decoder
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.executor import CudaExecutor
from oaiserve.engine.model import transfer
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.start.kv_form import with_native_cache
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Chunk, Step
from tests.engine.executors.fake_gpu import GPU, replace_kernels, watched
from tests.engine.executors.test_reference_steps import with_keys_and_values
from tests.engine.model.cpu.small_models import described
from tests.engine.model.steps import BLOCK_SIZE, sequence_of
from tests.models.pinned import PINNED, pinned_model

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.model.attention import triton as triton_attention
from oaiserve.engine.model.gpu import triton_adapters, triton_experts, triton_layers, triton_matrices

DTYPE = torch.bfloat16
PROMPTS = [(0, 0, 5), (1, 0, 17), (2, 0, 9)]  # sequence, first token, number of tokens
DECODES = [(0, 5, 1), (1, 17, 1), (2, 9, 1)]
MIXED = [(0, 6, 1), (1, 18, 3)]


class Model(NamedTuple):
    spec: ModelSpec
    decoder: Decoder


def model_of(name: str) -> Model:
    spec = with_native_cache(prepare(pinned_model(name)), EngineOptions())
    decoder = described(spec)
    has_latent_cache = spec.has_latent_cache
    return Model(spec, with_keys_and_values(decoder) if has_latent_cache else decoder)


class FakeGpu:
    """The fake GPU with kernels that compute nothing."""

    def __init__(self, kernels: Counter[str]) -> None:
        self._kernels = kernels

    def executor(self, decoder: Decoder) -> CudaExecutor:
        return CudaExecutor(
            decoder,
            dtype=DTYPE,
            device=GPU,
            num_blocks=8,
            block_size=BLOCK_SIZE,
            backend=triton_attention.TritonAttention,
            operations=triton_layers,
            experts=triton_experts,
        )

    @torch.inference_mode()
    def launches(
        self,
        model: Model,
        parts: list[tuple[int, int, int]],
        executor: CudaExecutor | None = None,
        adapter: Adapter | None = None,
    ) -> Counter[str]:
        """Return the launches of a step: torch's operations, and kernels of ours."""
        executor = executor or self.executor(model.decoder)
        sequences = [sequence_of([5] * 22, range(2 * place, 2 * place + 2)) for place in range(3)]
        states = States(model.spec.state_shapes, 4, GPU) if model.spec.state_shapes else None
        self._kernels.clear()
        with watched() as operations:
            batch = build_batch(Step([Chunk(sequences[place], start, count) for place, start, count in parts]), 16, GPU)
            if states is not None:
                batch.states = states.of_step([StateChunk(*part) for part in parts])
            if adapter is not None:
                batch.adapters = [adapter, *[None] * (len(parts) - 1)]
            operations.clear()
            logits = executor.forward(batch)
            found = operations + self._kernels
        assert logits.shape == (len(parts), model.spec.vocab_size)
        assert (logits.dtype, logits.device) == (DTYPE, GPU)
        return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    modules = [triton_attention, triton_adapters, triton_experts, triton_layers, triton_matrices]
    return FakeGpu(replace_kernels(monkeypatch, modules, DTYPE))


@pytest.mark.parametrize("name", PINNED)
def test_every_family_runs_without_reads_from_the_device(name: str, gpu: FakeGpu) -> None:
    model = model_of(name)
    executor = gpu.executor(model.decoder)
    for parts in (PROMPTS, DECODES, MIXED):
        gpu.launches(model, parts, executor)


class Launches(NamedTuple):
    of_layers: int
    of_rest: int  # the embedding, its norm, the plans of attention, the rows that draw, and the head


# Of a decode step. Layers of Llama and Qwen 3 take eight each.
EXPECTED = {
    "llama": Launches(24, 5),
    "qwen3": Launches(24, 5),
    "gemma3_text": Launches(24, 7),  # plans for two windows, and the factor of embeddings
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_layer_of_a_decode_is_eight_launches(name: str, gpu: FakeGpu) -> None:
    model = model_of(name)
    found = gpu.launches(model, DECODES)
    num_layers = len(model.decoder.layers)
    assert sum(found.values()) == sum(EXPECTED[name]), found
    assert found["decode_kernel"] == found["activate_kernel"] == num_layers
    assert found["add_and_norm_kernel"] == 2 * num_layers + 1


def test_the_double_finds_mixed_devices_and_reads(gpu: FakeGpu) -> None:
    model = model_of("llama")
    executor = gpu.executor(model.decoder)
    executor._layers._head = replace(executor._layers._head, weight=torch.zeros(97, 64, dtype=DTYPE))
    with pytest.raises(AssertionError, match="copies a tensor to the device and waits"):
        gpu.launches(model, DECODES, executor)
    with watched(), pytest.raises(Exception, match="meta"):
        torch.empty(3, device=GPU).max().item()


def test_steps_under_the_context_of_the_device_copy_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under it, `as_tensor` is one of the functions that make tensors on the device, which cannot be pinned."""
    pinned = []
    monkeypatch.setattr(transfer, "pinned", lambda tensor, device: pinned.append(tensor.device) or tensor)
    sequence = sequence_of([5] * 4, [0])
    with torch.device(GPU):
        build_batch(Step([Chunk(sequence, 0, 4)]), BLOCK_SIZE, GPU)
        transfer.on_device([1, 2], GPU)
    assert pinned == [torch.device("cpu")] * 2
