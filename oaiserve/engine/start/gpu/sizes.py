"""Decides how many blocks of the KV cache and how many states a GPU has room for, beside all else that it holds."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from oaiserve.config import EngineOptions
from oaiserve.engine.model.gpu.device_memory import CudaMemory, measure
from oaiserve.engine.model.memory import MemoryUse, gib, kv_blocks, num_states
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.gpu.fast_paths import FastPaths
from oaiserve.engine.start.gpu.graph_capture import graph_memory_bytes
from oaiserve.engine.start.started import GPU_STEP_TOKENS

log = logging.getLogger(__name__)


class Sizes(NamedTuple):
    """The numbers of blocks and of states, and the uses of the memory that they follow from."""

    num_blocks: int
    num_states: int
    use: MemoryUse


def gpu_sizes(loaded: LoadedModel, options: EngineOptions, paths: FastPaths) -> Sizes:
    """Measure the memory of the GPU, log its uses, and return what it has room for.

    The members of a tensor-parallel model compute the largest step together, so this blocks until all have called it.
    Raises StartupError if the memory is too small for that step, or for what the options ask for.
    """
    max_step_tokens = options.step_tokens(GPU_STEP_TOKENS)
    graph_bytes = 0
    if options.cuda_graph and paths.have_graphs:
        graph_bytes = graph_memory_bytes(
            loaded,
            max_running=options.max_running,
            max_step_tokens=max_step_tokens,
            max_model_len=loaded.max_model_len,
            block_size=options.block_size,
        )
    use = measure(
        CudaMemory(loaded.device),
        loaded,
        options,
        max_step_tokens=max_step_tokens,
        backend=paths.backend,
        sample_ids=paths.sample_ids,
        graph_bytes=graph_bytes,
    )
    least_tokens = min(max_step_tokens, loaded.max_model_len)
    most_states = num_states(loaded, options, use)
    state_bytes = most_states * loaded.state_bytes
    num_blocks = kv_blocks(loaded, options, loaded.max_model_len, use, least_tokens, state_bytes=state_bytes)
    use = replace(use, states=state_bytes)
    kv_bytes = num_blocks * options.block_size * loaded.kv_bytes_per_token
    log.info(
        "Memory of %s: %s; the KV cache gets %s, and %s are left",
        loaded.device,
        use,
        gib(kv_bytes),
        gib(use.left - kv_bytes),
    )
    return Sizes(num_blocks, most_states, use)
