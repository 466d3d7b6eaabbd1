"""Captures the steps of a model as CUDA graphs, and estimates their memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Decoder
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.block_tables import BlockTables
from oaiserve.engine.executors.cuda.cuda_capture import Capture
from oaiserve.engine.executors.cuda.executor import CudaExecutor, CudaWeights
from oaiserve.engine.executors.cuda.step_graphs import StepGraphs
from oaiserve.engine.executors.cuda.step_sizes import Size, step_sizes
from oaiserve.engine.executors.cuda.token_counts import DeviceCounts, num_count_bytes
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.states import States
from oaiserve.engine.start.started import GPU_STEP_TOKENS

log = logging.getLogger(__name__)

# These estimate the memory of graphs. All graphs share one pool, whose size follows from the largest graph.
LAYER_BYTES = 64 << 10  # memory of the driver for the launches of one layer, in each forward
POOL_BYTES = 128 << 20  # hidden states of the largest graph, parts of prompts, cuBLAS's workspace, and fragmentation
WIDE_TENSORS = 4  # tensors of a layer that exist at once, each counted as wide as the widest
DRAW_BYTES = 12  # bytes for each logit: its weight, and a candidate's weight and id for top_k and top_p


class Ready(NamedTuple):
    """A model on a GPU whose steps can run, and be captured if it has kernels."""

    spec: ModelSpec
    options: EngineOptions
    adaptable: Mapping[str, tuple[int, int]]  # rows and columns of the modules that adapters may name
    weights: CudaWeights | Decoder
    executor: CudaExecutor | ReferenceExecutor
    tables: BlockTables
    counts: DeviceCounts | None  # None without kernels
    num_blocks: int
    longest: int  # tokens that a request may have
    num_states: int  # sequences that can keep a state; 0 if no layer keeps one
    states: States | None
    new_runner: Callable[..., ModelRunner]  # runs steps by these parts, and by `graphs` if there are any


def graph_memory_bytes(spec: ModelSpec, options: EngineOptions, widest: int, largest_packed: int = 0) -> int:
    """Return an estimate of all device memory that `captured` will take.

    `widest` is the most rows or columns of a layer's matrix, and `largest_packed` the most weights of a matrix in
    blocks, which a product with many rows unpacks.
    """
    sizes = sizes_of(spec, options)
    most_rows = max(size.num_sequences for size in sizes)
    logit_bytes = 2 * spec.dtype.itemsize + DRAW_BYTES  # the model's output and its stored copy
    # A layer's states are gathered, and written back.
    state_bytes = WIDE_TENSORS * max((layer.num_bytes for layer in spec.state_shapes.values()), default=0)
    table_bytes = -(-spec.max_model_len // options.block_size) * 8
    row_bytes = spec.vocab_size * logit_bytes + num_count_bytes(spec.vocab_size) + table_bytes + state_bytes
    num_layers = len(spec.kv_shapes | spec.state_shapes)
    launch_bytes = (1 + options.has_adapters) * len(sizes) * num_layers * LAYER_BYTES
    token_bytes = widest * spec.dtype.itemsize * WIDE_TENSORS
    unpacked_bytes = largest_packed * spec.dtype.itemsize
    return most_rows * row_bytes + launch_bytes + sizes[-1].num_tokens * token_bytes + unpacked_bytes + POOL_BYTES


def sizes_of(spec: ModelSpec, options: EngineOptions) -> list[Size]:
    """Return the sizes of a model's captured steps."""
    has_states = bool(spec.state_shapes)
    return step_sizes(options.max_running, options.step_tokens(GPU_STEP_TOKENS), has_states=has_states)


def captured(own: Ready, capture: Capture) -> StepGraphs:
    """Capture the steps of a model with kernels. Raises the error of one that cannot be captured."""
    assert isinstance(own.executor, CudaExecutor)
    kernels = own.executor.kernels
    assert kernels.sampling is not None
    began_ns = monotonic_ns()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(own.spec.device)
    graphs = StepGraphs(
        own.executor.forward,
        kernels.sampling,
        capture,
        own.spec,
        own.tables,
        sizes=sizes_of(own.spec, own.options),
        block_size=own.options.block_size,
        states=own.states,
        adapters=kernels.adapters,
        counts=own.counts,
    )
    torch.cuda.empty_cache()  # Each size ran once before its capture, in memory that the graphs don't use.
    left_bytes, _ = torch.cuda.mem_get_info(own.spec.device)
    seconds = (monotonic_ns() - began_ns) / 1e9
    gib = (free_bytes - left_bytes) / 2**30
    log.debug("Captured %d CUDA graphs in %.1f s, %.2f GiB", graphs.num_captured, seconds, gib)
    return graphs
