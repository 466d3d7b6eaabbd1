"""Captures steps as CUDA graphs, and checks their results."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.executor import CudaExecutor
from oaiserve.engine.model.adapters import Adapter, probe_adapter
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import Capture
from oaiserve.engine.model.gpu.step_graphs import StepGraphs
from oaiserve.engine.model.gpu.step_sizes import Size, step_sizes
from oaiserve.engine.model.rehearsal import prompts_and_decodes
from oaiserve.engine.model.sampling import numpy_sampling
from oaiserve.engine.model.sampling.draw_rows import draw_row
from oaiserve.engine.model.states import States
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.start.check import batch_of
from oaiserve.engine.start.compare import Difference, difference, tolerance
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.engine.start.started import GPU_STEP_TOKENS
from oaiserve.engine.step import Chunk, Step
from oaiserve.facts.times import monotonic_ns

log = logging.getLogger(__name__)

COMPARED_LENGTHS = (9, 40, 17)  # lengths of the sequences whose replayed steps are compared
# Their parameters for drawing tokens. The first sequence is also compared alone.
_COMPARED_PARAMS = (
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
)
# These estimate the memory of graphs. All graphs share one pool, whose size follows from the largest graph.
LAYER_BYTES = 64 << 10  # memory of the driver for the launches of one layer, in each forward
POOL_BYTES = 96 << 20  # hidden states of the largest graph, cuBLAS's workspace, and fragmentation
WIDE_TENSORS = 4  # tensors of a layer that exist at once, each counted as wide as the widest
DRAW_BYTES = 12  # bytes for each logit: its weight, and a candidate's weight and id for top_k and top_p


def graph_memory_bytes(spec: ModelSpec, options: EngineOptions, widest: int) -> int:
    """Return an estimate of all device memory that `capture_graphs` will take.

    `widest` is the most rows or columns of a layer's matrix.
    """
    sizes = sizes_of(spec, options)
    most_rows = max(size.num_sequences for size in sizes)
    logit_bytes = 2 * spec.dtype.itemsize + DRAW_BYTES  # the model's output and its stored copy
    # A layer's states are gathered, and written back.
    state_bytes = WIDE_TENSORS * max((layer.num_bytes for layer in spec.state_shapes.values()), default=0)
    table_bytes = -(-spec.max_model_len // options.block_size) * 8
    row_bytes = spec.vocab_size * logit_bytes + table_bytes + state_bytes
    num_layers = len(spec.kv_shapes | spec.state_shapes)
    launch_bytes = (1 + options.has_adapters) * len(sizes) * num_layers * LAYER_BYTES
    token_bytes = widest * spec.dtype.itemsize * WIDE_TENSORS
    return most_rows * row_bytes + launch_bytes + sizes[-1].num_tokens * token_bytes + POOL_BYTES


@dataclass(frozen=True, slots=True)
class Captured:
    """A model whose steps are captured, with the block tables that these read."""

    executor: CudaExecutor  # with kernels for sampling
    spec: ModelSpec
    options: EngineOptions
    tables: BlockTables
    capture: Capture
    num_blocks: int
    states: States | None  # None if the model's layers keep no states
    adaptable: Mapping[str, tuple[int, int]]  # rows and columns of the modules that adapters may name


def capture_graphs(own: Captured, trials: Trials) -> StepGraphs | None:
    """Capture the steps of a model, and write into the first blocks of its cache.

    Return None if they cannot be captured, or if replays give other results. The log has the reason.
    """
    began_ns = monotonic_ns()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(own.spec.device)
    graphs: StepGraphs | None = trials.tried("graphs", partial(captured, own), partial(replay_problem, own))
    torch.cuda.empty_cache()  # Each size ran once before its capture, in memory that the graphs don't use.
    if graphs is None:
        return None
    left_bytes, _ = torch.cuda.mem_get_info(own.spec.device)
    seconds = (monotonic_ns() - began_ns) / 1e9
    gib = (free_bytes - left_bytes) / 2**30
    log.debug("Captured %d CUDA graphs in %.1f s, %.2f GiB", graphs.num_captured, seconds, gib)
    return graphs


def sizes_of(spec: ModelSpec, options: EngineOptions) -> list[Size]:
    """Return the sizes of a model's captured steps."""
    has_states = bool(spec.state_shapes)
    return step_sizes(options.max_running, options.step_tokens(GPU_STEP_TOKENS), has_states=has_states)


def captured(own: Captured) -> StepGraphs:
    kernels = own.executor.kernels
    assert kernels.sampling is not None
    try:
        return StepGraphs(
            own.executor.forward,
            kernels.sampling,
            own.capture,
            own.spec,
            own.tables,
            sizes=sizes_of(own.spec, own.options),
            block_size=own.options.block_size,
            states=own.states,
            adapters=kernels.adapters,
        )
    except RuntimeError as error:
        # After a failed capture, ending it fails too, with an error that lacks the reason.
        raise error.__context__ or error from None


@torch.inference_mode()
def replay_problem(own: Captured, graphs: StepGraphs) -> str | None:
    """Compare replayed steps with the same ones launched operation by operation."""
    limit = tolerance(own.spec.dtype, has_float8_cache=own.spec.has_float8_cache)
    for what, step, adapters in _compared(own):
        size = graphs.find(step, adapters)
        if size is None:
            continue
        _compute_before(own, step)
        batch = _batch(step, own)
        batch.adapters = adapters
        want = own.executor.forward(batch).clone()
        _compute_before(own, step)  # The decodes have changed the states.
        graphs.logits.zero_()  # Otherwise a replay that computes nothing would leave the right logits.
        draws = [draw for chunk in step.chunks for draw in chunk.draws()]
        logits, replayed = graphs.launch(size, step, draws, own.tables.update(step), None, {}, adapters=adapters)
        found = Difference(f"the outputs of {what}", difference(logits, want), limit)
        if found.is_beyond_rounding:
            return str(found)
        assert replayed is not None
        want_ids, _ = numpy_sampling.sample_ids(logits, [draw_row(draw.sequence, draw.end) for draw in draws])
        if replayed.wait().token_ids != want_ids.tolist():
            return f"other tokens of {what} would be drawn"
    return None


def _compared(own: Captured) -> Iterator[tuple[str, Step, list[Adapter | None]]]:
    """Yield steps of as many sequences as fit into the cache, with their descriptions and the adapters of their
    chunks."""
    block_size = own.options.block_size
    most = min(len(COMPARED_LENGTHS), own.num_blocks // -(-max(COMPARED_LENGTHS) // block_size))
    if own.states is not None:
        most = min(most, own.states.last)
    if most == 0:
        return
    lengths = [min(length, own.spec.max_model_len) for length in COMPARED_LENGTHS[:most]]
    prompts, decodes = prompts_and_decodes(lengths, own.spec.vocab_size, block_size)
    for place, chunk in enumerate(prompts.chunks):
        chunk.sequence.state = place
        chunk.sequence.params = _COMPARED_PARAMS[place]
    whole = [Chunk(chunk.sequence, 0, chunk.sequence.prompt_len) for chunk in prompts.chunks]
    probes: dict[str, list[Adapter | None]] = {"": []}
    if own.executor.kernels.adapters is not None:
        probe = _probe(own)
        probes[" with adapters"] = [probe, None, probe][:most]
    for added, adapters in probes.items():
        yield f"a sequence{added}", Step(decodes.chunks[:1]), adapters[:1]
        yield f"{most} sequences{added}", decodes, adapters
        yield f"{most} prompts{added}", Step(whole), adapters
        yield f"sequences beside a prompt{added}", Step([*decodes.chunks[: most - 1], whole[-1]]), adapters


def _compute_before(own: Captured, step: Step) -> None:
    """Compute the tokens before those of a step's decodes."""
    chunks = [chunk._replace(start=0, num_tokens=chunk.start, max_draws=0) for chunk in step.chunks if chunk.start]
    if chunks:
        own.executor.forward(_batch(Step(chunks), own))


def _probe(own: Captured) -> Adapter:
    """Return an adapter for all modules that may have one."""
    adapter = probe_adapter(own.adaptable, own.spec.dtype)
    device = own.spec.device
    parts = {name: replace(part, a=part.a.to(device), b=part.b.to(device)) for name, part in adapter.parts.items()}
    return own.executor.prepare(replace(adapter, parts=parts))


def _batch(step: Step, own: Captured) -> Batch:
    """Return the batch of a step, with the block tables that graphs read."""
    tables = own.tables.on_device, own.tables.update(step)
    return batch_of(step, own.spec, own.options.block_size, own.states, tables)
