"""The KV cache of a model on a GPU: its blocks and states, beside all else that memory holds, and its scales in FP8."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from oaiserve.config import EngineOptions
from oaiserve.engine.model.attention import FP8_MAX, Scoring
from oaiserve.engine.model.attention.reference import watched
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.device_memory import CudaMemory, measure
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.memory import gib, kv_blocks, num_states
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.start.gpu.fast_paths import FastPaths
from oaiserve.engine.start.gpu.graph_capture import graph_memory_bytes
from oaiserve.engine.start.started import GPU_STEP_TOKENS

log = logging.getLogger(__name__)

T = TypeVar("T", bound=LoadedModel)

NUM_TOKENS = 64  # of the rehearsal that scales follow from
# Keys of other texts may be larger than those of the rehearsal. What is larger still is cut off. A float keeps as many
# digits of small numbers, so the room costs nothing until they are 2^-15 of the largest.
ROOM = 4


def gpu_sizes(loaded: LoadedModel, options: EngineOptions, paths: FastPaths) -> tuple[int, int]:
    """Measure the memory of the GPU, log its uses, and return how many blocks and states it has room for.

    Raises StartupError if the memory is too small for that step, or for what the options ask for.
    """
    max_step_tokens = options.step_tokens(GPU_STEP_TOKENS)
    use = measure(
        CudaMemory(loaded.device),
        loaded,
        options,
        max_step_tokens=max_step_tokens,
        backend=paths.backend,
        sample_ids=paths.sample_ids,
        graph_bytes=graph_memory_bytes(loaded, options) if options.cuda_graph and paths.have_graphs else 0,
    )
    least_tokens = min(max_step_tokens, loaded.max_model_len)
    most_states = num_states(loaded, options, use)
    state_bytes = most_states * loaded.state_bytes
    num_blocks = kv_blocks(loaded, options, loaded.max_model_len, use, least_tokens, state_bytes=state_bytes)
    use = replace(use, states=state_bytes)
    kv_bytes = num_blocks * options.block_size * loaded.kv_bytes_per_token
    log.debug(
        "Memory of %s: %s; the KV cache gets %s, and %s are left",
        loaded.device,
        use,
        gib(kv_bytes),
        gib(use.left - kv_bytes),
    )
    return num_blocks, most_states


@torch.inference_mode()
def with_measured_scales(loaded: T, block_size: int) -> T:
    """Return the model with a scale for the keys and one for the values of each layer: powers of two, such that the
    largest of a rehearsal is a fourth of what the cache can hold, or less."""
    plain = loaded.with_cache("auto")
    num_tokens = min(NUM_TOKENS, loaded.max_model_len)
    num_blocks = -(-num_tokens // block_size)
    largest: dict[int, tuple[float, float]] = {}
    caches = EagerExecutor.with_cache(plain, num_blocks=num_blocks, block_size=block_size).caches

    def record(layer: int, key: Tensor, value: Tensor, _: Scoring) -> tuple[Tensor, Tensor]:
        largest[layer] = float(key.abs().max()), float(value.abs().max())
        return key, value

    step = prompt(num_tokens, loaded.vocab_size, block_size)
    EagerExecutor(plain, caches, watched(caches, record)).forward(build_batch(step, block_size, loaded.device))
    keys, values = (max(found) for found in zip(*largest.values(), strict=True))
    log.debug(
        "The KV cache is in FP8; the largest numbers of a rehearsal are %.3g in keys, %.3g in values", keys, values
    )
    return loaded.with_scales({layer: (scale_for(key), scale_for(value)) for layer, (key, value) in largest.items()})


def scale_for(largest: float) -> float:
    """Return the power of two that brings `largest` times `ROOM` into the range of the cache."""
    return 2.0 ** math.ceil(math.log2(largest * ROOM / FP8_MAX)) if 0 < largest < math.inf else 1.0
