"""Sizes the KV cache of a model on a GPU: its blocks and states from the free memory, and its scales in FP8."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.executor import CudaExecutor, CudaWeights
from oaiserve.engine.executors.cuda.kernels import Kernels, PlainAttention
from oaiserve.engine.model.attention import FP8_MAX, LayerCache, Scoring, StepAttention
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.device_memory import CudaMemory, measure
from oaiserve.engine.model.memory import gib, kv_blocks, num_states
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.model.sampling.draw_rows import SampleIds
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.start.started import GPU_STEP_TOKENS
from oaiserve.errors import StartupError

log = logging.getLogger(__name__)

NUM_TOKENS = 64  # length of the rehearsal that determines the scales
# Keys of other texts may be larger than those of the rehearsal, up to this factor. Even larger ones are cut off. Small
# floats have as many digits as large ones, so the room costs nothing down to 2^-15 of the largest.
ROOM = 4
FLOAT8_CAPABILITY = (8, 9)


def gpu_sizes(
    spec: ModelSpec,
    options: EngineOptions,
    make: Callable[[int], Executor],
    *,
    sample_ids: SampleIds | None,
    graph_bytes: int,
) -> tuple[int, int]:
    """Measure the memory of the GPU, log its uses, and return how many blocks and states it has room for.

    The arguments are those of `measure`. Raises StartupError if the memory is too small for the largest step, or for
    the sizes in the options.
    """
    max_step_tokens = options.step_tokens(GPU_STEP_TOKENS)
    use = measure(
        CudaMemory(spec.device),
        spec,
        options,
        make,
        max_step_tokens=max_step_tokens,
        sample_ids=sample_ids,
        graph_bytes=graph_bytes,
    )
    least_tokens = min(max_step_tokens, spec.max_model_len)
    most_states = num_states(spec, options, use)
    state_bytes = most_states * spec.state_bytes
    num_blocks = kv_blocks(spec, options, spec.max_model_len, use, least_tokens, state_bytes=state_bytes)
    use = replace(use, states=state_bytes)
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
    that the largest number of a rehearsal is at most a fourth of the largest in the cache.

    Raises StartupError for a GPU that cannot compute with floats of eight bits.
    """
    refuse_unless_float8(spec.device)
    plain = spec.with_cache("auto")
    num_tokens = min(NUM_TOKENS, plain.max_model_len)
    num_blocks = -(-num_tokens // block_size)
    largest: dict[int, tuple[float, float]] = {}
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    executor = CudaExecutor(weights, plain.kv_shapes, **sizes, kernels=Kernels())
    layers = {id(cache): layer for layer, cache in executor.caches.items()}

    def watched(batch: Batch) -> StepAttention:
        attend = PlainAttention(batch)

        def record(query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, scoring: Scoring) -> Tensor:
            largest[layers[id(cache)]] = float(key.abs().max()), float(value.abs().max())
            return attend(query, key, value, cache, scoring)

        return record

    executor.kernels = Kernels(attention=watched)
    step = prompt(num_tokens, plain.vocab_size, block_size)
    batch = build_batch(step, block_size, plain.device)
    if plain.state_shapes:
        states = States(plain.state_shapes, 1, plain.device)
        batch.states = states.of_step([StateChunk(0, 0, num_tokens)])
    executor.forward(batch)
    keys, values = (max(found) for found in zip(*largest.values(), strict=True))
    log.debug(
        "The KV cache is in FP8; the largest numbers of a rehearsal are %.3g in keys, %.3g in values", keys, values
    )
    return plain.with_scales({layer: (scale_for(key), scale_for(value)) for layer, (key, value) in largest.items()})


def takes_float8(device: torch.device) -> bool:
    """Return whether kernels on this GPU can compute with floats of eight bits."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def refuse_unless_float8(device: torch.device) -> None:
    """Raise StartupError for a GPU that cannot compute with floats of eight bits."""
    if not takes_float8(device):
        needed, found = (
            ".".join(map(str, one)) for one in (FLOAT8_CAPABILITY, torch.cuda.get_device_capability(device))
        )
        raise StartupError(
            f"--kv-cache-dtype fp8 needs a GPU of compute capability {needed} or more (Ada, Hopper or newer); this one "
            f"has {found}. --kv-cache-dtype auto keeps keys and values in 16 bits."
        )


def scale_for(largest: float) -> float:
    """Return the power of two that brings `largest` times `ROOM` into the range of the cache."""
    return 2.0 ** math.ceil(math.log2(largest * ROOM / FP8_MAX)) if 0 < largest < math.inf else 1.0
