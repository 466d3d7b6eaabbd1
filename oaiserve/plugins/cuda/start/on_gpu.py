"""Starts a text model on a GPU from a description of its files: with kernels and graphs, or in plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from oaiserve.checkpoints.load_errors import named
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.executors.reference.place import placed
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.device import select_device
from oaiserve.engine.model.memory import longest_request
from oaiserve.engine.model.rehearsal import sampling_steps
from oaiserve.engine.model.states import States
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.check import refuse_unless_finite
from oaiserve.engine.start.described import Described, describe_model, with_shapes
from oaiserve.engine.start.options import refuse_unless_possible
from oaiserve.engine.start.request import Declined, StartRequest
from oaiserve.engine.start.started import GPU_STEP_TOKENS, Started, assemble
from oaiserve.errors import StartupError
from oaiserve.plugins.cuda.executor.block_tables import BlockTables
from oaiserve.plugins.cuda.executor.chunked_states import in_chunks
from oaiserve.plugins.cuda.executor.cuda_capture import Capture, CudaCapture
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights, refuse_without_kernels
from oaiserve.plugins.cuda.executor.kernels import Kernels, triton_kernels
from oaiserve.plugins.cuda.executor.packed import FLOAT8_CAPABILITY, takes_float8
from oaiserve.plugins.cuda.executor.step_graphs import StepGraphs
from oaiserve.plugins.cuda.executor.token_counts import DeviceCounts
from oaiserve.plugins.cuda.start.features import Probed, warn
from oaiserve.plugins.cuda.start.fitting import fields_off, part_of
from oaiserve.plugins.cuda.start.memory import gpu_sizes, graph_memory_bytes, sizes_of, with_measured_scales
from oaiserve.plugins.cuda.start.usable import Usable
from oaiserve.runtime import THREADS

log = logging.getLogger(__name__)


def start(request: StartRequest) -> ServedModel:
    """Start the model on the GPU of the options.

    Raises StartupError for errors that the user can fix, and Declined for a model that has no description or no
    kernels.
    """
    options = request.options
    device = select_device(options.device)
    name = request.source.location
    try:
        described = describe_model(request.source, options, device=device)
        refuse_what_the_device_lacks(described, options)
        with request.times.part("probe of the GPU"):
            usable = Usable(request, described.spec)
        with usable.watched():
            model = request.load("weights", lambda: place(described, options, name))
            started = usable.started(lambda found: start_on_gpu(model, options, found))
    except NotKnown as reason:
        raise Declined(str(reason)) from reason
    started = started._replace(failed=usable.forbid_if_failed)
    return assemble(started, request.tokenizer, options, request.runtime)


class Placed(NamedTuple):
    """A described model on a GPU."""

    spec: ModelSpec
    weights: CudaWeights | Decoder  # the latter with --no-compile, for the reference executor
    adaptable: Mapping[str, tuple[int, int]]  # rows and columns of the modules that adapters may name


class Ready(NamedTuple):
    """A model on a GPU, ready to run steps, and to capture them if it has kernels."""

    spec: ModelSpec
    options: EngineOptions
    adaptable: Mapping[str, tuple[int, int]]  # rows and columns of the modules that adapters may name
    weights: CudaWeights | Decoder
    executor: CudaExecutor | ReferenceExecutor
    tables: BlockTables
    counts: DeviceCounts | None  # None without kernels
    num_blocks: int
    longest: int  # limit of a request's tokens
    num_states: int  # limit of sequences that can keep a state; 0 if no layer keeps one
    states: States | None
    new_runner: Callable[..., ModelRunner]  # creates a runner of these parts, with `graphs` if there are any


def refuse_what_the_device_lacks(model: Described, options: EngineOptions) -> None:
    """Raise StartupError for options that the model or device can't fulfil, and NotKnown for missing kernels."""
    refuse_unless_possible(model.spec, options, model.decoder.adaptable())
    if options.kv_cache_dtype == "fp8":
        refuse_unless_float8(model.spec.device, "--kv-cache-dtype fp8", "auto keeps keys and values in 16 bits")
    if options.quantize == "fp8":
        refuse_unless_float8(model.spec.device, "--quantize fp8", "none keeps weights in 16 bits")
    if options.compile:
        refuse_without_kernels(model.decoder)


def refuse_unless_float8(device: torch.device, setting: str, other: str) -> None:
    """Raise StartupError for a setting on a GPU that can't compute with 8-bit floats.

    `other` is another value of its flag, and what that value does.
    """
    if not takes_float8(device):
        needed = ".".join(map(str, FLOAT8_CAPABILITY))
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise StartupError(
            f"{setting} needs a GPU of compute capability {needed} or more (Ada, Hopper or newer); this one has "
            f"{capability}. {setting.split()[0]} {other}."
        )


def place(model: Described, options: EngineOptions, name: str) -> Placed:
    """Copy the weights of a described model to its device one by one.

    Raises NotKnown for a model without kernels, and StartupError for too little memory.
    """
    spec, decoder, *_ = model
    device = spec.device
    weights: CudaWeights | Decoder
    try:
        if options.compile:
            in_float8 = options.quantize == "fp8"
            weights = CudaWeights(decoder, dtype=spec.dtype, device=device, in_float8=in_float8)
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


def start_on_gpu(model: Placed, options: EngineOptions, found: Probed) -> Started:
    """Start a model whose weights are on a GPU, with the usable features and the fastest ways.

    Raises StartupError if the device, or its memory, does not allow the options, and NotKnown for a model whose outputs
    are not finite.
    """
    own = ready(model, options, found)
    features = dict(found.verdict)
    graphs: StepGraphs | None = None
    if not features["graphs"]:
        try:
            graphs = captured(own, CudaCapture(own.spec.device))
        except Exception as error:  # Drivers can raise anything, and the feature is optional.
            if part_of(error) is not None:
                raise
            features["graphs"] = named(error)
            warn("graphs", features["graphs"])
    runner = own.new_runner(graphs=graphs)
    return Started(
        own.spec,
        own.adaptable if options.has_adapters else {},
        runner,
        own.num_blocks,
        own.longest,
        GPU_STEP_TOKENS,
        num_states=own.num_states,
        counts_tokens=runner.counts_tokens,
        block_bytes=options.block_size * own.spec.kv_bytes_per_token,
        weight_bytes=own.executor.weight_bytes,
        warm_up=partial(warm_up, runner),
        features=features,
    )


def ready(model: Placed, options: EngineOptions, found: Probed, *, is_probe: bool = False) -> Ready:
    """Create the kernels of a model, its KV cache with as many blocks as fit, and its executor.

    A probe computes the last position of the model, for which its own cache may have no room.
    """
    spec, weights, adaptable = model
    kernels = Kernels()
    graph_bytes = 0
    if isinstance(weights, CudaWeights):
        if options.kv_cache_dtype == "fp8":
            spec = with_measured_scales(spec, weights, options.block_size)
        if not found.verdict["kernels"]:
            kernels = kernels_for(spec, adaptable, options, found)
        if not found.verdict["graphs"]:
            graph_bytes = graph_memory_bytes(spec, options, weights.widest, weights.largest_packed)
    new_executor = partial(executor_of, weights, spec, options=options, kernels=kernels)
    new_runner: Callable[..., ModelRunner] = partial(ModelRunner, device=spec.device, block_size=options.block_size)
    if (sampling := kernels.sampling) is not None:
        new_runner = partial(new_runner, sample_ids=sampling.sample_ids)
    num_blocks, num_states = gpu_sizes(
        spec, options, lambda: new_runner(new_executor(1), states=States.of(spec, 1)), graph_bytes=graph_bytes
    )
    executor = new_executor(num_blocks)
    refuse_unless_finite(executor, spec, options.block_size)
    longest = longest_request(spec, num_blocks * options.block_size)
    table_len = spec.max_model_len if is_probe else longest
    tables = BlockTables.with_room(options.max_running, table_len, options.block_size, spec.device)
    counts = DeviceCounts(tables, spec.vocab_size) if kernels.sampling is not None else None
    states = States.of(spec, num_states + 1)  # one more than sequences use, for padded rows of graphs
    new_runner = partial(new_runner, executor, tables=tables, counts=counts, states=states)
    sizes = num_blocks, longest, num_states
    return Ready(spec, options, adaptable, weights, executor, tables, counts, *sizes, states, new_runner)


def captured(own: Ready, capture: Capture) -> StepGraphs:
    """Capture the steps of a model with kernels. Raises the error of a step that can't be captured."""
    began_ns = THREADS.clock_ns()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(own.spec.device)
    graphs = graphs_of(own, capture)
    torch.cuda.empty_cache()  # Before its capture, each size ran once in memory that the graphs don't use.
    left_bytes, _ = torch.cuda.mem_get_info(own.spec.device)
    seconds = (THREADS.clock_ns() - began_ns) / 1e9
    gib = (free_bytes - left_bytes) / 2**30
    log.debug("Captured %d CUDA graphs in %.1f s, %.2f GiB", graphs.num_captured, seconds, gib)
    return graphs


def graphs_of(own: Ready, capture: Capture) -> StepGraphs:
    """Return the steps of a model with kernels, each size captured by `capture`."""
    assert isinstance(own.executor, CudaExecutor)
    kernels = own.executor.kernels
    assert kernels.sampling is not None
    return StepGraphs(
        own.executor.forward,
        kernels.sampling,
        capture,
        own.spec,
        own.tables,
        sizes=sizes_of(own.spec, own.options),
        block_size=own.options.block_size,
        states=own.states,
        adapters=kernels.adapters,
        counts=own.counts,
    )


def kernels_for(
    spec: ModelSpec, adaptable: Mapping[str, tuple[int, int]], options: EngineOptions, found: Probed
) -> Kernels:
    """Return Triton's kernels, except those that torch replaces, and with those for adapters if needed."""
    ways = found.ways
    if found.verdict["fp8_products"]:
        ways = msgspec.structs.replace(ways, rounded_from=None)
    off = fields_off(found)
    kernels = triton_kernels()._replace(ways=ways, **{name: Kernels._field_defaults[name] for name in off})
    if not found.verdict["state_chunks"]:
        kernels = kernels._replace(recurrence=in_chunks(kernels.recurrence))
    if not options.has_adapters or "adapters" in off:
        return kernels
    from oaiserve.plugins.cuda.executor.triton_adapters import TritonAdapters

    # twice as many adapters as a step can have
    adapters = TritonAdapters(adaptable, 2 * options.max_running, spec.device)
    return kernels._replace(adapters=adapters)


def executor_of(
    weights: CudaWeights | Decoder, spec: ModelSpec, num_blocks: int, *, options: EngineOptions, kernels: Kernels
) -> CudaExecutor | ReferenceExecutor:
    """Create an executor whose KV cache has `num_blocks` blocks."""
    sizes = {"num_blocks": num_blocks, "block_size": options.block_size}
    if isinstance(weights, CudaWeights):
        return CudaExecutor(weights, spec.kv_shapes, **sizes, kernels=kernels)
    return ReferenceExecutor(with_shapes(weights, spec), dtype=spec.dtype, device=spec.device, **sizes)


def warm_up(runner: ModelRunner) -> None:
    """Run a step of each kind, so that no request waits for kernels to be compiled or for libraries' handles.

    The thread that runs the steps calls this, because each thread has its own handles. Kernels for long prompts were
    already compiled when memory was measured.
    """
    for step in sampling_steps():
        runner.collect(runner.launch(step))
