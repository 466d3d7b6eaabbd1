"""Starts a text model on a GPU from a description of its files: with kernels and graphs, or in plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.executor import CudaExecutor, CudaWeights, refuse_without_kernels
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.executors.reference.place import placed
from oaiserve.engine.model.device import select_device
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import CudaCapture
from oaiserve.engine.model.gpu.step_graphs import StepGraphs
from oaiserve.engine.model.gpu.step_sizes import step_sizes
from oaiserve.engine.model.memory import longest_request
from oaiserve.engine.model.rehearsal import sampling_steps
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampling.logit_edits import ApplyMasks
from oaiserve.engine.model.states import States
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.check import refuse_unless_finite
from oaiserve.engine.start.described import Described, describe_model, with_shapes
from oaiserve.engine.start.gpu.fast_paths import FastPaths, find_fast_paths, no_fast_paths
from oaiserve.engine.start.gpu.graph_capture import Captured, capture_graphs, graph_memory_bytes
from oaiserve.engine.start.gpu.kernels import adapters_problem
from oaiserve.engine.start.gpu.kv_cache import gpu_sizes, refuse_unless_float8, takes_float8, with_measured_scales
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.engine.start.gpu.usable import Usable
from oaiserve.engine.start.options import refuse_unless_possible
from oaiserve.engine.start.request import Declined, StartRequest
from oaiserve.engine.start.started import GPU_STEP_TOKENS, Started, assemble
from oaiserve.errors import StartupError

if TYPE_CHECKING:  # This module needs Triton.
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

log = logging.getLogger(__name__)


class OnGpu:
    """The start of a model that its family describes on one GPU."""

    name = "from a description of its files, on a GPU"

    def accepts(self, request: StartRequest) -> str | None:
        if request.task != "generate":
            return f"it is for --task {request.task}"
        if select_device(request.options.device).type == "cpu":
            return "its device is the CPU"
        return None

    def start(self, request: StartRequest) -> ServedModel:
        options = request.options
        device = select_device(options.device)
        name = request.source.location
        try:
            found = describe_model(request.source, options, device=device)
            refuse_what_the_device_lacks(found, options)
            with request.times.part("probe of the GPU"):
                usable = Usable(request, found.spec)
            with usable.watched():
                model = request.load("weights", lambda: place(found, options, name))
                started = start_on_gpu(model, options, Trials(usable.verdict))
        except NotKnown as reason:
            raise Declined(str(reason)) from reason
        started = started._replace(failed=usable.forbid_if_failed)
        return assemble(started, request.tokenizer, options)


class Placed(NamedTuple):
    """A described model on a GPU."""

    spec: ModelSpec
    weights: CudaWeights | Decoder  # the latter with --no-compile, for the reference executor
    adaptable: Mapping[str, tuple[int, int]]  # rows and columns of the modules that adapters may name


def refuse_what_the_device_lacks(found: Described, options: EngineOptions) -> None:
    """Raise StartupError for options that the model or the device cannot obey, and NotKnown for what has no kernels."""
    refuse_unless_possible(found.spec, options, found.decoder.adaptable())
    if options.kv_cache_dtype == "fp8":
        refuse_unless_float8(found.spec.device)
    if options.compile:
        refuse_without_kernels(found.decoder)


def place(found: Described, options: EngineOptions, name: str) -> Placed:
    """Bring the weights of a described model to its device one by one.

    Raises NotKnown for a model without kernels, and StartupError for too little memory.
    """
    spec, decoder, *_ = found
    device = spec.device
    weights: CudaWeights | Decoder
    try:
        if options.compile:
            weights = CudaWeights(decoder, dtype=spec.dtype, device=device, takes_float8=takes_float8(device))
        else:
            weights = placed(decoder, spec.dtype, device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise StartupError(
            f"The weights of '{name}' in {str(spec.dtype).removeprefix('torch.')} do not fit on {device}, which has "
            f"{total / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB are left: end what else uses this GPU "
            "(nvidia-smi lists it), or take a smaller --dtype, quantized weights or another --device."
        ) from error
    return Placed(spec, weights, decoder.adaptable())


def start_on_gpu(model: Placed, options: EngineOptions, trials: Trials) -> Started:
    """Start a model whose weights are on a GPU: its fast paths, its sizes, its executor and its graphs.

    Raises StartupError if the device, or its memory, does not allow the options, and NotKnown for a model whose outputs
    are no numbers.
    """
    spec, weights, adaptable = model
    paths = no_fast_paths("--no-compile", trials)
    if isinstance(weights, CudaWeights):
        if options.kv_cache_dtype == "fp8":
            spec = with_measured_scales(spec, weights, options.block_size)
        paths = find_fast_paths(spec, weights, options, trials)
    graph_reason = _reason_without_graphs(options, paths)
    graph_bytes = 0
    if not graph_reason and isinstance(weights, CudaWeights):
        graph_bytes = graph_memory_bytes(spec, options, weights.widest)
    make = partial(executor_of, model, spec, options=options, paths=paths)
    # Measuring runs the largest step, whose keys and rows no step before had.
    with trials.blamed_on("kernels"):
        num_blocks, num_states = gpu_sizes(spec, options, make, sample_ids=paths.sample_ids, graph_bytes=graph_bytes)
    executor = make(num_blocks)
    refuse_unless_finite(executor, spec, options.block_size)
    adapters = _adapters_checked(spec, adaptable, executor, options, trials)
    max_model_len = longest_request(spec, num_blocks * options.block_size)
    tables = BlockTables.with_room(options.max_running, max_model_len, options.block_size, spec.device)
    # One more than sequences can have, for padded rows of graphs.
    states = States(spec.state_shapes, num_states + 1, spec.device) if num_states else None
    graphs: StepGraphs | None = None
    if graph_reason:
        trials.off["graphs"] = graph_reason
    else:
        sizes = num_blocks, options.block_size
        captured = Captured(executor, spec, tables, CudaCapture(spec.device), *sizes, states, adapters, adaptable)
        graphs = capture_graphs(captured, options, trials)

    runner = ModelRunner(
        executor,
        spec.device,
        options.block_size,
        sample_ids=paths.sample_ids,
        apply_masks=paths.apply_masks,
        graphs=graphs,
        tables=tables,
        states=states,
    )
    return Started(
        spec,
        adaptable if options.has_adapters else {},
        runner,
        num_blocks,
        max_model_len,
        GPU_STEP_TOKENS,
        num_states=num_states,
        block_bytes=options.block_size * spec.kv_bytes_per_token,
        weight_bytes=executor.weight_bytes,
        warm_up=partial(warm_up, runner, spec, paths.apply_masks),
        features=trials.off,
    )


def executor_of(
    model: Placed, spec: ModelSpec, num_blocks: int, *, options: EngineOptions, paths: FastPaths
) -> CudaExecutor | ReferenceExecutor:
    """Make an executor whose KV cache has `num_blocks` blocks."""
    weights = model.weights
    if isinstance(weights, CudaWeights):
        sizes = {"num_blocks": num_blocks, "block_size": options.block_size}
        return CudaExecutor(weights, spec.kv_shapes, **sizes, kernels=paths.kernels)
    return ReferenceExecutor(
        with_shapes(weights, spec),
        dtype=spec.dtype,
        device=spec.device,
        num_blocks=num_blocks,
        block_size=options.block_size,
    )


def _adapters_checked(
    spec: ModelSpec,
    adaptable: Mapping[str, tuple[int, int]],
    executor: CudaExecutor | ReferenceExecutor,
    options: EngineOptions,
    trials: Trials,
) -> TritonAdapters | None:
    """Let the executor add adapters by kernels, if these compute the same, and return them."""
    if not options.has_adapters:
        trials.off["adapters"] = "there are none (--lora)"
        return None
    if not isinstance(executor, CudaExecutor):
        return None
    adapters = trials.tried(
        "adapters",
        partial(_adapters, spec, adaptable, options),
        lambda made: adapters_problem(spec, adaptable, made.of_batch, options.block_size),
    )
    if adapters is not None:
        executor.add_adapters = adapters.of_batch
    return adapters


def _adapters(spec: ModelSpec, adaptable: Mapping[str, tuple[int, int]], options: EngineOptions) -> TritonAdapters:
    """Make the kernels of adapters. Raises ImportError without Triton."""
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

    largest = step_sizes(options.max_running, options.step_tokens(GPU_STEP_TOKENS))[-1]
    # Twice as many as a step can have.
    return TritonAdapters(adaptable, 2 * options.max_running, spec.device, largest.num_tokens)


def _reason_without_graphs(options: EngineOptions, paths: FastPaths) -> str:
    """Return why no steps are captured as CUDA graphs; empty if they are."""
    if not options.compile:
        return "--no-compile"
    if not options.cuda_graph:
        return "--no-cuda-graph"
    if paths.have_graphs:
        return ""
    return "attention or sampling is in plain torch"


def warm_up(runner: ModelRunner, spec: ModelSpec, apply_masks: ApplyMasks | None) -> None:
    """Run a step of each kind, so that no request waits for the compilation of kernels and the handles of libraries.

    The thread that runs the steps calls this, because each has its own handles. Kernels for long prompts have been
    compiled when memory was measured.
    """
    for step in sampling_steps():
        runner.collect(runner.launch(step))
    if apply_masks is not None:
        words = np.zeros((1, -(-spec.vocab_size // 32)), dtype=np.uint32)
        apply_masks(torch.zeros(1, spec.vocab_size, device=spec.device), [0], words)
