"""Captures steps as CUDA graphs, and checks their results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.executor import CudaExecutor
from oaiserve.engine.model.adapters import probe_adapter
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import Capture
from oaiserve.engine.model.gpu.step_graphs import StepGraphs
from oaiserve.engine.model.gpu.step_sizes import Size, step_sizes
from oaiserve.engine.model.rehearsal import prompts_and_decodes
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampling import numpy_sampling
from oaiserve.engine.model.sampling.draw_rows import draw_row
from oaiserve.engine.model.states import States
from oaiserve.engine.request import SamplingParams
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


class Capturable(NamedTuple):
    """A model whose steps can be captured."""

    executor: CudaExecutor  # with kernels for sampling
    spec: ModelSpec
    options: EngineOptions
    tables: BlockTables
    num_blocks: int
    states: States | None  # None if the model's layers keep no states
    adaptable: Mapping[str, tuple[int, int]]  # rows and columns of the modules that adapters may name
    new_runner: Callable[..., ModelRunner]  # runs steps by these parts, and by `graphs` if there are any


def capture_graphs(own: Capturable, capture: Capture, trials: Trials) -> StepGraphs | None:
    """Capture the steps of a model, and write into the first blocks of its cache.

    Return None if they cannot be captured, or if replays give other results. The log has the reason.
    """
    began_ns = monotonic_ns()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(own.spec.device)
    graphs: StepGraphs | None = trials.tried("graphs", partial(captured, own, capture), partial(replay_problem, own))
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


def captured(own: Capturable, capture: Capture) -> StepGraphs:
    kernels = own.executor.kernels
    assert kernels.sampling is not None
    try:
        return StepGraphs(
            own.executor.forward,
            kernels.sampling,
            capture,
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
def replay_problem(own: Capturable, graphs: StepGraphs) -> str | None:
    """Compare replayed steps with the same ones launched operation by operation."""
    limit = tolerance(own.spec.dtype, has_float8_cache=own.spec.has_float8_cache)
    plain = own.new_runner()
    replaying = own.new_runner(graphs=graphs)
    if own.executor.kernels.adapters is not None:
        adapter = probe_adapter(own.adaptable, own.spec.dtype, own.spec.device)
        for runner in (plain, replaying):
            runner.add_adapter(1, adapter)
    for what, before, step in _compared(own):
        for runner in (plain, replaying):
            if before.chunks:  # again for each, because the step changes states
                runner.launch(before)
            graphs.logits.zero_()  # Otherwise a replay that computes nothing would leave the right logits.
            launched = runner.launch(step)
            if runner is plain:
                want = launched.logits.clone()
        apart = Difference(f"the outputs of {what}", difference(launched.logits, want), limit)
        if apart.is_beyond_rounding:
            return str(apart)
        ((_, sampling),) = launched.samplings
        rows = [draw_row(draw.sequence, draw.end) for draw in launched.draws]
        want_ids, _ = numpy_sampling.sample_ids(launched.logits, rows)
        if sampling.wait().token_ids != want_ids.tolist():
            return f"other tokens of {what} would be drawn"
    return None


def _compared(own: Capturable) -> Iterator[tuple[str, Step, Step]]:
    """Yield steps of as many sequences as fit into the cache: what they are, the steps before them, and they."""
    block_size = own.options.block_size
    most = min(len(COMPARED_LENGTHS), own.num_blocks // -(-max(COMPARED_LENGTHS) // block_size))
    if own.states is not None:
        most = min(most, own.states.last)
    if most == 0:
        return
    lengths = [min(length, own.spec.max_model_len) for length in COMPARED_LENGTHS[:most]]
    prompts, decodes = prompts_and_decodes(lengths, own.spec.vocab_size, block_size)
    sequences = [chunk.sequence for chunk in prompts.chunks]
    whole = [Chunk(sequence, 0, sequence.prompt_len) for sequence in sequences]
    for number in range(1 + (own.executor.kernels.adapters is not None)):
        added = " with adapters" * number
        for place, sequence in enumerate(sequences):
            sequence.state = place
            sequence.params = _COMPARED_PARAMS[place]
            sequence.adapter = number * (1 - place % 2)  # The second one has none.
        yield f"a sequence{added}", Step(prompts.chunks[:1]), Step(decodes.chunks[:1])
        yield f"{most} sequences{added}", prompts, decodes
        yield f"{most} prompts{added}", Step(), Step(whole)
        others = Step(prompts.chunks[: most - 1])
        yield f"sequences beside a prompt{added}", others, Step([*decodes.chunks[: most - 1], whole[-1]])
