"""Starts a model on a GPU: the ways to compute it, the sizes of its KV cache, its executor, and CUDA graphs."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapted_modules import adaptable, by_kernels, plain
from oaiserve.engine.model.device import select_device
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import CudaCapture
from oaiserve.engine.model.memory import longest_request
from oaiserve.engine.model.profiler import TorchProfiler, nvtx_ranges
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.states import States
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.assemble import assemble
from oaiserve.engine.start.gpu.checks.adapters import adapters_problem
from oaiserve.engine.start.gpu.checks.layers import fuse_layers_checked
from oaiserve.engine.start.gpu.checks.usable import is_usable
from oaiserve.engine.start.gpu.fast_paths import (
    ADAPTERS,
    COMPILED,
    DECODE_GRAPHS,
    FEATURES,
    FUSED,
    PROMPT_GRAPHS,
    find_fast_paths,
)
from oaiserve.engine.start.gpu.graph_capture import Graphs, capture_graphs
from oaiserve.engine.start.gpu.kv_scales import with_measured_scales
from oaiserve.engine.start.gpu.sizes import gpu_sizes
from oaiserve.engine.start.gpu.warm_up import warm_up
from oaiserve.engine.start.load import load_model
from oaiserve.engine.start.native import with_native_cache
from oaiserve.engine.start.refuse import refuse_unless_possible
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.start.started import GPU_STEP_TOKENS, Started

log = logging.getLogger(__name__)


class OnGpu:
    """The start of a model on one GPU."""

    name = "on a GPU"

    def accepts(self, request: StartRequest) -> str | None:
        return "its device is the CPU" if select_device(request.options.device).type == "cpu" else None

    def start(self, request: StartRequest) -> ServedModel:
        options = request.options
        load = partial(load_model, request.source.path, device=options.device, dtype=options.dtype)
        loaded = request.load("weights", partial(load, max_model_len=options.max_model_len))
        return assemble(start_on_gpu(with_native_cache(loaded, options), options), request.tokenizer, options)


def start_on_gpu(loaded: LoadedModel, options: EngineOptions) -> Started:
    """Start a model that is on one GPU. Raises StartupError if the GPU, or its memory, does not allow the options."""
    refuse_unless_possible(loaded, options)
    options = _as_the_model_allows(loaded, options)
    if options.kv_cache_dtype == "fp8":
        loaded = with_measured_scales(loaded, options.block_size)
    paths = find_fast_paths(loaded, options)
    features = dict(paths.features)
    num_blocks, num_states, _ = gpu_sizes(loaded, options, paths)
    max_model_len = longest_request(loaded, num_blocks * options.block_size)
    sizes = {"num_blocks": num_blocks, "block_size": options.block_size}

    eager = EagerExecutor.with_cache(loaded, backend=paths.backend, **sizes)
    if options.has_adapters:
        features[ADAPTERS] = _add_adapters(eager, loaded, options.block_size)
    executor: Executor = eager
    if paths.layers is not None:
        fused = fuse_layers_checked(paths.layers, eager, loaded, paths.backend, **sizes)
        features[FUSED], executor = fused is not None, fused or eager
    tables = BlockTables.with_room(options.max_running, max_model_len, options.block_size, loaded.device)
    if options.compile and not options.has_adapters and not features.get(FUSED):
        from oaiserve.engine.start.gpu.compiled import compile_layers  # late: it imports the compiler

        features[COMPILED] = compile_layers(executor, loaded, **sizes)
    graphs = Graphs()
    if options.cuda_graph and paths.have_graphs:
        capture = CudaCapture(loaded.device)  # all graphs share its memory
        graphs = capture_graphs(
            executor, loaded, options, tables, capture, num_blocks=num_blocks, max_model_len=max_model_len
        )
    features |= {DECODE_GRAPHS: graphs.decodes is not None, PROMPT_GRAPHS: graphs.prompts is not None}

    runner = ModelRunner(
        executor,
        loaded.device,
        options.block_size,
        sample_ids=paths.sample_ids,
        apply_masks=paths.apply_masks,
        graphs=graphs.decodes,
        prompt_graphs=graphs.prompts,
        tables=tables,
        states=States(loaded.state_shapes, num_states, loaded.device) if num_states else None,
    )
    compiled = executor if features.get(COMPILED) else None
    return Started(
        loaded,
        runner,
        num_blocks,
        max_model_len,
        GPU_STEP_TOKENS,
        TorchProfiler(loaded.device),
        nvtx_ranges() if options.nvtx else None,
        adaptable=adaptable(loaded.model) if options.has_adapters else {},
        num_states=num_states,
        warm_up=partial(warm_up, runner, loaded, paths.apply_masks, options.block_size, compiled),
        features=dict.fromkeys(FEATURES, False) | features,
    )


def _as_the_model_allows(loaded: LoadedModel, options: EngineOptions) -> EngineOptions:
    """Return the options without compiled layers and graphs where the model cannot have them, and say so in the log."""
    if loaded.state_shapes:
        log.info("The model's layers are not compiled, and there are no CUDA graphs: some of them keep a state")
        options = replace(options, compile=False, cuda_graph=False)
    if options.has_adapters and options.compile:
        log.info("The model's layers are not compiled: steps may have adapters")
    return options


def _add_adapters(eager: EagerExecutor, loaded: LoadedModel, block_size: int) -> bool:
    """Choose how the executor adds adapters. Return whether kernels do."""
    is_by_kernels = is_usable(
        "Adapters by Triton's kernels",
        "plain torch adds them, which is slower",
        lambda: adapters_problem(loaded, by_kernels, block_size),
    )
    eager.add_adapters = by_kernels if is_by_kernels else plain
    return is_by_kernels
