"""Replayed steps draw the same tokens as steps launched one operation after the other: any mix, with padding."""

from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.config import EngineOptions
from oaiserve.engine.executors.runner import Launched, ModelRunner
from oaiserve.engine.model.transfer import pack, unpack
from oaiserve.engine.scheduling.progress import planned_draw
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.types.media import PromptMedia
from oaiserve.plugins.cuda.executor.cuda_capture import Run
from oaiserve.plugins.cuda.executor.step_sizes import MOST_PROMPTS, Size, step_sizes
from oaiserve.plugins.cuda.start.memory import graph_memory_bytes
from tests.engine.executors.native.small_models import FAMILIES
from tests.engine.model.engine_runs import run, some_requests
from tests.engine.model.steps import sequence_of
from tests.models.decoders import LLAMA_OF_ONE_LAYER
from tests.models.small_configs import config_of
from tests.plugins.cuda.executor.step_runs import GraphRunner, Model, check_replayed, model_of, plain_runner

BLOCK_SIZE = 4
MAX_LEN = 48
SIZES = [Size(1), Size(4), Size(8), Size(4, 8), Size(4, 24), Size(8, 32)]
LIMITS = {"max_running": 8, "max_step_tokens": 24}
FEW_EDITED = 0.1  # so that most steps have no request that edits logits or asks for log-probabilities
WITH_STATES = ("mamba2", "falcon_h1", "qwen3_next", "lfm2")
OF_FAMILIES = ("deepseek_v3", "gemma3_text", "gemma4_text", "gpt2", "gpt_oss", "qwen3_moe", *WITH_STATES)


@pytest.fixture(scope="module")
def llama() -> Model:
    return model_of(LLAMA_OF_ONE_LAYER)


# -- through the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlap"])
@pytest.mark.parametrize("num_blocks", [200, 24], ids=["much memory", "little memory"])
def test_answers_are_the_same_with_graphs(llama: Model, num_blocks: int, overlap: bool) -> None:
    requests = some_requests(1, 60, FEW_EDITED)
    expected = run(llama.spec, plain_runner(llama, 200, BLOCK_SIZE), requests, 200, **LIMITS)
    runner = GraphRunner(llama, SIZES, num_blocks=num_blocks, block_size=BLOCK_SIZE, overlap=overlap)
    run(llama.spec, runner, requests, num_blocks, **LIMITS).check(expected)
    assert len(set(runner.replayed)) >= 3, "steps of several sizes are replayed"
    assert len(runner.replayed) > runner.num_steps / 2
    assert (runner.num_unknown > runner.num_steps / 4) == overlap
    assert runner.sampler.num_sampled > 0, "other draws are in no graph"


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlap"])
def test_log_probabilities_for_an_observer_leave_replayed_answers_as_they_are(llama: Model, overlap: bool) -> None:
    """Draws with log-probabilities are in no graph, but their steps are."""
    plain = some_requests(1, 60, 0.0)
    observed = [replace(each, params=replace(each.params, logprobs=0, shows_logprobs=False)) for each in plain]
    runners = [GraphRunner(llama, SIZES, num_blocks=200, block_size=BLOCK_SIZE, overlap=overlap) for _ in range(2)]
    expected, answers = (
        run(llama.spec, runner, requests, 200, **LIMITS)
        for runner, requests in zip(runners, (plain, observed), strict=True)
    )
    without_graph, of_observed = (runner.sampler.num_sampled for runner in runners)
    assert without_graph < of_observed
    for runner in runners:
        assert len(runner.replayed) == runner.num_steps
    num_tokens = sum(len(answer.token_ids) for answer in expected.choices.values())
    assert sum(len(answer.logprobs) for answer in answers.choices.values()) == num_tokens
    assert {key: each[:-1] for key, each in answers.choices.items()} == {
        key: each[:-1] for key, each in expected.choices.items()
    }


@pytest.mark.parametrize("family", OF_FAMILIES)
def test_answers_of_families_are_the_same_with_graphs(family: str) -> None:
    model = model_of(FAMILIES.get(family) or config_of(family))
    sizes = [Size(8)] if model.spec.state_shapes else [Size(8), Size(8, 24)]
    requests = some_requests(2, 10, FEW_EDITED)
    expected = run(model.spec, plain_runner(model, 200, BLOCK_SIZE), requests, 200, **LIMITS)
    runner = GraphRunner(model, sizes, num_blocks=200, block_size=BLOCK_SIZE, overlap=True)
    run(model.spec, runner, requests, 200, **LIMITS).check(expected)
    assert set(runner.replayed) == set(sizes)


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
    """Return media after which positions are lower."""
    return PromptMedia((), array("i"), array("i", range(sequence.prompt_len)) * 3, delta=-2)


class Drive:
    """Launches steps of some sequences. With `overlap`, it launches a step before it collects the one before."""

    def __init__(self, runner: ModelRunner, *, overlap: bool) -> None:
        self.runner = runner
        self.sequences = sequences_for_steps()
        for sequence in self.sequences[1:6:2]:
            sequence.media = media_of(sequence)
        self.overlap = overlap
        self._launched: Launched | None = None
        self.step([(i, 0, sequence.prompt_len) for i, sequence in enumerate(self.sequences)])
        self.settle()

    def step(self, parts: list[tuple[int, int, int]]) -> None:
        chunks = [
            Chunk(sequence := self.sequences[i], start, number, draw=planned_draw(sequence, start + number))
            for i, start, number in parts
        ]
        launched = self.runner.launch(Step(chunks))
        for sequence, *_ in chunks:
            sequence.num_tokens += 1
        before = self._launched
        self._launched = launched
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


@pytest.fixture(scope="module")
def runners(llama: Model) -> tuple[ModelRunner, GraphRunner]:
    """Return a runner without graphs, and one with graphs."""
    plain = plain_runner(llama, NUM_BLOCKS, BLOCK_SIZE)
    return plain, GraphRunner(llama, SIZES, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def test_steps_that_fit_are_replayed(runners: tuple[ModelRunner, GraphRunner]) -> None:
    graphs = runners[1].graphs
    first, second, third = sequences_for_steps()[:3]
    long = sequence_of([5] * 40, range(10))
    decode = Chunk(first, 2, 1)
    assert graphs.find(Step([decode, Chunk(second, 3, 1)])) == Size(4)
    assert graphs.find(Step([decode] * 9)) is None
    assert graphs.find(Step([Chunk(second, 0, 4)])) == Size(4, 8)
    assert graphs.find(Step([Chunk(long, 0, 24)])) == Size(4, 24)
    assert graphs.find(Step([Chunk(long, 0, 33)])) is None
    assert graphs.find(Step([decode, Chunk(second, 0, 4), Chunk(third, 0, 3)])) == Size(4, 8)
    assert graphs.find(Step([decode, Chunk(second, 0, 4), Chunk(third, 0, 4)])) == Size(4, 24)
    assert graphs.find(Step([*[decode] * 5, Chunk(second, 0, 3)])) == Size(8, 32), "it has more than four decodes"
    assert graphs.find(Step([*[decode] * 9, Chunk(second, 0, 3)])) is None
    assert graphs.find(Step([decode, Chunk(second, 2, 1, max_draws=0)])) == Size(4), "it is the rest of a prompt"
    assert graphs.find(Step([Chunk(long, 38, 4, draft=(5, 6))])) == Size(4, 8)
    drafting = Chunk(long, 38, 5, 5, (5, 6, 7, 8))
    assert graphs.find(Step([drafting] * 4)) == Size(4, 24)
    many = Chunk(long, 0, 4, draft=(5,) * (MOST_PROMPTS + 3))
    assert graphs.find(Step([many])) == Size(4, 8), "decodes that are not there leave room for draws"
    assert graphs.find(Step([decode, many])) == Size(8, 32)
    assert graphs.find(Step([*[decode] * 5, many])) is None, "there are too many draws"
    second.media = media_of(second)
    assert graphs.find(Step([decode, Chunk(second, 4, 1)])) == Size(4), "it is behind the image"
    assert graphs.find(Step([decode, Chunk(second, 3, 1)])) is None, "its embedding may be a vector"
    assert graphs.find(Step([Chunk(second, 0, 4)])) is None, "its embeddings may be vectors"
    second.media = None
    second.wants_prompt_logprobs = True
    assert graphs.find(Step([decode, Chunk(second, 3, 1)])) is None


@settings(max_examples=24)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=8, unique=True),
            st.lists(st.integers(1, 12), max_size=2),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=8,
    ),
    overlap=st.booleans(),
)
def test_decodes_alone_and_beside_prompts_draw_the_same_tokens(
    runners: tuple[ModelRunner, GraphRunner], steps: list[tuple[list[int], list[int], int]], overlap: bool
) -> None:
    """Next to the decodes of a step, sequences are recomputed, whole or in part, as after a preemption. Then the
    decodes go on alone for some steps."""
    found = []
    for runner, is_overlapping in ((runners[0], False), (runners[1], overlap)):
        drive = Drive(runner, overlap=is_overlapping)
        in_flight: set[int] = set()
        for indices, parts, times in steps:
            decodes = [(i, drive.sequences[i].num_tokens - 1, 1) for i in indices]
            idle = [i for i in range(len(KINDS)) if i not in in_flight.union(indices)]
            prompts = []
            for i, num_more in zip(idle, parts, strict=False):
                length = drive.sequences[i].num_tokens
                num_tokens = min(length, num_more + 1)
                prompts.append((i, length - num_tokens, num_tokens))
            drive.step(decodes + prompts)
            in_flight = {*indices, *(i for i, *_ in prompts)}
            for _ in range(times - 1):
                drive.step([(i, drive.sequences[i].num_tokens - 1, 1) for i in indices])
                in_flight = {*indices}
        found.append(drive.answers)
    assert found[1] == found[0]


def text(number: int, length: int) -> Sequence:
    ids = [(11 * number + 7 * i) % 97 for i in range(length)]
    blocks = [12 * number + i for i in range(-(-(length + 4) // BLOCK_SIZE))]
    return sequence_of(ids, blocks, name=f"r{number}", draw_key=number, temperature=0.0)


def test_a_draft_is_verified_in_a_graph(runners: tuple[ModelRunner, GraphRunner]) -> None:
    one = text(0, 9)
    two = text(1, 6)
    for runner in runners:
        runner.collect(runner.launch(Step([Chunk(one, 0, 8, max_draws=0), Chunk(two, 0, 5, max_draws=0)])))
    step = Step([Chunk(one, 8, 1), Chunk(two, 5, 4, draft=(9, 3, 7))])
    assert check_replayed(runners[1], runners[0], step).sample_chunks == [0, 1, 1, 1, 1]


def test_prompts_in_parts_draw_after_their_last_part_alone(runners: tuple[ModelRunner, GraphRunner]) -> None:
    one = text(2, 17)
    two = text(3, 3)
    for step in (
        Step([Chunk(one, 0, 9, max_draws=0), Chunk(two, 0, 3)]),
        Step([Chunk(one, 9, 7, max_draws=0)]),
        Step([Chunk(one, 16, 1)]),
    ):
        check_replayed(runners[1], runners[0], step)


@torch.inference_mode()
def test_a_step_begins_when_its_inputs_are_on_the_device(llama: Model) -> None:
    log: list[object] = []

    def capture(run: Run) -> Run:
        run()
        return lambda: log.append("work")

    runner = GraphRunner(llama, [Size(4)], num_blocks=200, block_size=BLOCK_SIZE, capture=capture)
    graphs = runner.graphs
    sequence = sequences_for_steps()[3]

    class Began:
        def record(self) -> None:
            log.append(int(graphs._words[graphs._inputs[Size(4)].begin]))

    chunk = Chunk(sequence, sequence.prompt_len - 1, 1)
    step = Step([chunk])
    graphs.launch(Size(4), step, [chunk], graphs.tables.update(step), None, {}, Began())
    assert log == [sequence.token_ids[-1], "work"]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 5}], ids=str)
def test_a_row_with_nan_in_its_logits_has_an_error(llama: Model, params: dict[str, Any]) -> None:
    weight = llama.decoder.head.weight.clone()
    weight[50] = float("nan")
    broken = Model(llama.spec, replace(llama.decoder, head=replace(llama.decoder.head, weight=weight)))
    runner = GraphRunner(broken, [Size(4)], num_blocks=200, block_size=BLOCK_SIZE)
    sequences = [sequence_of([5, 6, 7], [place], draw_key=place, **params) for place in range(3)]
    results = runner.collect(runner.launch(Step([Chunk(one, 2, 1) for one in sequences]))).chunks
    assert [bool(result.error) for result in results] == [True] * 3
    assert runner.replayed == [Size(4)]


def test_triton_kernels_ignore_padding(llama: Model) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    from oaiserve.plugins.cuda.executor import triton_sampling
    from oaiserve.plugins.cuda.executor.triton_attention import TritonAttention

    expected = Drive(plain_runner(llama, NUM_BLOCKS, BLOCK_SIZE), overlap=False)
    sizes = [Size(4), Size(4, 16), Size(4, 28)]
    own = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "attention": TritonAttention}
    runner = GraphRunner(llama, sizes, sampler=triton_sampling, **own)
    found = Drive(runner, overlap=True)
    for indices, prompts in (([0, 1, 3], []), ([4, 0], [2, 6]), ([5, 2], [8]), ([], [4, 0]), ([6, 1], [])):
        for drive in (expected, found):
            drive.settle()
            lengths = [sequence.num_tokens for sequence in drive.sequences]
            drive.step([(i, lengths[i] - 1, 1) for i in indices] + [(i, 0, lengths[i]) for i in prompts])
    assert found.answers == expected.answers
    assert set(runner.replayed) == set(sizes)


# -- sizes, memory, and the copy to the host --------------------------------------------------------------------------


@given(most=st.integers(1, 1000), num_rows=st.integers(0, 1000), num_tokens=st.integers(2, 2048))
def test_each_step_has_a_size_that_is_not_much_larger(most: int, num_rows: int, num_tokens: int) -> None:
    sizes = step_sizes(most, 2048)
    assert sizes == sorted(set(sizes), key=lambda size: (size.num_tokens, size))
    assert all(size.rows <= min(most, size.num_tokens) for size in sizes)
    num_rows = min(num_rows, most)
    decodes = [size.rows for size in sizes if not size.tokens and size.rows >= num_rows]
    assert decodes[0] - num_rows < max(8, 0.25 * decodes[0])
    total = num_rows + num_tokens
    fits = [size.tokens for size in sizes if size.tokens >= total and size.rows >= num_rows]
    assert bool(fits) == (total <= 2048)
    if fits:
        assert fits[0] - total < max(32, total / 16)


def test_few_sizes_are_captured_and_fewer_with_states_or_short_steps() -> None:
    assert len(step_sizes(256, 2048)) == 105
    assert step_sizes(4, 24) == [Size(1), Size(2), Size(4), Size(4, 16), Size(4, 24)]
    assert step_sizes(3, 2048, has_states=True) == [Size(1), Size(2), Size(3)]


def test_the_memory_estimate_covers_the_tensors_that_graphs_keep(llama: Model) -> None:
    runner = GraphRunner(llama, step_sizes(300, 600), num_blocks=8, block_size=BLOCK_SIZE)
    held = sum(value.nbytes for value in vars(runner.graphs).values() if isinstance(value, torch.Tensor))
    sizes = {"block_size": BLOCK_SIZE, "max_step_tokens": 600}
    estimates = [graph_memory_bytes(llama.spec, EngineOptions(max_running=most, **sizes), 64) for most in (1, 300, 600)]
    assert held < estimates[1] - estimates[0] + 40_000
    assert estimates == sorted(estimates)
    with_blocks = graph_memory_bytes(llama.spec, EngineOptions(max_running=1, **sizes), 64, largest_packed=1000)
    assert with_blocks == estimates[0] + 1000 * llama.spec.dtype.itemsize, "products with many rows unpack a matrix"


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
