"""The executor of GPUs runs each family on the fake GPU: in few launches, without reads from the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from oaiserve.engine.decoder.description import Decoder, DeltaNet, Experts, Layer, Mamba2
from oaiserve.engine.decoder.model_spec import kv_shapes
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model import transfer
from oaiserve.engine.model.adapters import Adapter, AdapterPart
from oaiserve.engine.model.batch import CapturedAdapters, build_batch
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.plugins.cuda.executor import place as placing
from oaiserve.plugins.cuda.executor.block_tables import BlockTables
from oaiserve.plugins.cuda.executor.chunked_states import in_chunks
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels, triton_kernels
from oaiserve.plugins.cuda.executor.product_ways import MatrixTiles, ProductWays
from oaiserve.plugins.cuda.executor.step_graphs import StepGraphs
from oaiserve.plugins.cuda.executor.step_sizes import Size
from oaiserve.plugins.cuda.executor.token_counts import DeviceCounts
from tests.engine.executors import fake_gpu
from tests.engine.executors.fake_gpu import GPU, VARIANTS, replace_kernels, watched
from tests.engine.executors.native.small_models import load
from tests.engine.model.steps import BLOCK_SIZE, sequence_of
from tests.models.adapters import random_adapter
from tests.models.described import described
from tests.models.pinned import PINNED, pinned_model
from tests.models.small_configs import config_of
from tests.plugins.cuda.executor.packed_matrices import in_blocks_of_128
from tests.plugins.cuda.executor.test_packed import FILES
from tests.plugins.cuda.executor.test_packed import described as described_for_gpu

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.executor import (
    triton_adapters,
    triton_attention,
    triton_latent,
    triton_layers,
    triton_products,
    triton_sampling,
    triton_states,
)

DTYPE = torch.bfloat16
PROMPTS = [(0, 0, 5), (1, 0, 17), (2, 0, 9)]  # sequence, first token, number of tokens
DECODES = [(0, 5, 1), (1, 17, 1), (2, 9, 1)]
MIXED = [(0, 6, 1), (1, 18, 3)]


BLOCKS_OF_128 = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "num_hidden_layers": 2,
}


class Model(NamedTuple):
    spec: ModelSpec
    decoder: Decoder


def model_of(name: str) -> Model:
    spec = described(pinned_model(name))
    return Model(spec, spec.decoder)


class FakeGpu:
    """The fake GPU with kernels that compute nothing."""

    def __init__(self, kernels: Counter[str]) -> None:
        self.kernels = kernels

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
        lengths = [0, 0, 0]
        for place, start, count in parts:
            lengths[place] = start + count
        sequences = [
            sequence_of([5] * length, [place] * (1 + length // BLOCK_SIZE)) for place, length in enumerate(lengths)
        ]
        step = Step([Chunk(sequences[place], start, count) for place, start, count in parts])
        states = States(model.spec.state_shapes, 4, GPU) if model.spec.state_shapes else None
        with watched() as operations:
            batch = build_batch(step, BLOCK_SIZE, GPU)
            if states is not None:
                batch.states = states.of_step([StateChunk(*part) for part in parts])
            batch.captured_adapters = adapters
            operations.clear()
            self.kernels.clear()
            logits = executor.forward(batch)
            found = operations + self.kernels
        assert logits.shape == (len(parts), model.spec.vocab_size)
        assert (logits.dtype, logits.device) == (DTYPE, GPU)
        return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    of_layers = [triton_adapters, triton_latent, triton_layers, triton_products, triton_states]
    return FakeGpu(replace_kernels(monkeypatch, [triton_attention, triton_sampling, *of_layers], DTYPE))


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
    assert launches["product_kernel"] == 4 * num_layers
    assert sum(launches.values()) == 8 * num_layers + 5, launches


def test_experts_are_multiplied_in_the_tiles_of_the_start(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_moe")
    executor = gpu.executor(model.decoder)
    tiles = MatrixTiles(16, 32, num_warps=2, num_stages=2)
    executor.kernels = executor.kernels._replace(ways=ProductWays(expert_tiles=(tiles,)))
    variants: set[Any] = set()
    monkeypatch.setattr(fake_gpu, "VARIANTS", variants)
    gpu.launches(model, DECODES, executor)
    products = [dict(arguments) for name, *arguments in variants if name == "product_kernel"]
    assert {(one["TILE_N"], one["num_warps"]) for one in products} == {(32, 2)}


def test_prompts_in_fp8_take_two_launches_more_for_each_layer(gpu: FakeGpu, tmp_path: Path) -> None:
    """Norms round their results."""
    found = described_for_gpu(FILES["fp8 by row"][0](tmp_path))
    model = Model(found.spec, found.decoder)
    executor = gpu.executor(model.decoder)
    executor.kernels = executor.kernels._replace(ways=ProductWays(rounded_from=65))
    number = 4 * len(model.decoder.layers)
    for tokens, in_16_bits, in_8_bits in ((64, number, 0), (65, 0, number)):
        launches = gpu.launches(model, [(0, 0, tokens)], executor)
        assert launches["product_kernel"] == in_16_bits
        assert 2 * launches["round_rows_kernel"] == launches["_scaled_mm"] == in_8_bits


def test_prompts_in_fp8_with_scales_of_blocks_take_one_launch_more_for_each_layer(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations round their results, too."""
    monkeypatch.setattr(placing, "in_float8", in_blocks_of_128)
    spec = load(config_of("llama", **BLOCKS_OF_128))
    weights = CudaWeights(spec.decoder, dtype=DTYPE, device=GPU, in_float8=True)
    kernels = triton_kernels()._replace(ways=ProductWays(rounded_from=65))
    executor = CudaExecutor(weights, kv_shapes(spec.decoder), num_blocks=8, block_size=BLOCK_SIZE, kernels=kernels)
    model = Model(spec, spec.decoder)
    few, many = (gpu.launches(model, [(0, 0, tokens)], executor) for tokens in (64, 65))
    num_layers = len(spec.decoder.layers)
    assert few["product_kernel"] == many["_scaled_mm_v2"] == 4 * num_layers
    assert many["round_rows_kernel"] == num_layers
    assert many["product_kernel"] == 0
    assert sum(many.values()) == sum(few.values()) + num_layers


@pytest.mark.parametrize(("name", "of_state"), [("qwen3_next", 2), ("bamba", 1)])
def test_chunks_of_a_prompt_take_few_launches(name: str, of_state: int, gpu: FakeGpu) -> None:
    model = model_of(name)
    executor = gpu.executor(model.decoder)
    executor.kernels = executor.kernels._replace(recurrence=in_chunks(executor.kernels.recurrence))
    num_layers = sum(isinstance(layer.mixer, DeltaNet | Mamba2) for layer in model.decoder.layers)
    assert gpu.launches(model, [(0, 0, 127)], executor)["recurrence_kernel"] == num_layers
    counts = [gpu.launches(model, [(0, 0, tokens)], executor) for tokens in (128, 192, 1088)]
    assert not any(launches["recurrence_kernel"] for launches in counts)
    products = [launches["baddbmm"] / num_layers for launches in counts]
    assert products[1] - products[0] == of_state
    assert products[2] - products[0] == 15 * of_state


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next", "bamba"])
def test_long_prompts_take_as_many_launches_as_short_ones(name: str, gpu: FakeGpu) -> None:
    model = model_of(name)
    executor = gpu.executor(model.decoder)
    gpu.launches(model, [(0, 0, 5)], executor)
    assert gpu.launches(model, [(0, 0, 5)], executor) == gpu.launches(model, [(0, 0, 22)], executor)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3_text", "bamba", "awq"])
def test_no_kernel_is_compiled_for_another_number_of_tokens(name: str, gpu: FakeGpu, tmp_path: Path) -> None:
    """Prompts that are in no graph: no request shall wait for a compiler."""
    if name == "awq":
        found = described_for_gpu(FILES["awq"][0](tmp_path))
        model = Model(found.spec, found.decoder)
    else:
        model = model_of(name)
    executor = gpu.executor(model.decoder)
    for parts in ([(0, 0, 1040)], [(0, 6, 1), (1, 0, 1101)]):
        gpu.launches(model, parts, executor)
    before = set(VARIANTS)
    for number in (1025, 1408, 1777, 2047):  # one makes numbers of tiles that are multiples of 16
        gpu.launches(model, [(0, 0, number)], executor)
        gpu.launches(model, [(0, 6, 1), (1, 3, number), (2, 0, 17)], executor)
    assert before == VARIANTS


class Graphs:
    """A runner on the fake GPU with graphs, whose replays are counted as one launch each."""

    def __init__(
        self, model: Model, gpu: FakeGpu, *, has_adapters: bool = False, sizes: list[Size] | None = None
    ) -> None:
        spec = replace(model.spec, device=GPU, dtype=DTYPE)
        executor = gpu.executor(model.decoder)
        states = States(spec.state_shapes, 9, GPU) if spec.state_shapes else None
        tables = BlockTables(64, 2, BLOCK_SIZE, GPU)
        shapes = model.decoder.adaptable()
        adapters = triton_adapters.TritonAdapters(shapes, 2, GPU) if has_adapters else None
        executor.kernels = executor.kernels._replace(adapters=adapters)
        if sizes is None:
            sizes = [Size(4)] if states is not None else [Size(4), Size(4, 25)]
        self._gpu = gpu
        self._replays: list[Counter[str]] = []
        own = {"sizes": sizes, "block_size": BLOCK_SIZE, "states": states, "adapters": adapters}
        with watched() as self._operations:
            counts = DeviceCounts(tables, spec.vocab_size)
            graphs = StepGraphs(executor.forward, triton_sampling, self._capture, spec, tables, counts=counts, **own)
        of_runner = {"graphs": graphs, "tables": tables, "counts": counts, "states": states}
        self.runner = ModelRunner(executor, GPU, BLOCK_SIZE, sample_ids=triton_sampling.sample_ids, **of_runner)
        self.runner.is_asynchronous = True
        if has_adapters:
            parts = random_adapter(shapes, 1).parts.items()
            on_gpu = {name: AdapterPart(part.a.to(GPU), part.b.to(GPU), part.scale) for name, part in parts}
            self.runner.add_adapter(1, Adapter("on the device", on_gpu))

    def _capture(self, run: Callable[[], object]) -> Callable[[], object]:
        self._operations.clear()
        self._gpu.kernels.clear()
        run()
        found = self._operations + self._gpu.kernels
        return lambda: self._replays.append(found)

    def launches(
        self, parts: list[tuple[int, int, int]], *, draft: tuple[int, ...] = (), **params: Any
    ) -> tuple[Counter[str], list[Counter[str]]]:
        """Return the launches of a step by the host, of steps like those before, and those in the graphs it replays."""
        chunks = [
            Chunk(
                sequence_of([5] * (start + count), range(2 * place, 2 * place + 2), **params),
                *(start, count, 1 + len(draft), draft),
            )
            for place, start, count in parts
        ]
        with watched() as operations:
            self.runner.launch(Step(chunks))
            operations.clear()
            self._gpu.kernels.clear()
            self._replays.clear()
            self.runner.launch(Step(chunks))
            return operations + self._gpu.kernels, [*self._replays]


# What the host launches: the copy of the inputs and that of the results. The forward and the draws are one graph.
BY_HOST = Counter({"copy_": 1, "_to_copy": 1})
OF_DRAWS = ("best_of_chunk_kernel", "weights_kernel", "candidates_kernel", "cut_kernel", "scores_kernel", "best_kernel")
DRAWS = Counter(OF_DRAWS)
TABLES = Counter({"_to_copy": 1, "index_copy_": 1})  # the blocks of prompts


@pytest.mark.parametrize("name", PINNED)
def test_steps_of_every_family_are_few_copies_and_a_graph(name: str, gpu: FakeGpu) -> None:
    model = model_of(name)
    graphs = Graphs(model, gpu)
    prompts = [(0, 0, 5), (1, 0, 17)]
    beside = [(2, 6, 1), (1, 0, 17)]
    num_attending = sum(layer.attention is not None for layer in model.decoder.layers)
    for parts in (DECODES, prompts, beside) if not model.spec.state_shapes else (DECODES,):
        by_host, (forward,) = graphs.launches(parts, temperature=0.0)
        assert by_host == (BY_HOST if parts is DECODES else BY_HOST + TABLES)
        assert forward >= DRAWS
        attending = forward["decode_kernel"], forward["prefill_kernel"], forward["latent_kernel"]
        num_of_prompts = num_attending * (parts is not DECODES)
        if model.spec.has_latent_cache:
            assert attending == (0, 0, num_attending + num_of_prompts)
        else:
            assert attending == (num_attending, num_of_prompts, 0)


def test_decodes_beside_a_prompt_read_each_matrix_once(gpu: FakeGpu) -> None:
    """In a graph, and where the prompt is too long for one."""
    graphs = Graphs(model_of("llama"), gpu)
    (forward,) = graphs.launches([(0, 6, 1), (1, 0, 17)])[1]
    alone = graphs.launches(DECODES)[1][0]
    assert forward["mm"] == alone["mm"] > 0
    by_host, replayed = graphs.launches([(0, 6, 1), (1, 0, 22), (2, 0, 5)])
    assert not replayed
    assert by_host["mm"] == alone["mm"]


def test_drafts_of_all_sequences_are_verified_in_a_graph(gpu: FakeGpu) -> None:
    """Each of 32 sequences has a draft of four tokens."""
    graphs = Graphs(model_of("llama"), gpu, sizes=[Size(32), Size(96, 160)])
    by_host, (forward,) = graphs.launches([(place, 10, 5) for place in range(32)], draft=(5,) * 4, temperature=0.0)
    assert by_host == BY_HOST
    assert forward >= DRAWS


def test_edited_draws_are_launched_after_the_graph_of_the_forward(gpu: FakeGpu) -> None:
    graphs = Graphs(model_of("llama"), gpu)
    for params in ({"logprobs": 1}, {"logit_bias": {3: 1.0}}):
        by_host, replayed = graphs.launches(DECODES, **params)
        assert len(replayed) == 1
        assert by_host["scores_kernel"] == 1


@pytest.mark.parametrize("name", ["llama", "gemma4_text", "phi3", "qwen3_next", "gpt2", "qwen2_moe"])
def test_adapters_take_two_launches_for_each_module(name: str, gpu: FakeGpu) -> None:
    model = model_of(name)
    graphs = Graphs(model, gpu, has_adapters=True)
    by_host, (forward,) = graphs.launches(DECODES, adapter=1)
    assert by_host == BY_HOST
    num_modules = len(model.decoder.adaptable())
    assert forward["shrink_kernel"] == forward["expand_kernel"] == num_modules
    assert forward["plan_experts_kernel"] >= 1
    assert "shrink_kernel" not in graphs.launches(DECODES)[1][0]


def test_the_double_finds_mixed_devices_and_reads(gpu: FakeGpu) -> None:
    model = model_of("llama")
    executor = gpu.executor(model.decoder)
    forward = executor.forward
    executor.forward = lambda batch: forward(batch) + torch.zeros(97, dtype=DTYPE)
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
