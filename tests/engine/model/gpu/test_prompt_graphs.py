"""Replayed prompts give the same logits as those that are launched one operation after the other."""

import logging
from array import array
from collections.abc import Callable
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from oaiserve.engine.media import PromptMedia
from oaiserve.engine.model.attention.long_prompts import LongPrompts
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import Run
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.start.gpu.graph_capture import (
    Captured,
    capture_mixed,
    capture_prompts,
    ladder,
    mixed_sizes,
    token_ladder,
)
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.gpu.graphs import Plain, all_graphs, check_replayed, run_again
from tests.engine.model.runners import eager_runner
from tests.engine.model.steps import sequence_of
from tests.models.decoders import LLAMA_OF_ONE_LAYER, random_model

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.model.attention.triton import TritonAttention
from oaiserve.engine.model.gpu.prompt_graphs import MOST_PROMPTS

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, WIDTH = 4, 64, 12
SIZES = [8, 24]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return prepare(random_model(LLAMA_OF_ONE_LAYER))  # each takes a while in Triton's interpreter


@pytest.fixture(scope="module")
def mixed(loaded: LoadedModel) -> ModelRunner:
    """Return a runner with graphs for up to four decodes beside up to 24 prompt tokens."""
    executor = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, backend=TritonAttention)
    sizes = {"decodes": [1, 4], "prompts": SIZES, "block_size": BLOCK_SIZE, "max_model_len": 48}
    tables = BlockTables(MOST_PROMPTS + 1, WIDTH, BLOCK_SIZE, CPU)
    graphs = all_graphs(executor.forward, [run_again] * 3, loaded, tables, **sizes)
    return ModelRunner(executor, CPU, BLOCK_SIZE, sample_ids=Plain().sample_ids, **graphs)


@pytest.fixture
def expected(loaded: LoadedModel) -> ModelRunner:
    """Return a runner without graphs."""
    return eager_runner(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


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


def test_replayed_prompts_draw_the_same_tokens(mixed: ModelRunner, expected: ModelRunner) -> None:
    graphs, tables = mixed._prompt_graphs, mixed._tables
    runner = ModelRunner(mixed._executor, CPU, BLOCK_SIZE, prompt_graphs=graphs, tables=tables)
    for of_step in chunks():
        check_replayed(runner, expected, Step(of_step))


def test_only_steps_that_fit_are_replayed(mixed: ModelRunner) -> None:
    graphs, one = mixed._prompt_graphs, sequence(0, 40)
    assert graphs.can_run(Step([Chunk(one, 0, SIZES[-1])]))
    assert not graphs.can_run(Step([Chunk(one, 0, SIZES[-1] + 1)]))
    assert graphs.can_run(Step([Chunk(one, 38, 4, draft=(5, 6))]))
    assert not graphs.can_run(Step([Chunk(one, 39, 4, draft=(5, 6))])), "its token is being drawn"
    assert not graphs.can_run(Step([Chunk(one, 0, 4, draft=(5,) * MOST_PROMPTS)])), "there are too many draws"
    assert not graphs.can_run(Step([Chunk(one, 40, 1)])), "its token is being drawn"
    assert not graphs.can_run(Step([Chunk(sequence(i, 1), 0, 1) for i in range(MOST_PROMPTS + 1)]))
    graphs.long_prompts = LongPrompts(Mock(), least_tokens=4, least_keys=20)
    assert not graphs.can_run(Step([Chunk(one, 16, 4)])), "it is long"
    assert graphs.can_run(Step([Chunk(one, 15, 4)]))
    assert graphs.can_run(Step([Chunk(one, 16, 4), Chunk(one, 30, 3)])), "a short one is beside it"
    graphs.long_prompts = None
    one.media = PromptMedia((), array("i"))
    assert not graphs.can_run(Step([Chunk(one, 38, 2)])), "its embeddings may be vectors"
    one.media, one.wants_prompt_logprobs = None, True
    assert not graphs.can_run(Step([Chunk(one, 0, 4)]))


def captured(loaded: LoadedModel, mixed: ModelRunner, is_right: bool, monkeypatch: pytest.MonkeyPatch) -> Captured:
    """Return what graphs are captured of. Unless `is_right`, they compute nothing."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))
    capturing, sizes = run_again if is_right else lambda run: lambda: None, (NUM_BLOCKS, BLOCK_SIZE)
    return Captured(mixed._executor, loaded, mixed._tables, capturing, *sizes, loaded.max_model_len)


@pytest.mark.parametrize("is_right", [True, False])
def test_prompts_whose_graphs_compute_something_else_are_not_replayed(
    loaded: LoadedModel,
    mixed: ModelRunner,
    is_right: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        graphs = capture_prompts(captured(loaded, mixed, is_right, monkeypatch), 16, Trials())
    assert (graphs is not None) == is_right
    warned = ["CUDA graphs of prompts: off"] * (not is_right)
    assert [message.partition(", and their operations")[0] for message in caplog.messages] == warned


@pytest.mark.parametrize("most", [1, 16, 100, 2048, 8192])
def test_each_number_of_tokens_has_a_size_that_is_not_much_larger(most: int) -> None:
    sizes = token_ladder(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 2048)
    assert all(after <= 2 * before for before, after in pairwise(sizes))


STEPS = {
    "a decode beside a prompt": ([9], [(0, 5)]),
    "decodes of several lengths beside prompts": ([3, 9, 1], [(0, 7), (4, 6)]),
    "as many as fit": ([2, 5, 8, 11], [(0, 20), (1, 3)]),
    "the rest of a prompt is one token": ([6], [(5, 1), (0, 8)]),
}


@pytest.mark.parametrize("name", STEPS)
def test_decodes_and_prompts_of_a_step_are_one_forward_with_the_same_logits(
    mixed: ModelRunner, expected: ModelRunner, name: str
) -> None:
    decodes, prompts = STEPS[name]
    last = [Chunk(sequence(number, length), length - 1, 1) for number, length in enumerate(decodes)]
    rest = [
        Chunk(sequence(len(decodes) + number, start + count), start, count)
        for number, (start, count) in enumerate(prompts)
    ]
    before = [Chunk(chunk.sequence, 0, chunk.start, max_draws=0) for chunk in (*last, *rest) if chunk.start]
    step = Step(sorted([*last, *rest], key=lambda chunk: chunk.num_tokens > 1))
    for runner in (mixed, expected):
        runner.collect(runner.launch(Step(before)))
    upload = Mock(wraps=mixed._mixed_graphs.upload)
    with patch.object(mixed._mixed_graphs, "upload", upload):
        check_replayed(mixed, expected, step)
    assert upload.call_count == 1


def test_a_draft_is_verified_in_a_graph(mixed: ModelRunner, expected: ModelRunner) -> None:
    one, two = sequence(0, 9), sequence(1, 6)
    two.blocks += [WIDTH + 2]  # for the draft
    step = Step([Chunk(one, 8, 1), Chunk(two, 5, 4, draft=(9, 3, 7))])
    before = Step([Chunk(one, 0, 8, max_draws=0), Chunk(two, 0, 5, max_draws=0)])
    for runner in (mixed, expected):
        runner.collect(runner.launch(before))
    assert check_replayed(mixed, expected, step).sample_chunks == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("is_right", [True, False])
def test_graphs_of_both_that_compute_something_else_are_not_replayed(
    loaded: LoadedModel, mixed: ModelRunner, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, trials = captured(loaded, mixed, is_right, monkeypatch), Trials()
    graphs = capture_mixed(own, mixed._graphs, mixed._prompt_graphs, trials)
    assert (graphs is not None) == is_right
    assert bool(trials.off["mixed_graphs"]) != is_right
    assert capture_mixed(own, None, mixed._prompt_graphs, trials) is None


def test_pairs_of_sizes_are_few() -> None:
    assert mixed_sizes([1, 2, 4, 8], [16, 32, 64]) == [(8, 64)]
    rows, tokens = [64, 128, 192, 256], [64, 128, 192, 256, 384]
    assert mixed_sizes(ladder(256), token_ladder(2048)) == list(product(rows, tokens))
    assert mixed_sizes(ladder(100), token_ladder(16)) == [(64, 16), (100, 16)]


@pytest.mark.parametrize("is_mixed", [True, False])
def test_a_step_with_prompts_is_few_launches_and_what_draws_for_the_prompts(
    loaded: LoadedModel, is_mixed: bool
) -> None:
    """A forward for all, and a draw for all decodes; or two forwards. No operation of the model is by itself."""
    replays: list[str] = []

    def capturing(what: str) -> Callable[[Run], Run]:
        return lambda run: lambda: replays.append(what)

    def forward(batch: Batch) -> torch.Tensor:
        raise AssertionError("operations are launched one by one")

    tables, captures = BlockTables(8, WIDTH, BLOCK_SIZE, CPU), [*map(capturing, ("decodes", "prompts", "both"))]
    sizes = {"decodes": [4], "prompts": SIZES, "block_size": BLOCK_SIZE, "max_model_len": 48}
    graphs = all_graphs(forward, captures, loaded, tables, **sizes)
    if not is_mixed:
        del graphs["mixed_graphs"]
    runner = ModelRunner(SimpleNamespace(forward=forward, is_exact=False), CPU, BLOCK_SIZE, **graphs)
    running = [Chunk(sequence(number, 9), 8, 1) for number in range(3)]
    arriving = [Chunk(sequence(3, 12), 0, 12), Chunk(sequence(4, 6), 0, 6)]
    launched = runner.launch(Step([*running, *arriving]))
    assert replays == (["both", "decodes"] if is_mixed else ["decodes", "decodes", "prompts"])
    assert [len(result.token_ids) for result in runner.collect(launched).chunks[3:]] == [1, 1]
