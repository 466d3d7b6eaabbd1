"""Rows with adapters are replayed: the same tokens as one operation after the other, whichever adapters a step has."""

import gc
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import torch

from oaiserve.engine.model import runner as runner_module
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.graphs import DecodeGraphs
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.gpu.graphs import (
    Plain,
    RecordedKernel,
    all_graphs,
    check_replayed,
    padded_attention,
    record,
    run_again,
)
from tests.engine.model.runners import PROMPTS, decode, eager_runner
from tests.engine.model.steps import BLOCK_SIZE, CPU, sequence_of
from tests.models.adapters import random_adapter
from tests.models.decoders import LLAMA_OF_ONE_LAYER, random_model

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.model.attention.triton import TritonAttention
from oaiserve.engine.model.gpu import triton_adapters
from oaiserve.engine.model.gpu.triton_adapters import MOST_REPLAYED, WIDEST_REPLAYED, TritonAdapters, most_tiles

NUM_BLOCKS, WIDTH = 32, 4


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return prepare(random_model(LLAMA_OF_ONE_LAYER))


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("shrink_kernel", "expand_kernel"):
        monkeypatch.setattr(triton_adapters, name, RecordedKernel(getattr(triton_adapters, name)))
    monkeypatch.setattr(runner_module, "STEPS_BETWEEN_CAPTURES", 1)


@pytest.fixture(scope="module")
def adapters(loaded: LoadedModel) -> dict[int, Adapter]:
    """Return adapters of some modules each: the third has other ones than the first two."""
    shapes = adaptable(loaded.model)
    attention = {name: shape for name, shape in shapes.items() if "attn" in name}
    mlp = {name: shape for name, shape in shapes.items() if "mlp" in name}
    return {
        1: random_adapter(attention, 1),
        2: random_adapter(attention, 2, rank=20),
        3: random_adapter(mlp, 3, rank=1),
        4: random_adapter(shapes, 4, rank=WIDEST_REPLAYED),
    }


def plain_runner(loaded: LoadedModel, adapters: dict[int, Adapter]) -> ModelRunner:
    return with_adapters(eager_runner(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), adapters)


def with_adapters(runner: ModelRunner, adapters: dict[int, Adapter]) -> ModelRunner:
    for number, adapter in adapters.items():
        runner.add_adapter(number, adapter)
    return runner


def graph_runner(loaded: LoadedModel, adapters: dict[int, Adapter], *, most: int = 8) -> ModelRunner:
    """Return a runner with graphs of decodes, of 4 rows and of 8."""
    executor = EagerExecutor.with_cache(
        loaded, num_blocks=NUM_BLOCKS + 1, block_size=BLOCK_SIZE, backend=padded_attention
    )
    kernels = TritonAdapters(adaptable(loaded.model), most, CPU, captured_tokens=8)
    executor.add_adapters = kernels.of_batch
    sizes = {"sizes": [4, 8], "first": [8], "block_size": BLOCK_SIZE, "max_model_len": 64}
    tables = BlockTables(8, WIDTH, BLOCK_SIZE, CPU)
    graphs = DecodeGraphs(executor.forward, Plain(), record, loaded, tables, **sizes, adapters=kernels)
    of_graphs = {"graphs": graphs, "sample_ids": Plain().sample_ids, "tables": tables}
    return with_adapters(ModelRunner(executor, CPU, BLOCK_SIZE, **of_graphs), adapters)


def test_decodes_draw_the_same_tokens_with_whichever_adapters(
    loaded: LoadedModel, adapters: dict[int, Adapter]
) -> None:
    runner, plain = graph_runner(loaded, adapters, most=2), plain_runner(loaded, adapters)
    forward = Mock(wraps=runner._executor.forward)
    for numbers in ([1, 0, 2, 1], [0, 2, 0, 0], [0, 0, 0, 0], [3, 1, 0, 3], [3, 3, 3, 1]):
        with patch.object(runner._executor, "forward", forward):
            assert decode(runner, PROMPTS, numbers, 6) == decode(plain, PROMPTS, numbers, 6)
        # The prompts, and the first decodes; what captures is called by the graphs alone.
        assert forward.call_count <= 1 + 2
        forward.reset_mock()
    # 4 and 8 rows without adapters; with them, anew for the modules of the third.
    assert runner.num_captured == 3


@torch.inference_mode()
def test_a_replay_computes_the_logits_of_the_same_rows_bit_by_bit(
    loaded: LoadedModel, adapters: dict[int, Adapter]
) -> None:
    runner = graph_runner(loaded, adapters)
    forward, batches = runner._graphs._forward, []
    runner._graphs._forward = lambda batch: batches.append(batch) or forward(batch)
    sequences = [sequence_of([7 * n + 3, 5, n], [n], temperature=0.0, adapter=n % 4) for n in range(3)]
    step = Step([Chunk(one, 2, 1) for one in sequences])
    runner.launch(Step([Chunk(one, 0, 2, max_draws=0) for one in sequences]))
    while not batches:
        runner.launch(step)
    num_captured = len(batches)
    found = runner.launch(step).logits
    assert len(batches) == num_captured, "it is replayed"
    launched = replace(batches[-1], captured_adapters=None, adapters=[*map(adapters.get, range(4))])
    assert torch.equal(forward(launched)[:3], found)


def test_too_many_adapters_or_too_large_ones_are_launched_one_by_one(
    loaded: LoadedModel, adapters: dict[int, Adapter]
) -> None:
    runner = graph_runner(loaded, adapters)
    kernels = runner._graphs._adapters
    many = [random_adapter({"model.layers.0.self_attn.q_proj": (32, 32)}, n) for n in range(MOST_REPLAYED + 1)]
    large = random_adapter({"model.layers.0.self_attn.q_proj": (32, 32)}, 0, rank=WIDEST_REPLAYED + 1)
    assert kernels.admit([many[0], None, many[1]])
    assert not kernels.admit(many)
    assert not kernels.admit([large])
    assert adapters[4].rank > WIDEST_REPLAYED
    assert decode(runner, PROMPTS, [4, 1, 0, 2], 4) == decode(plain_runner(loaded, adapters), PROMPTS, [4, 1, 0, 2], 4)


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 100, 640])
def test_the_tiles_of_any_step_that_is_replayed_have_room(num_tokens: int) -> None:
    worst = min(num_tokens, MOST_REPLAYED)
    each = [1] * (worst - 1) + [num_tokens - worst + 1]
    assert sum(-(-number // 16) for number in each) <= most_tiles(num_tokens) <= num_tokens


def test_an_adapter_that_nobody_has_any_more_is_freed(loaded: LoadedModel) -> None:
    kernels = TritonAdapters(["up"], 2, CPU)
    for seed in range(5):
        adapter = random_adapter({"up": (8, 8)}, seed)
        assert kernels.admit([adapter])
        del adapter
        gc.collect()
    assert not kernels._numbers


STEPS: dict[str, tuple[list[int], list[int]]] = {
    "prompts alone": ([], [1, 0, 2]),
    "decodes beside prompts": ([2, 0, 1], [0, 3]),
    "prompts without one": ([1, 1], [0]),
    "decodes without one": ([0, 0], [3, 1]),
}


@pytest.fixture(scope="module")
def mixed(loaded: LoadedModel, adapters: dict[int, Adapter]) -> ModelRunner:
    """Return a runner with graphs of decodes, of prompts, and of both, with adapters and without."""
    executor = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, backend=TritonAttention)
    kernels = TritonAdapters(adaptable(loaded.model), 8, CPU, captured_tokens=40)
    executor.add_adapters = kernels.of_batch
    sizes = {"decodes": [4], "prompts": [36], "block_size": BLOCK_SIZE, "max_model_len": 64, "adapters": kernels}
    tables = BlockTables(8, WIDTH, BLOCK_SIZE, CPU)
    graphs = all_graphs(executor.forward, [run_again] * 3, loaded, tables, **sizes)
    runner = ModelRunner(executor, CPU, BLOCK_SIZE, sample_ids=Plain().sample_ids, **graphs)
    for of_kind in runner._sized:
        assert of_kind.find(lambda size: True, [adapters[1], adapters[2], adapters[3]]) is None
        with torch.inference_mode():
            assert of_kind.capture_next(only_wanted=True)
    return with_adapters(runner, adapters)


@pytest.mark.parametrize("name", STEPS)
def test_prompts_with_adapters_are_replayed_alone_and_beside_decodes(
    loaded: LoadedModel, adapters: dict[int, Adapter], mixed: ModelRunner, name: str
) -> None:
    decoding, arriving = STEPS[name]
    sequences = [
        sequence_of([(11 * n + 7 * i) % 97 for i in range(5 + n)], [n], temperature=0.0, adapter=adapter)
        for n, adapter in enumerate([*decoding, *arriving])
    ]
    before = [Chunk(one, 0, one.prompt_len - 1, max_draws=0) for one in sequences[: len(decoding)]]
    decodes = [Chunk(one, one.prompt_len - 1, 1) for one in sequences[: len(decoding)]]
    step = Step([*decodes, *(Chunk(one, 0, one.prompt_len) for one in sequences[len(decoding) :])])
    expected = plain_runner(loaded, adapters)
    for runner in (mixed, expected) if before else ():
        runner.collect(runner.launch(Step(before)))
    check_replayed(mixed, expected, step)
