"""Replayed prompts give the same logits as those that are launched one operation after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import Run
from oaiserve.engine.model.gpu.graphs import DecodeGraphs
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.start.gpu.graph_capture import Captured, capture_prompts, token_ladder
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.gpu.graphs import Plain, run_again
from tests.engine.model.steps import sequence_of
from tests.models.decoders import LLAMA_OF_ONE_LAYER, random_model

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.model.attention.triton import TritonAttention
from oaiserve.engine.model.gpu.prompt_graphs import MOST_PROMPTS, PromptGraphs

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, WIDTH = 4, 64, 12
SIZES = [8, 24]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return prepare(random_model(LLAMA_OF_ONE_LAYER))  # each takes a while in Triton's interpreter


@pytest.fixture(scope="module")
def made(loaded: LoadedModel) -> tuple[EagerExecutor, PromptGraphs, BlockTables]:
    executor = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, backend=TritonAttention)
    tables = BlockTables(MOST_PROMPTS + 1, WIDTH, BLOCK_SIZE, CPU)
    graphs = PromptGraphs(executor.forward, run_again, loaded, tables, sizes=SIZES, block_size=BLOCK_SIZE)
    return executor, graphs, tables


def sequence(number: int, length: int, **params: Any) -> Sequence:
    ids = [(11 * number + 7 * i) % 97 for i in range(length)]
    blocks = [WIDTH * number + i for i in range(-(-(length + 1) // BLOCK_SIZE))]
    return sequence_of(ids, blocks, name=f"r{number}", draw_key=number, temperature=0.0, **params)


def chunks() -> list[list[Chunk]]:
    """Return the chunks of some steps: whole prompts, parts of one, the rest of one, and prompts of one token."""
    first, second, third, fourth = sequence(0, 5), sequence(1, 17), sequence(2, 3), sequence(3, 1)
    return [
        [Chunk(first, 0, 5)],
        [Chunk(second, 0, 9, max_draws=0), Chunk(third, 0, 3)],
        [Chunk(fourth, 0, 1), Chunk(second, 9, 8)],
        [Chunk(second, 16, 1), Chunk(first, 2, 3), Chunk(third, 0, 3)],
    ]


def test_replayed_prompts_draw_the_same_tokens(
    loaded: LoadedModel, made: tuple[EagerExecutor, PromptGraphs, BlockTables]
) -> None:
    executor, graphs, tables = made
    plain = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    expected = ModelRunner(plain, CPU, BLOCK_SIZE)
    runner = ModelRunner(executor, CPU, BLOCK_SIZE, prompt_graphs=graphs, tables=tables)
    launch = Mock(wraps=graphs.launch)
    with patch.object(graphs, "launch", launch):
        for of_step in chunks():
            step = Step(of_step)
            launched, want = runner.launch(step), expected.launch(step)
            torch.testing.assert_close(launched.logits, want.logits, rtol=1e-4, atol=1e-4)
            found = [result.token_ids for result in runner.collect(launched).chunks]
            assert found == [result.token_ids for result in expected.collect(want).chunks]
    assert launch.call_count == len(chunks())


def test_only_steps_that_fit_are_replayed(made: tuple[EagerExecutor, PromptGraphs, BlockTables]) -> None:
    graphs, one = made[1], sequence(0, 40)
    assert graphs.can_run(Step([Chunk(one, 0, SIZES[-1])]))
    assert not graphs.can_run(Step([Chunk(one, 0, SIZES[-1] + 1)]))
    assert not graphs.can_run(Step([Chunk(one, 0, 4, draft=(5,))]))
    assert not graphs.can_run(Step([Chunk(one, 40, 1)])), "its token is being drawn"
    assert not graphs.can_run(Step([Chunk(sequence(i, 1), 0, 1) for i in range(MOST_PROMPTS + 1)]))
    one.wants_prompt_logprobs = True
    assert not graphs.can_run(Step([Chunk(one, 0, 4)]))


@pytest.mark.parametrize("is_right", [True, False])
def test_prompts_whose_graphs_compute_something_else_are_not_replayed(
    loaded: LoadedModel, is_right: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))
    executor = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, backend=TritonAttention)
    tables = BlockTables(3, WIDTH, BLOCK_SIZE, CPU)
    capturing = run_again if is_right else lambda run: lambda: None
    with caplog.at_level(logging.WARNING):
        own = Captured(executor, loaded, tables, capturing, NUM_BLOCKS, BLOCK_SIZE, loaded.max_model_len)
        graphs = capture_prompts(own, 16, Trials())
    assert (graphs is not None) == is_right
    warned = ["CUDA graphs of prompts: off"] * (not is_right)
    assert [message.partition(", and their operations")[0] for message in caplog.messages] == warned


@pytest.mark.parametrize("most", [1, 16, 100, 2048, 8192])
def test_each_number_of_tokens_has_a_size_that_is_not_much_larger(most: int) -> None:
    sizes = token_ladder(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 2048)
    assert all(after <= 2 * before for before, after in pairwise(sizes))


def test_a_step_with_prompts_is_three_launches_and_what_draws_for_the_prompts(loaded: LoadedModel) -> None:
    """A forward and a draw for all decodes, and a forward for all prompts; no operation of the model by itself."""
    replays: list[str] = []

    def capturing(what: str) -> Callable[[Run], Run]:
        return lambda run: lambda: replays.append(what)

    def forward(batch: Batch) -> torch.Tensor:
        raise AssertionError("operations are launched one by one")

    tables = BlockTables(8, WIDTH, BLOCK_SIZE, CPU)
    sizes = {"sizes": [4], "block_size": BLOCK_SIZE, "max_model_len": 48}
    decodes = DecodeGraphs(forward, Plain(), capturing("decodes"), loaded, tables, **sizes)
    prompts = PromptGraphs(forward, capturing("prompts"), loaded, tables, sizes=SIZES, block_size=BLOCK_SIZE)
    runner = ModelRunner(
        SimpleNamespace(forward=forward, is_exact=False),
        CPU,
        BLOCK_SIZE,
        graphs=decodes,
        prompt_graphs=prompts,
        tables=tables,
    )
    running = [Chunk(sequence(number, 9), 8, 1) for number in range(3)]
    arriving = [Chunk(sequence(3, 12), 0, 12), Chunk(sequence(4, 6), 0, 6)]
    launched = runner.launch(Step([*running, *arriving]))
    assert replays == ["decodes", "decodes", "prompts"]
    assert [len(result.token_ids) for result in runner.collect(launched).chunks[3:]] == [1, 1]
