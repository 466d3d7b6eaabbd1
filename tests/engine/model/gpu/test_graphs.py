"""Replayed decode steps draw the same tokens as eager steps, for all sizes, with padding and with overlap."""

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.config import EngineOptions
from oaiserve.engine.media import PromptMedia
from oaiserve.engine.model import runner as runner_module
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import Run
from oaiserve.engine.model.gpu.graphs import DecodeGraphs
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.runner import Launched, ModelRunner
from oaiserve.engine.model.transfer import pack, unpack
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.start.gpu.graph_capture import graph_memory_bytes, ladder
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.engine_runs import run, some_requests
from tests.engine.model.gpu.graphs import Plain, padded_attention, record, run_again
from tests.engine.model.runners import eager_runner, states_of
from tests.engine.model.steps import sequence_of
from tests.models.decoders import FAMILIES, LLAMA_OF_ONE_LAYER, random_model
from tests.models.small_configs import config_of

BLOCK_SIZE = 4
MAX_LEN = 48
SIZES = [1, 2, 4, 8]
LIMITS = {"max_running": SIZES[-1], "max_step_tokens": 16}
FEW_EDITED = 0.1  # so that most steps have no request that edits logits or asks for log-probabilities
WITH_STATES = ("mamba2", "falcon_h1", "qwen3_next", "lfm2")


def with_cache(loaded: LoadedModel, num_blocks: int, backend: Any = padded_attention) -> EagerExecutor:
    return EagerExecutor.with_cache(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, backend=backend)


class GraphRunner(ModelRunner):
    """A runner on a CPU that counts its steps. It has graphs for `sizes`, at first for the largest alone. With
    `overlap`, steps overlap as on a GPU."""

    def __init__(self, loaded: LoadedModel, *, num_blocks: int, sizes: list[int], overlap: bool = False) -> None:
        executor, states = with_cache(loaded, num_blocks + 1), states_of(loaded)
        self.sampler = Plain()
        self.graphs = make_graphs(executor, loaded, sizes, self.sampler, states=states)
        of_graphs = {"sample_ids": self.sampler.sample_ids, "graphs": self.graphs, "tables": self.graphs.tables}
        super().__init__(executor, loaded.device, BLOCK_SIZE, states=states, **of_graphs)
        self.is_asynchronous = overlap
        self.num_steps = 0
        self.num_unknown = 0

    def launch(self, step: Step) -> Launched:
        self.num_steps += 1
        self.num_unknown += any(chunk.start >= len(chunk.sequence.token_ids) for chunk in step.chunks)
        return super().launch(step)


def make_graphs(
    executor: Executor,
    loaded: LoadedModel,
    sizes: list[int],
    sampler: Any,
    capture: Callable[[Run], Run] = record,
    **arguments: Any,
) -> DecodeGraphs:
    sized = {"sizes": sizes, "first": sizes[-1:], "block_size": BLOCK_SIZE, "max_model_len": MAX_LEN}
    tables = BlockTables(max(sizes[-1], len(KINDS)), MAX_LEN // BLOCK_SIZE, BLOCK_SIZE, loaded.device)
    return DecodeGraphs(executor.forward, sampler, capture, loaded, tables, **sized, **arguments)


# -- through the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlap"])
@pytest.mark.parametrize("num_blocks", [200, 24], ids=["much memory", "little memory"])
def test_answers_are_the_same_with_graphs_also_while_they_are_captured(
    loaded: LoadedModel, num_blocks: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "STEPS_BETWEEN_CAPTURES", 3)
    requests = some_requests(1, 60, FEW_EDITED)
    expected = run(loaded, plain_runner(loaded, 200), requests, 200, **LIMITS)
    runner = GraphRunner(loaded, num_blocks=num_blocks, sizes=SIZES, overlap=overlap)
    replays: list[int] = []
    launch = runner.graphs.launch
    runner.graphs.launch = lambda step, *drawn: replays.append(len(step.chunks)) or launch(step, *drawn)
    run(loaded, runner, requests, num_blocks, **LIMITS).check(expected)
    assert len(set(replays)) >= 3, "there are steps of several sizes"
    assert len(replays) > runner.num_steps / 5
    assert (runner.num_unknown > len(replays) / 3) == overlap
    assert "sample_ids" in runner.sampler.used
    assert runner.num_captured > 1, "what steps wanted was captured between them"


@pytest.mark.parametrize("family", [*sorted(FAMILIES), *WITH_STATES])
def test_answers_of_every_family_are_the_same_with_graphs(family: str) -> None:
    loaded = prepare(random_model(FAMILIES.get(family) or config_of(family)))
    requests = some_requests(2, 10, FEW_EDITED)
    expected = run(loaded, plain_runner(loaded, 200), requests, 200, **LIMITS)
    runner = GraphRunner(loaded, num_blocks=200, sizes=[4, 8], overlap=True)
    launch = Mock(wraps=runner.graphs.launch)
    with patch.object(runner.graphs, "launch", launch):
        run(loaded, runner, requests, 200, **LIMITS).check(expected)
    assert launch.call_count > runner.num_steps / 5


# -- step by step -----------------------------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0},
    {},
    {"min_p": 0.1},
    {"top_k": 5},
    {"top_p": 0.7},
    {"logprobs": 1},
    {"logit_bias": {3: 2.0}},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"frequency_penalty": 1.1, "logprobs": 1},
]
NUM_BLOCKS = len(KINDS) * MAX_LEN // BLOCK_SIZE


def sequences_for_steps() -> list[Sequence]:
    """Return one sequence of each kind, with blocks for `MAX_LEN` tokens."""
    return [
        sequence_of(
            [(5 * i + j) % 97 for j in range(3 + i)],
            [len(KINDS) * j + i for j in range(MAX_LEN // BLOCK_SIZE)],
            name=str(i),
            max_len=MAX_LEN,
            draw_key=i,
            **params,
        )
        for i, params in enumerate(KINDS)
    ]


def media_of(sequence: Sequence) -> PromptMedia:
    """Return media behind which positions are lower."""
    return PromptMedia((), array("i"), array("i", range(sequence.prompt_len)) * 3, delta=-2)


class Drive:
    """Launches steps of some sequences. With `overlap`, it launches a step before it collects the one before."""

    def __init__(self, runner: ModelRunner, *, overlap: bool, has_media: bool = False) -> None:
        self.runner = runner
        self.sequences = sequences_for_steps()
        for sequence in self.sequences[1:6:2] if has_media else []:
            sequence.media = media_of(sequence)
        self.overlap = overlap
        self._launched: Launched | None = None
        self.step([(i, 0, sequence.prompt_len) for i, sequence in enumerate(self.sequences)])

    def decode(self, indices: list[int]) -> None:
        self.step([(i, self.sequences[i].num_tokens - 1, 1) for i in indices])

    def step(self, parts: list[tuple[int, int, int]]) -> None:
        chunks = [Chunk(self.sequences[i], start, num_tokens) for i, start, num_tokens in parts]
        launched = self.runner.launch(Step(chunks))
        for sequence, *_ in chunks:
            sequence.num_tokens += 1
        before, self._launched = self._launched, launched
        if before is not None:
            self._collect(before)
        self.runner.draw(launched)
        if not self.overlap:
            self.settle()

    def settle(self) -> None:
        if self._launched is not None:
            self._collect(self._launched)
            self._launched = None

    def _collect(self, launched: Launched) -> None:
        for chunk, result in zip(launched.step.chunks, self.runner.collect(launched).chunks, strict=True):
            (token_id,) = result.token_ids
            chunk.sequence.token_ids.append(token_id)

    @property
    def answers(self) -> list[list[int]]:
        self.settle()
        return [sequence.generated_ids for sequence in self.sequences]


def plain_runner(loaded: LoadedModel, num_blocks: int = NUM_BLOCKS, **of_graphs: Any) -> ModelRunner:
    return eager_runner(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, **of_graphs)


@pytest.fixture(scope="module")
def runners(loaded: LoadedModel) -> tuple[ModelRunner, GraphRunner]:
    """Return a runner without graphs, and one with graphs."""
    loaded.model.config.rope_axes = [0] * (loaded.kv_shapes[0].key_dim // 2)
    return plain_runner(loaded), GraphRunner(loaded, num_blocks=NUM_BLOCKS, sizes=SIZES)


def test_only_plain_decodes_are_replayed(runners: tuple[ModelRunner, GraphRunner]) -> None:
    graphs = runners[1].graphs
    first, second = sequences_for_steps()[:2]
    decode = Chunk(first, 2, 1)
    assert graphs.num_replayed(Step([decode, Chunk(second, 3, 1)])) == 2
    assert graphs.num_replayed(Step([decode, Chunk(second, 0, 4)])) == 1
    assert graphs.num_replayed(Step([Chunk(second, 0, 4)])) == 0
    assert graphs.num_replayed(Step([decode, Chunk(second, 2, 1, max_draws=0)])) == 0
    assert graphs.num_replayed(Step([decode] * (SIZES[-1] + 1))) == 0
    second.media = media_of(second)
    assert graphs.num_replayed(Step([decode, Chunk(second, 4, 1)])) == 2, "it is behind the image"
    assert graphs.num_replayed(Step([decode, Chunk(second, 3, 1)])) == 0, "its embedding may be a vector"
    second.media, second.wants_prompt_logprobs = None, True
    assert graphs.num_replayed(Step([decode, Chunk(second, 3, 1)])) == 0


@settings(max_examples=16)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=SIZES[-1], unique=True),
            st.lists(st.integers(1, 6), max_size=2),
        ),
        min_size=1,
        max_size=8,
    ),
    overlap=st.booleans(),
)
def test_decodes_are_replayed_alone_and_beside_prompts_and_all_draw_the_same_tokens(
    runners: tuple[ModelRunner, GraphRunner], steps: list[tuple[list[int], list[int]]], overlap: bool
) -> None:
    """Beside the decodes of a step, sequences are computed anew, whole or in part, as after a preemption."""
    found = []
    for runner, is_overlapping in ((runners[0], False), (runners[1], overlap)):
        drive = Drive(runner, overlap=is_overlapping, has_media=True)
        drive.settle()
        in_flight: set[int] = set()
        for indices, parts in steps:
            decodes = [(i, drive.sequences[i].num_tokens - 1, 1) for i in indices]
            idle = [i for i in range(len(KINDS)) if i not in in_flight.union(indices)]
            prompts = []
            for i, num_more in zip(idle, parts, strict=False):
                length = drive.sequences[i].num_tokens
                num_tokens = min(length, num_more + 1)
                prompts.append((i, length - num_tokens, num_tokens))
            drive.step(decodes + prompts)
            in_flight = {*indices, *(i for i, *_ in prompts)}
        found.append(drive.answers)
    assert found[1] == found[0]


@torch.inference_mode()
def test_a_step_begins_when_its_inputs_are_on_the_device(loaded: LoadedModel) -> None:
    log: list[object] = []

    def capture(run: Run) -> Run:
        run()
        return lambda: log.append("work")

    executor = with_cache(loaded, 200)
    graphs = make_graphs(executor, loaded, [4], Plain(), capture)
    sequence = sequences_for_steps()[3]

    class Began:
        def record(self) -> None:
            log.append(int(graphs._words[graphs._first_input]))

    step = Step([Chunk(sequence, sequence.prompt_len - 1, 1)])
    graphs.launch(step, graphs.tables.update(step), None, {}, Began())
    assert log[0] == sequence.token_ids[-1] != 0
    assert set(log[1:]) == {"work"}


def test_a_row_with_nan_in_its_logits_has_an_error(loaded: LoadedModel) -> None:
    logits = torch.zeros(len(KINDS), loaded.vocab_size)
    logits[torch.arange(len(KINDS)), torch.arange(len(KINDS)) + 10] = 1.0
    logits[1, 50] = float("nan")
    executor = SimpleNamespace(forward=lambda batch: logits[: len(batch.seq_lens)])
    graphs = make_graphs(executor, loaded, [4], Plain())
    runner = plain_runner(loaded, graphs=graphs, tables=graphs.tables)
    chunks = [Chunk(sequence, sequence.prompt_len - 1, 1) for sequence in sequences_for_steps()[:3]]
    for greedy in (True, False):
        results = runner.collect(runner.launch(Step(chunks[: 2 if greedy else 3]))).chunks
        assert [result.error is None for result in results] == [True, False, True][: len(results)]
        assert results[0].token_ids == [10]


# -- with Triton's kernels --------------------------------------------------------------------------------------------


def test_triton_kernels_ignore_padded_rows() -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    loaded = prepare(random_model(LLAMA_OF_ONE_LAYER))
    from oaiserve.engine.model.attention import triton
    from oaiserve.engine.model.sampling import triton_sampling

    expected = Drive(plain_runner(loaded), overlap=False)
    executor = with_cache(loaded, NUM_BLOCKS, triton.TritonAttention)
    graphs = make_graphs(executor, loaded, [4], triton_sampling, run_again)
    of_graphs = {"sample_ids": triton_sampling.sample_ids, "graphs": graphs, "tables": graphs.tables}
    found = Drive(ModelRunner(executor, loaded.device, BLOCK_SIZE, **of_graphs), overlap=True)
    for indices in ([0, 1, 3], [4, 0], [5, 4, 2, 0], [6, 1]):
        expected.decode(indices)
        found.decode(indices)
    assert found.answers == expected.answers


# -- sizes, memory, and the copy to the host --------------------------------------------------------------------------


@given(most=st.integers(1, 2000), num_rows=st.integers(1, 2000))
def test_each_number_of_rows_has_a_size_that_is_not_much_larger(most: int, num_rows: int) -> None:
    sizes = ladder(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    if num_rows <= most:
        size = next(size for size in sizes if size >= num_rows)
        assert size - num_rows < max(8, 0.25 * size)


def test_the_memory_estimate_covers_the_tensors_that_graphs_keep(loaded: LoadedModel) -> None:
    runner = GraphRunner(loaded, num_blocks=8, sizes=[300])
    kept = vars(runner.graphs).values()
    held = sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))
    sizes = {"block_size": BLOCK_SIZE, "max_step_tokens": 600}
    widest = loaded.model.config.intermediate_size
    estimates = [graph_memory_bytes(loaded, EngineOptions(max_running=most, **sizes), widest) for most in (1, 300, 600)]
    assert held < estimates[1] - estimates[0] + 10_000
    assert estimates == sorted(estimates)


def test_unpacked_tensors_equal_the_packed_ones() -> None:
    tensors = [
        torch.tensor([2**40, -1, 7]),
        torch.tensor([True, False, True]),
        torch.tensor([[0.5, float("inf")], [-1.0, 2.0]]).T,
        torch.tensor([[3, 4]]),
    ]
    for some in (tensors, tensors[:1]):
        for tensor, unpacked in zip(some, unpack(pack(some).numpy(), some), strict=True):
            assert unpacked.tolist() == tensor.tolist()
            assert unpacked.shape == tuple(tensor.shape)
