"""From a loaded model and the options to what runs its steps: its KV cache, attention backend and executor."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

from oaiserve.config import Attention, EngineOptions
from oaiserve.engine.model.attention import Backend, reference, select_backend
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.start import start_native
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.load import LoadedModel
from oaiserve.engine.model.memory import gib, kv_blocks
from oaiserve.engine.model.parallel.group import least
from oaiserve.engine.model.profiler import NvtxRanges, TorchProfiler
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampler import Choose
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
    profiler: TorchProfiler
    ranges: NvtxRanges | None  # where parts of steps are marked


def start_runner(loaded: LoadedModel, options: EngineOptions) -> Started:
    """Raises StartupError where the options ask for what the device or its memory does not have."""
    on_cpu = loaded.device.type == "cpu"
    if options.quantize != "none" and not on_cpu:
        raise StartupError(f"--quantize {options.quantize} is for --device cpu; the model is on {loaded.device}.")
    backend = _backend(loaded, options.attention)
    if options.nvtx and on_cpu:
        raise StartupError(f"--nvtx is for --device cuda; the model is on {loaded.device}.")
    if options.tensor_parallel > 1:
        if loaded.workers is None:
            raise StartupError(f"--tensor-parallel is {options.tensor_parallel}, but the model is loaded as a whole.")
        log.info("The model is split into %d parts: no CUDA graphs, no compiled step", options.tensor_parallel)
        options = _for_a_part(options)
    choose = _choose(loaded)
    num_blocks = _num_blocks(loaded, options, backend, choose)
    max_model_len, capacity = loaded.max_model_len, num_blocks * options.block_size
    if capacity < max_model_len:
        log.warning(
            "The KV cache holds %d tokens, so no request can be longer (not %d); --max-model-len says so, too",
            capacity,
            max_model_len,
        )
        max_model_len = capacity
    runner_type = ModelRunner
    if loaded.workers is not None:
        from oaiserve.engine.model.parallel.executor import ParallelRunner

        runner_type = ParallelRunner
    runner = runner_type(loaded, num_blocks=num_blocks, block_size=options.block_size, backend=backend, choose=choose)
    if loaded.workers is not None:
        loaded.workers.wait_until_ready()
    if options.compile and on_cpu:
        start_native(
            runner,
            loaded,
            quantize=options.quantize,
            num_blocks=num_blocks,
            block_size=options.block_size,
            num_threads=options.cpu_threads or default_threads(),
        )
    if options.compile and not on_cpu:
        from oaiserve.engine.model.compiled import compile_layers

        compile_layers(runner, loaded, num_blocks=num_blocks, block_size=options.block_size)
    if _has_graphs(options, backend, choose):
        from oaiserve.engine.model.graph_capture import capture_decodes

        capture_decodes(
            runner,
            loaded,
            max_running=options.max_running,
            max_model_len=max_model_len,
            block_size=options.block_size,
        )
    if not on_cpu:
        from oaiserve.engine.model.warm_up import warm_up

        warm_up(runner)
    return Started(
        runner,
        num_blocks,
        max_model_len,
        CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS,
        TorchProfiler(loaded.device),
        NvtxRanges() if options.nvtx else None,
    )


def start_member(loaded: LoadedModel, options: EngineOptions) -> EagerExecutor:
    """What `start_runner` is for the server, for the other members of a model that is split."""
    backend = _backend(loaded, options.attention)
    num_blocks = _num_blocks(loaded, _for_a_part(options), backend, _choose(loaded))
    return EagerExecutor(loaded, num_blocks=num_blocks, block_size=options.block_size, backend=backend)


def _for_a_part(options: EngineOptions) -> EngineOptions:
    """Without what a model that is split does not have."""
    return replace(options, compile=False, cuda_graph=False)


def _num_blocks(loaded: LoadedModel, options: EngineOptions, backend: Backend, choose: Choose | None) -> int:
    """Where the model is split, as many as all members have room for: each computes the largest step, together with
    the others."""
    if loaded.device.type == "cuda":
        num_blocks = _gpu_blocks(loaded, options, backend, choose)
    else:
        num_blocks = kv_blocks(loaded, options, loaded.max_model_len)
    return num_blocks if options.tensor_parallel == 1 else least(num_blocks, loaded.device)


def _gpu_blocks(loaded: LoadedModel, options: EngineOptions, backend: Backend, choose: Choose | None) -> int:
    from oaiserve.engine.model.graph_capture import graph_memory_bytes
    from oaiserve.engine.model.largest_step import CudaMemory, measure

    max_step_tokens = options.step_tokens(GPU_STEP_TOKENS)
    graph_bytes = 0
    if _has_graphs(options, backend, choose):
        graph_bytes = graph_memory_bytes(
            loaded,
            max_running=options.max_running,
            max_model_len=loaded.max_model_len,
            block_size=options.block_size,
        )
    use = measure(
        CudaMemory(loaded.device),
        loaded,
        options,
        max_step_tokens=max_step_tokens,
        backend=backend,
        choose=choose,
        graph_bytes=graph_bytes,
    )
    least_tokens = min(max_step_tokens, loaded.max_model_len)
    num_blocks = kv_blocks(loaded, options, loaded.max_model_len, use, least_tokens)
    kv_bytes = num_blocks * options.block_size * loaded.kv_bytes_per_token
    log.info(
        "Memory of %s: %s; the KV cache gets %s, and %s are left",
        loaded.device,
        use,
        gib(kv_bytes),
        gib(use.left - kv_bytes),
    )
    return num_blocks


def _has_graphs(options: EngineOptions, backend: Backend, choose: Choose | None) -> bool:
    """What can be captured has kernels for attention and for choosing tokens."""
    return options.cuda_graph and choose is not None and backend is not reference.attend


def _choose(loaded: LoadedModel) -> Choose | None:
    """What chooses tokens in place of plain torch."""
    if loaded.device.type != "cuda" or find_spec("triton") is None:
        return None
    from oaiserve.engine.model import triton_sampling

    return triton_sampling.choose


def _backend(loaded: LoadedModel, name: Attention) -> Backend:
    backend = select_backend(loaded.device, name)
    if name == "varlen":
        from oaiserve.engine.model.attention.varlen import refuse_unless_supported

        refuse_unless_supported(loaded)
    return backend
