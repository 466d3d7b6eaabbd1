"""Starts a model on a GPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.device import select_device
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import CudaCapture
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.memory import longest_request
from oaiserve.engine.model.rehearsal import sampling_steps
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampling.logit_edits import ApplyMasks
from oaiserve.engine.model.states import States
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.gpu.fast_paths import FastPaths, find_fast_paths
from oaiserve.engine.start.gpu.graph_capture import Captured, Graphs, capture_graphs, token_ladder
from oaiserve.engine.start.gpu.kernels import adapters_problem
from oaiserve.engine.start.gpu.kv_cache import gpu_sizes, with_measured_scales
from oaiserve.engine.start.gpu.layers import exactness_problem, fuse_layers_checked
from oaiserve.engine.start.gpu.trial_marker import TrialMarker, marker_path
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.engine.start.kv_form import with_native_cache
from oaiserve.engine.start.load import load_with
from oaiserve.engine.start.options import refuse_unless_possible
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.start.started import GPU_STEP_TOKENS, Started, assemble
from oaiserve.errors import StartupError
from oaiserve.files.start_cache import version_of

if TYPE_CHECKING:  # which needs Triton
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

log = logging.getLogger(__name__)


class OnGpu:
    """The start of a model on one GPU."""

    name = "on a GPU"

    def accepts(self, request: StartRequest) -> str | None:
        return "its device is the CPU" if select_device(request.options.device).type == "cpu" else None

    def start(self, request: StartRequest) -> ServedModel:
        options = request.options
        loaded = request.load("weights", partial(load_with, options, request.source.path))
        marker = TrialMarker(_marker_path(request, loaded.device), forget=options.recheck)
        trials = Trials(marker, partial(torch.cuda.synchronize, loaded.device))
        started = start_on_gpu(with_native_cache(loaded, options), options, trials)
        return assemble(started, request.tokenizer, options)


def _marker_path(request: StartRequest, device: torch.device) -> Path:
    """Return the file of trials for a model on a device, with the versions on which a trial's end depends."""
    versions = map(version_of, ("oaiserve", "torch", "transformers"))
    return marker_path(str(request.source.path.resolve()), torch.cuda.get_device_name(device), *versions)


def start_on_gpu(loaded: LoadedModel, options: EngineOptions, trials: Trials) -> Started:
    """Start a model that is on a GPU: its fast paths, its sizes, its executor (fused layers, or transformers' code) and
    its graphs.

    Raises StartupError if the device, or its memory, does not allow the options.
    """
    refuse_unless_possible(loaded, options, adaptable(loaded.model))
    if options.kv_cache_dtype == "fp8":
        loaded = with_measured_scales(loaded, options.block_size)
    if loaded.state_shapes:
        log.debug("There are no fused layers: some of the model's layers keep a state")
        options = replace(options, compile=False)
    if options.has_adapters and options.compile:
        log.debug("There are no fused layers: steps may have adapters")
    paths = find_fast_paths(loaded, options, trials)
    num_blocks, num_states = gpu_sizes(loaded, options, paths)
    sizes = {"num_blocks": num_blocks, "block_size": options.block_size}
    eager = EagerExecutor.with_cache(loaded, backend=paths.backend, **sizes)
    executor: Executor = eager
    adapters: TritonAdapters | None = None
    if options.has_adapters:
        adapters = trials.tried(
            "adapters",
            partial(_adapters, loaded, options),
            lambda made: adapters_problem(loaded, made.of_batch, options.block_size),
        )
        if adapters is not None:
            eager.add_adapters = adapters.of_batch
    else:
        trials.off["adapters"] = "there are none (--lora)"
    if paths.layers is not None:
        executor = fuse_layers_checked(paths.layers, eager, loaded, paths.backend, trials, **sizes) or eager
    if options.exact:
        problem: str | None = trials.off["fused_layers"]
        if executor is not eager:
            problem = exactness_problem(executor, loaded, **sizes)
        if problem is not None:
            raise StartupError(f"--exact cannot be kept for '{loaded.name}': {problem}. It is served without --exact.")
    max_model_len = longest_request(loaded, num_blocks * options.block_size)
    tables = BlockTables.with_room(options.max_running, max_model_len, options.block_size, loaded.device)
    # One more than sequences can have, for padded rows of graphs.
    states = States(loaded.state_shapes, num_states + 1, loaded.device) if num_states else None
    graphs = Graphs()
    if reason := _reason_without_graphs(options, paths):
        trials.off |= dict.fromkeys(("decode_graphs", "prompt_graphs", "mixed_graphs"), reason)
    else:
        capture = CudaCapture(loaded.device)  # all graphs share its memory
        lengths = num_blocks, options.block_size, max_model_len
        captured = Captured(executor, loaded, tables, capture, *lengths, states, adapters)
        graphs = capture_graphs(captured, options, trials)
        capture.is_alone = False
        if graphs.prompts is not None:
            graphs.prompts.long_prompts = paths.long_prompts

    runner = ModelRunner(
        executor,
        loaded.device,
        options.block_size,
        sample_ids=paths.sample_ids,
        apply_masks=paths.apply_masks,
        graphs=graphs.decodes,
        prompt_graphs=graphs.prompts,
        mixed_graphs=graphs.mixed,
        tables=tables,
        states=states,
    )
    return Started(
        loaded,
        adaptable(loaded.model) if options.has_adapters else {},
        runner,
        num_blocks,
        max_model_len,
        GPU_STEP_TOKENS,
        num_states=num_states,
        block_bytes=options.block_size * loaded.kv_bytes_per_token,
        weight_bytes=eager.weight_bytes,
        warm_up=partial(warm_up, runner, loaded, paths.apply_masks),
        prepare_more=runner.capture_next,
        features=trials.off,
    )


def _adapters(loaded: LoadedModel, options: EngineOptions) -> TritonAdapters:
    """Make the kernels of adapters. Raises ImportError without Triton."""
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

    captured_tokens = options.max_running + token_ladder(options.step_tokens(GPU_STEP_TOKENS))[-1]
    # Twice as many as a step can have.
    return TritonAdapters(adaptable(loaded.model), 2 * options.max_running, loaded.device, captured_tokens)


def _reason_without_graphs(options: EngineOptions, paths: FastPaths) -> str:
    """Return why no steps are captured as CUDA graphs; empty if they are."""
    if not options.cuda_graph:
        return "--no-cuda-graph"
    return "" if paths.have_graphs else "attention or sampling is in plain torch"


def warm_up(runner: ModelRunner, loaded: LoadedModel, apply_masks: ApplyMasks | None) -> None:
    """Run a step of each kind, so that no request waits for the compilation of kernels and the handles of libraries.

    The thread that runs the steps calls this, because each has its own handles. Kernels for long prompts have been
    compiled when memory was measured.
    """
    for step in sampling_steps():
        runner.collect(runner.launch(step))
    if apply_masks is not None:
        words = np.zeros((1, -(-loaded.vocab_size // 32)), dtype=np.uint32)
        apply_masks(torch.zeros(1, loaded.vocab_size, device=loaded.device), [0], words)
