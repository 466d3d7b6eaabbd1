"""Sizes the KV cache of a model on a GPU: its blocks and states from the memory that the largest step leaves, and its
scales in FP8."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.executor import CudaExecutor, CudaWeights
from oaiserve.engine.executors.cuda.kernels import Kernels
from oaiserve.engine.executors.cuda.packed import FLOAT8_CAPABILITY, takes_float8
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.attention import FP8_MAX
from oaiserve.engine.model.memory import MemoryUse, gib, kv_blocks, num_states
from oaiserve.engine.model.rehearsal import largest_step, prompt
from oaiserve.engine.model.states import States
from oaiserve.engine.sequences.step import OutOfMemory
from oaiserve.engine.start.check import batch_of
from oaiserve.engine.start.started import GPU_STEP_TOKENS
from oaiserve.errors import StartupError

log = logging.getLogger(__name__)

# Attention reads keys in pieces: a step with a longer context takes more time, not more memory.
MOST_CONTEXT = 8192
SCALED_TOKENS = 64  # length of the rehearsal that determines the scales
# Keys of other texts may be larger than those of the rehearsal, up to this factor. Even larger ones are cut off. Small
# floats have as many digits as large ones, so the room costs nothing down to 2^-15 of the largest.
ROOM = 4


class MemoryReading(NamedTuple):
    """The use of one GPU's memory, in bytes."""

    total: int
    free: int  # memory that no program uses
    reserved: int  # memory that torch has reserved
    in_tensors: int  # the part of the reserved memory that tensors use
    peak_in_tensors: int  # the most that tensors used at any time since the previous reading


def read_memory(device: torch.device) -> MemoryReading:
    """Let torch free unused memory, and return the use then."""
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
    log.debug(
        "Memory of %s: %s; the KV cache gets %s, and %s are left",
        spec.device,
        use,
        gib(kv_bytes),
        gib(use.left - kv_bytes),
    )
    return num_blocks, most_states


@torch.inference_mode()
def with_measured_scales(spec: ModelSpec, weights: CudaWeights, block_size: int) -> ModelSpec:
    """Return the model with a scale for the keys and one for the values of each layer. They are powers of two, such
    that the largest number of a rehearsal is at most a fourth of the largest in the cache."""
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


def refuse_unless_float8(device: torch.device, setting: str, other: str) -> None:
    """Raise StartupError for a setting on a GPU that cannot compute with floats of eight bits. `other` is another value
    of its flag, and what that does."""
    if not takes_float8(device):
        needed = ".".join(map(str, FLOAT8_CAPABILITY))
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise StartupError(
            f"{setting} needs a GPU of compute capability {needed} or more (Ada, Hopper or newer); this one has "
            f"{capability}. {setting.split()[0]} {other}."
        )


def scale_for(largest: float) -> float:
    """Return the power of two that brings `largest` times `ROOM` into the range of the cache."""
    return 2.0 ** math.ceil(math.log2(largest * ROOM / FP8_MAX)) if 0 < largest < math.inf else 1.0
