"""Sizes the KV cache of a model on a GPU.

Blocks and states get the memory that the largest step and CUDA graphs leave. In FP8, the cache's scales are measured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.attention import FP8_MAX
from oaiserve.engine.model.memory import MemoryUse, gib, kv_blocks, num_states
from oaiserve.engine.model.rehearsal import largest_step, prompt
from oaiserve.engine.model.states import States
from oaiserve.engine.sequences.step import OutOfMemory
from oaiserve.engine.start.check import batch_of
from oaiserve.engine.start.started import GPU_STEP_TOKENS
from oaiserve.errors import StartupError
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels
from oaiserve.plugins.cuda.executor.step_sizes import Size, step_sizes
from oaiserve.plugins.cuda.executor.token_counts import num_count_bytes

log = logging.getLogger(__name__)

# Attention reads keys in pieces: a step with a longer context takes more time, not more memory.
MOST_CONTEXT = 8192
SCALED_TOKENS = 64  # length of the rehearsal that determines the scales
# Keys of other texts may be larger than those of the rehearsal, up to this factor. Even larger ones are clipped. Small
# floats have as many digits as large ones, so the headroom costs nothing down to 2^-15 of the largest.
ROOM = 4
# These estimate the memory of graphs. All graphs share one pool, whose size follows from the largest graph.
LAYER_BYTES = 64 << 10  # the driver's memory for the launches of one layer, in each forward pass
POOL_BYTES = 128 << 20  # hidden states of the largest graph, parts of prompts, cuBLAS's workspace, and fragmentation
WIDE_TENSORS = 4  # tensors of a layer that exist at once, each counted as wide as the widest
DRAW_BYTES = 12  # bytes for each logit: its weight, and a candidate's weight and id for top_k and top_p


class MemoryReading(NamedTuple):
    """The use of one GPU's memory, in bytes."""

    total: int
    free: int  # memory that no program uses
    reserved: int  # memory that torch has reserved
    in_tensors: int  # the part of the reserved memory that tensors use
    peak_in_tensors: int  # the most that tensors used at any time since the previous reading


def read_memory(device: torch.device) -> MemoryReading:
    """Make torch free unused memory, and return the memory use after that."""
    torch.cuda.synchronize(device)
    peak_in_tensors = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    in_tensors = torch.cuda.memory_allocated(device)
    return MemoryReading(total, free, torch.cuda.memory_reserved(device), in_tensors, peak_in_tensors)


def gpu_sizes(
    spec: ModelSpec,
    options: EngineOptions,
    new_runner: Callable[[], ModelRunner],
    *,
    graph_bytes: int,
    read: Callable[[torch.device], MemoryReading] = read_memory,
) -> tuple[int, int]:
    """Compute the largest step with a KV cache of one block, and return how many blocks and states there is room for.

    `new_runner` has such a cache. `graph_bytes` is the memory that CUDA graphs will take. Raises StartupError if the
    memory is too small for that step, or for the sizes in the options.
    """
    max_step_tokens = options.step_tokens(GPU_STEP_TOKENS)
    step = largest_step(
        max_step_tokens=max_step_tokens,
        max_running=options.max_running,
        longest=min(spec.max_model_len, max(MOST_CONTEXT, max_step_tokens)),
        block_size=options.block_size,
    )
    before = read(spec.device)
    try:
        runner = new_runner()
        runner.collect(runner.launch(step))
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        raise StartupError(
            f"The model's weights take {gib(before.in_tensors)} GiB, and the {gib(before.free)} GiB that are free "
            f"beside them are too little for its largest step, of {step.num_tokens} tokens of {len(step.chunks)} "
            "sequences: lower --max-step-tokens or --max-running, end what else uses this GPU (nvidia-smi lists it), "
            "or take a smaller --dtype or quantized weights."
        ) from error
    del runner
    after = read(spec.device)
    use = MemoryUse(
        total=after.total,
        weights=before.in_tensors,
        step=after.peak_in_tensors - before.in_tensors,
        graphs=graph_bytes,
        others=max(0, after.total - after.free - after.reserved),
        utilization=options.gpu_memory_utilization,
    )
    most_states = num_states(spec, options, use)
    use = replace(use, states=most_states * spec.state_bytes)
    least_tokens = min(max_step_tokens, spec.max_model_len)
    num_blocks = kv_blocks(spec, options, spec.max_model_len, use, least_tokens, state_bytes=use.states)
    kv_bytes = num_blocks * options.block_size * spec.kv_bytes_per_token
    left = gib(use.left - kv_bytes)
    log.debug("Memory of %s: %s; the KV cache gets %s, and %s are left", spec.device, use, gib(kv_bytes), left)
    return num_blocks, most_states


def graph_memory_bytes(spec: ModelSpec, options: EngineOptions, widest: int, largest_packed: int = 0) -> int:
    """Return an estimate of all device memory that graphs will take.

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


@torch.inference_mode()
def with_measured_scales(spec: ModelSpec, weights: CudaWeights, block_size: int) -> ModelSpec:
    """Return the model with a scale for the keys and one for the values of each layer.

    They are powers of two, such that the largest number of a rehearsal is at most a fourth of the largest in the cache.
    """
    plain = spec.with_cache("auto")
    num_tokens = min(SCALED_TOKENS, plain.max_model_len)
    sizes = {"num_blocks": -(-num_tokens // block_size), "block_size": block_size}
    executor = CudaExecutor(weights, plain.kv_shapes, **sizes, kernels=Kernels())
    executor.forward(batch_of(prompt(num_tokens, plain.vocab_size, block_size), plain, block_size, States.of(plain, 1)))
    return plain.with_scales(
        {
            layer: (scale_for(float(cache.keys.abs().max())), scale_for(float(cache.values.abs().max())))
            for layer, cache in executor.caches.items()
        }
    )


def scale_for(largest: float) -> float:
    """Return the power of two that brings `largest` times `ROOM` into the range of the cache."""
    return 2.0 ** math.ceil(math.log2(largest * ROOM / FP8_MAX)) if 0 < largest < math.inf else 1.0
