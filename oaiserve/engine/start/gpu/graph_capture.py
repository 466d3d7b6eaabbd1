"""Captures decodes and prompts as CUDA graphs, and compares what they compute: which sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.adapters import Adapter, probe_adapter
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import Capture
from oaiserve.engine.model.gpu.graphs import DecodeGraphs
from oaiserve.engine.model.gpu.mixed_graphs import MixedGraphs
from oaiserve.engine.model.gpu.prompt_graphs import PromptGraphs
from oaiserve.engine.model.rehearsal import prompts_and_decodes
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.start.compare import Difference, difference, tolerance
from oaiserve.engine.start.gpu.trials import FEATURES, Feature, Trials
from oaiserve.engine.start.started import GPU_STEP_TOKENS
from oaiserve.engine.step import Step
from oaiserve.facts.times import monotonic_ns

if TYPE_CHECKING:  # which needs Triton
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

log = logging.getLogger(__name__)

T = TypeVar("T", DecodeGraphs, PromptGraphs, MixedGraphs)
MIXED_ROWS, MIXED_TOKENS = 64, (64, 128, 192, 256, 384)  # a multiple of decodes, and the prompt tokens beside them
# Those that are captured at the start, beside the largest one. Others follow while the engine serves.
FIRST_SIZES = frozenset({1, 4, 16, 64, 256, 1024})
COMPARED_LENGTHS = (9, 40, 17)  # of the sequences whose replayed steps are compared
# These estimate the memory that graphs take. All graphs share one pool, whose size follows from the largest graph.
LAYER_BYTES = 64 << 10  # what the driver keeps for the launches of one layer, in each forward
POOL_BYTES = 96 << 20  # hidden states of the largest graph, cuBLAS's workspace, and fragmentation
WIDE_TENSORS = 4  # tensors of a layer that are there at once, each as wide as the widest
DRAW_BYTES = 12  # for each logit: its weight, and a candidate's weight and id for top_k and top_p


def ladder(most: int) -> list[int]:
    """Return the numbers of rows to capture, ascending, so that each number up to `most` has a size not much larger.

    A row of padding reads no keys, and up to some hundred rows a matrix product takes as long as reading its weights.
    So a few rows of padding cost hardly any time, while each further size takes some 50 ms to capture.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 64)]
    return [size for size in sizes if size < most] + [most]


def token_ladder(most: int) -> list[int]:
    """Return the numbers of prompt tokens to capture, ascending, up to the most that a step has.

    A token of padding costs what any other does, except for attention, so larger sizes are closer to each other.
    """
    sizes = [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    most = min(most, sizes[-1])
    return [size for size in sizes if size < most] + [most]


def mixed_sizes(row_sizes: list[int], token_sizes: list[int]) -> list[tuple[int, int]]:
    """Return the numbers of rows and of prompt tokens for which both are captured together.

    They are few, because each pair is a capture. Beside more tokens, to read the weights twice hardly matters.
    """
    rows = [size for size in row_sizes if size % MIXED_ROWS == 0] or row_sizes[-1:]
    tokens = [size for size in token_sizes if size in MIXED_TOKENS] or token_sizes[:1]
    return list(product(rows if rows[-1] == row_sizes[-1] else [*rows, row_sizes[-1]], tokens))


def graph_memory_bytes(spec: ModelSpec, options: EngineOptions, widest: int) -> int:
    """Return an estimate of the device memory that `capture_graphs` will take in all.

    `widest` is the most rows or columns of a layer's matrix.
    """
    sizes, token_sizes = ladder(options.max_running), token_ladder(options.step_tokens(GPU_STEP_TOKENS))
    logit_bytes = 2 * spec.dtype.itemsize + DRAW_BYTES  # the model's output, and the copy that is kept
    table_bytes = -(-spec.max_model_len // options.block_size) * 8
    row_bytes = spec.vocab_size * logit_bytes + table_bytes
    number = len(sizes) + len(token_sizes) + len(mixed_sizes(sizes, token_sizes))
    launch_bytes = (1 + options.has_adapters) * number * len(spec.kv_shapes | spec.state_shapes) * LAYER_BYTES
    prompt_bytes = token_sizes[-1] * widest * spec.dtype.itemsize * WIDE_TENSORS
    # States are gathered for a layer, and written back.
    row_bytes += WIDE_TENSORS * max((layer.num_bytes for layer in spec.state_shapes.values()), default=0)
    return options.max_running * row_bytes + launch_bytes + prompt_bytes + POOL_BYTES


@dataclass(frozen=True, slots=True)
class Captured:
    """The forward of a model that is captured, with the block tables and the sizes that it is captured for."""

    executor: Executor
    spec: ModelSpec
    tables: BlockTables
    capture: Capture
    num_blocks: int
    block_size: int
    max_model_len: int
    states: States | None = None  # of layers that keep one
    adapters: TritonAdapters | None = None
    adaptable: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # the modules that adapters may name


class Graphs(NamedTuple):
    """Graphs that are replayed; None: those steps are launched operation by operation."""

    decodes: DecodeGraphs | None = None
    prompts: PromptGraphs | None = None
    mixed: MixedGraphs | None = None


def capture_graphs(own: Captured, options: EngineOptions, trials: Trials) -> Graphs:
    """Capture the decodes and the prompts of a model, and write into the first blocks of its cache.

    What cannot be captured, or computes something else then, is None, and the reason is in the log.
    """
    decodes = capture_decodes(own, options.max_running, trials)
    prompts = capture_prompts(own, options.step_tokens(GPU_STEP_TOKENS), trials)
    return Graphs(decodes, prompts, capture_mixed(own, decodes, prompts, trials))


def capture_decodes(own: Captured, max_running: int, trials: Trials) -> DecodeGraphs | None:
    from oaiserve.engine.model.sampling import triton_sampling

    sizes = ladder(max_running)

    def make() -> DecodeGraphs:
        return DecodeGraphs(
            own.executor.forward,
            triton_sampling,
            own.capture,
            own.spec,
            own.tables,
            sizes=sizes,
            first=FIRST_SIZES | {sizes[-1]},
            block_size=own.block_size,
            max_model_len=own.max_model_len,
            states=own.states,
            adapters=own.adapters,
        )

    problem = partial(replay_problem, own, sizes)
    return _captured("decode_graphs", f"up to {max_running} sequences", len(sizes), own, make, problem, trials)


def capture_prompts(own: Captured, max_step_tokens: int, trials: Trials) -> PromptGraphs | None:
    if own.states is not None:
        trials.off["prompt_graphs"] = "layers that keep a state compute each prompt by itself"
        return None
    sizes = token_ladder(max_step_tokens)

    def make() -> PromptGraphs:
        return PromptGraphs(
            own.executor.forward,
            own.capture,
            own.spec,
            own.tables,
            sizes=sizes,
            first=FIRST_SIZES | {sizes[-1]},
            block_size=own.block_size,
            adapters=own.adapters,
        )

    problem = partial(prompt_problem, own, sizes)
    return _captured("prompt_graphs", f"up to {sizes[-1]} tokens", len(sizes), own, make, problem, trials)


def capture_mixed(
    own: Captured, decodes: DecodeGraphs | None, prompts: PromptGraphs | None, trials: Trials
) -> MixedGraphs | None:
    if decodes is None or prompts is None:
        trials.off["mixed_graphs"] = "those of decodes or of prompts are off"
        return None
    sizes = mixed_sizes(decodes.sizes, prompts.sizes)
    first = [size for size in sizes if FIRST_SIZES.issuperset(size)] or sizes[:1]

    def make() -> MixedGraphs:
        sized = {"sizes": sizes, "first": first}
        return MixedGraphs(own.executor.forward, own.capture, decodes, prompts, **sized, adapters=own.adapters)

    problem = partial(mixed_problem, own, decodes, prompts)
    for_what = "up to {} sequences beside {} tokens".format(*sizes[-1])
    return _captured("mixed_graphs", for_what, len(sizes), own, make, problem, trials)


def _captured(
    feature: Feature,
    for_what: str,
    num_sizes: int,
    own: Captured,
    make: Callable[[], T],
    problem: Callable[[T], str | None],
    trials: Trials,
) -> T | None:
    """Capture graphs; None if that fails, or if `problem` finds one."""
    began_ns = monotonic_ns()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(own.spec.device)

    def made_of_all() -> T:
        try:
            return make()
        except RuntimeError as error:
            # After a capture has failed, ending it fails too, with an error that does not have the reason.
            raise error.__context__ or error from None

    made = trials.tried(feature, made_of_all, problem)
    if made is None:
        torch.cuda.empty_cache()
        return None
    left_bytes, _ = torch.cuda.mem_get_info(own.spec.device)
    log.debug(
        "%s, for %s: %d of %d sizes captured in %.1f s, %.2f GiB",
        FEATURES[feature][0],
        for_what,
        made.graphs.num_captured,
        num_sizes,
        (monotonic_ns() - began_ns) / 1e9,
        (free_bytes - left_bytes) / 2**30,
    )
    return made


@torch.inference_mode()
def replay_problem(own: Captured, sizes: list[int], graphs: DecodeGraphs) -> str | None:
    """Compare replayed decodes with the same steps launched operation by operation."""
    most = min(len(COMPARED_LENGTHS), own.num_blocks // -(-max(COMPARED_LENGTHS) // own.block_size), sizes[-1])
    if own.states is not None:
        most = min(most, own.states.last)
    with_adapter = [] if own.adapters is None else [(most, _probe(own))]
    for num_rows, adapter in [*((number, None) for number in sorted({1, most})), *with_adapter] if most > 0 else []:
        prompts, decodes = _steps(own, num_rows)
        adapters = [] if adapter is None else [adapter, None, adapter][:num_rows]
        own.executor.forward(_batch(prompts, own))
        want = own.executor.forward(_batch(decodes, own, adapters)).clone()
        if own.states is not None:  # which the decodes have changed
            own.executor.forward(_batch(prompts, own))
        if not graphs.num_replayed(decodes, adapters):  # it has asked for the graph
            graphs.graphs.capture_next(only_wanted=True)
        logits, replayed = graphs.launch(decodes, own.tables.update(decodes), None, {}, adapters=adapters)
        what = f"the outputs of {num_rows} sequences{' with adapters' * bool(adapters)}"
        found = Difference(what, difference(logits, want), tolerance(own.spec.dtype))
        if found.is_beyond_rounding:
            return str(found)
        assert replayed is not None
        if replayed.wait().token_ids != logits.argmax(dim=-1).tolist():
            return "other tokens than the best would be drawn"
    if own.adapters is not None:
        own.adapters.forget()
    return None


@torch.inference_mode()
def prompt_problem(own: Captured, sizes: list[int], graphs: PromptGraphs) -> str | None:
    """Compare replayed prompts with the same ones launched operation by operation."""
    for number in (1, len(COMPARED_LENGTHS)):
        step = Step([chunk._replace(max_draws=1) for chunk in _steps(own, number)[0].chunks])
        if step.num_tokens > sizes[-1] or sum(len(chunk.sequence.blocks) for chunk in step.chunks) > own.num_blocks:
            continue
        want = own.executor.forward(_batch(step, own)).clone()
        logits, sample_chunks = graphs.launch(step, own.tables.update(step))
        limit = tolerance(own.spec.dtype)
        found = Difference(f"the outputs of {number} prompts", difference(logits, want), limit)
        if sample_chunks != list(range(number)) or found.is_beyond_rounding:
            return str(found)
    return None


@torch.inference_mode()
def mixed_problem(own: Captured, decodes: DecodeGraphs, prompts: PromptGraphs, graphs: MixedGraphs) -> str | None:
    """Compare a replayed decode beside a prompt with the same two, one after the other, in graphs of their own."""
    before, after = _steps(own, 2)
    whole = before.chunks[1]
    prompt = Step([whole._replace(num_tokens=min(whole.num_tokens, graphs.sizes[0][1]), max_draws=1)])
    decode = Step(after.chunks[:1])
    if whole.sequence.blocks[-1] >= own.num_blocks:
        return None
    own.executor.forward(_batch(Step(before.chunks[:1]), own))
    first, second = own.tables.update(Step(decode.chunks + prompt.chunks))
    wanted = [decodes.launch(decode, [first], None, {})[0].clone(), prompts.launch(prompt, [second])[0].clone()]
    for logits in (decodes.logits, prompts.logits):  # a replay that computes nothing would leave the right ones
        logits.zero_()
    found = graphs.upload(1, prompt, [second])
    assert found is not None
    got = [decodes.launch(decode, [first], None, {}, mixed=found[:2])[0], prompts.logits[:1]]
    for what, one, other in zip(("a decode", "a prompt"), got, wanted, strict=True):
        limit = tolerance(own.spec.dtype)
        apart = Difference(f"the outputs of {what} beside the other", difference(one, other), limit)
        if apart.is_beyond_rounding:
            return str(apart)
    return None


def _steps(own: Captured, number: int) -> tuple[Step, Step]:
    """Return the prompts of so many sequences, and their decodes."""
    lengths = [min(length, own.spec.max_model_len) for length in COMPARED_LENGTHS[:number]]
    steps = prompts_and_decodes(lengths, own.spec.vocab_size, own.block_size)
    for place, chunk in enumerate(steps[0].chunks):
        chunk.sequence.state = place
    return steps


def _probe(own: Captured) -> Adapter:
    """Return an adapter of all modules that may have one."""
    adapter = probe_adapter(own.adaptable, own.spec.dtype)
    device = own.spec.device
    parts = {name: replace(part, a=part.a.to(device), b=part.b.to(device)) for name, part in adapter.parts.items()}
    return replace(adapter, parts=parts)


def _batch(step: Step, own: Captured, adapters: Sequence[Adapter | None] = ()) -> Batch:
    """Return the batch of a step, which reads the tables that graphs read."""
    rows = own.tables.update(step)
    batch = build_batch(step, own.block_size, own.spec.device, tables=(own.tables.on_device, rows))
    batch.adapters = list(adapters)
    if own.states is not None:
        parts = [StateChunk(place, chunk.start, chunk.num_tokens) for place, chunk in enumerate(step.chunks)]
        batch.states = own.states.of_step(parts)
    return batch
