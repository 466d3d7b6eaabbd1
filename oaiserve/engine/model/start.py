"""From a loaded model and the options to what runs its steps: its KV cache, attention backend and executor."""

from __future__ import annotations

import logging
from typing import NamedTuple

from oaiserve.config import EngineOptions
from oaiserve.engine.model.attention import select_backend
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.start import start_native
from oaiserve.engine.model.load import LoadedModel
from oaiserve.engine.model.memory import kv_blocks
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.errors import StartupError

log = logging.getLogger(__name__)

# A step of so many tokens keeps the device busy; a longer one would only make streams wait for other people's prompts.
CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 2048


class Started(NamedTuple):
    """A model that is ready to run steps."""

    runner: ModelRunner
    num_blocks: int
    max_model_len: int  # in tokens: the model's, or what the KV cache holds where that is less
    max_step_tokens_default: int


def start_runner(loaded: LoadedModel, options: EngineOptions) -> Started:
    """Raises StartupError where the options ask for what the device or its memory does not have."""
    on_cpu = loaded.device.type == "cpu"
    if options.quantize != "none" and not on_cpu:
        raise StartupError(f"--quantize {options.quantize} is for --device cpu; the model is on {loaded.device}.")
    num_blocks = kv_blocks(loaded, options, loaded.max_model_len)
    max_model_len, capacity = loaded.max_model_len, num_blocks * options.block_size
    if capacity < max_model_len:
        log.warning("The KV cache holds %d tokens, so no request can be longer (not %d)", capacity, max_model_len)
        max_model_len = capacity
    runner = ModelRunner(
        loaded, num_blocks=num_blocks, block_size=options.block_size, backend=select_backend(loaded.device)
    )
    if options.compile and on_cpu:
        start_native(
            runner,
            loaded,
            quantize=options.quantize,
            num_blocks=num_blocks,
            block_size=options.block_size,
            num_threads=options.cpu_threads or default_threads(),
        )
    return Started(runner, num_blocks, max_model_len, CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS)
