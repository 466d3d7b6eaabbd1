"""The executor of GPUs runs each family on the fake GPU: in few launches, without reads from the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Decoder, Experts, Layer
from oaiserve.engine.decoder.model_spec import kv_shapes
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.executor import CudaExecutor, CudaWeights
from oaiserve.engine.executors.cuda.kernels import Kernels, triton_kernels
from oaiserve.engine.model import transfer
from oaiserve.engine.model.adapters import Adapter, AdapterPart
from oaiserve.engine.model.batch import CapturedAdapters, build_batch
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.start.kv_form import with_native_cache
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Chunk, Step
from tests.engine.executors.fake_gpu import GPU, replace_kernels, watched
from tests.engine.executors.test_cuda_packed import FILES
from tests.engine.executors.test_cuda_packed import described as described_for_gpu
from tests.engine.executors.test_reference_steps import with_keys_and_values
from tests.engine.model.cpu.small_models import described
from tests.engine.model.steps import BLOCK_SIZE, sequence_of
from tests.models.adapters import random_adapter
from tests.models.pinned import PINNED, pinned_model

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.model.attention import triton as triton_attention
from oaiserve.engine.model.gpu import triton_adapters, triton_experts, triton_layers, triton_matrices, triton_states

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
    return Model(spec, with_keys_and_values(decoder) if spec.has_latent_cache else decoder)


class FakeGpu:
    """The fake GPU with kernels that compute nothing."""

    def __init__(self, kernels: Counter[str]) -> None:
        self._kernels = kernels

    def executor(self, decoder: Decoder, *, is_plain: bool = False) -> CudaExecutor:
        weights = CudaWeights(decoder, dtype=DTYPE, device=GPU)
        kernels = Kernels() if is_plain else triton_kernels()
        return CudaExecutor(weights, kv_shapes(decoder), num_blocks=8, block_size=BLOCK_SIZE, kernels=kernels)

    @torch.inference_mode()
    def launches(
        self,
        model: Model,
        parts: list[tuple[int, int, int]],
        executor: CudaExecutor | None = None,
        adapters: CapturedAdapters | None = None,
    ) -> Counter[str]:
        """Return the launches of a step: torch's operations, and kernels of ours."""
        executor = executor or self.executor(model.decoder)
        sequences = [sequence_of([5] * 22, range(2 * place, 2 * place + 2)) for place in range(3)]
        step = Step([Chunk(sequences[place], start, count) for place, start, count in parts])
        states = States(model.spec.state_shapes, 4, GPU) if model.spec.state_shapes else None
        with watched() as operations:
            batch = build_batch(step, BLOCK_SIZE, GPU)
            if states is not None:
                batch.states = states.of_step([StateChunk(*part) for part in parts])
            batch.captured_adapters = adapters
            operations.clear()
            self._kernels.clear()
            logits = executor.forward(batch)
            found = operations + self._kernels
        assert logits.shape == (len(parts), model.spec.vocab_size)
        assert (logits.dtype, logits.device) == (DTYPE, GPU)
        return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    of_layers = [triton_adapters, triton_experts, triton_layers, triton_matrices, triton_states]
    return FakeGpu(replace_kernels(monkeypatch, [triton_attention, *of_layers], DTYPE))


@pytest.mark.parametrize("name", PINNED)
def test_every_family_runs_without_reads_from_the_device(name: str, gpu: FakeGpu) -> None:
    model = model_of(name)
    executor = gpu.executor(model.decoder)
    for parts in (PROMPTS, DECODES, MIXED):
        gpu.launches(model, parts, executor)


@pytest.mark.parametrize("name", ["llama", "gemma4_text", "deepseek_v3", "bamba"])
def test_plain_torch_reads_nothing_from_the_device_without_experts(name: str, gpu: FakeGpu) -> None:
    """Only experts are read: their numbers of tokens are shapes."""
    model = model_of(name)
    layers = [replace(layer, mlp=layer.mlp.shared) if is_mixture(layer) else layer for layer in model.decoder.layers]
    executor = gpu.executor(replace(model.decoder, layers=layers), is_plain=True)
    for parts in (PROMPTS, DECODES, MIXED):
        gpu.launches(model, parts, executor)


def is_mixture(layer: Layer) -> bool:
    return isinstance(layer.mlp, Experts)


# Launches of a decode step: of each layer, and of the rest, which is the embedding, its norm, the plan of attention,
# the rows that are sampled, and the head. Gemma also scales its embedding, and plans for two windows.
MIXTURE = 17
MAMBA2 = 33
LAUNCHES = {
    "llama": ([8, 8, 8], 5),
    "qwen3": ([8, 8, 8], 5),
    "gemma3_text": ([8, 8, 8], 7),
    "qwen3_moe": ([MIXTURE, 8, MIXTURE], 5),
    "bamba": ([MAMBA2, 8, MAMBA2], 5),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_layer_of_a_decode_takes_few_launches(name: str, gpu: FakeGpu) -> None:
    of_layers, of_rest = LAUNCHES[name]
    model = model_of(name)
    executor = gpu.executor(model.decoder)
    gpu.launches(model, DECODES, executor)  # the first step makes counters that all steps share
    found = gpu.launches(model, DECODES, executor)
    assert sum(found.values()) == sum(of_layers) + of_rest, found
    assert found["decode_kernel"] == sum(layer.attention is not None for layer in model.decoder.layers)
    assert found["add_and_norm_kernel"] == 2 * len(of_layers) + 1


def test_weights_in_blocks_take_as_many_launches(gpu: FakeGpu, tmp_path: Path) -> None:
    found = described_for_gpu(FILES["awq"][0](tmp_path))
    model = Model(found.spec, found.decoder)
    executor = gpu.executor(model.decoder)
    gpu.launches(model, DECODES, executor)
    launches = gpu.launches(model, DECODES, executor)
    num_layers = len(model.decoder.layers)
    assert launches["matrix_kernel"] == 4 * num_layers
    assert sum(launches.values()) == 8 * num_layers + 5, launches


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next", "bamba"])
def test_long_prompts_take_as_many_launches_as_short_ones(name: str, gpu: FakeGpu) -> None:
    model = model_of(name)
    executor = gpu.executor(model.decoder)
    gpu.launches(model, [(0, 0, 5)], executor)
    assert gpu.launches(model, [(0, 0, 5)], executor) == gpu.launches(model, [(0, 0, 22)], executor)


def test_captured_adapters_take_two_launches_for_each_module(gpu: FakeGpu) -> None:
    model = model_of("llama")
    executor = gpu.executor(model.decoder)
    shapes = model.decoder.adaptable()
    adapters = triton_adapters.TritonAdapters(shapes, 2, GPU, captured_tokens=16)
    made = random_adapter(shapes, 1)
    on_gpu = {name: AdapterPart(part.a.to(GPU), part.b.to(GPU), part.scale) for name, part in made.parts.items()}
    assert adapters.admit([executor.prepare(Adapter("on the device", on_gpu))])
    found = gpu.launches(model, DECODES, executor, adapters.captured(16))
    assert found["shrink_kernel"] == found["expand_kernel"] == len(shapes)


def test_the_double_finds_mixed_devices_and_reads(gpu: FakeGpu) -> None:
    model = model_of("llama")
    executor = gpu.executor(model.decoder)
    executor._weights._head = replace(executor._weights._head, weight=torch.zeros(97, 64, dtype=DTYPE))
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
