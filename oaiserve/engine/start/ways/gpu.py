"""Starts a model on a GPU, or in several processes with a shard each, on GPUs or on the CPU.

All members of a tensor-parallel model take the same steps in the same order, because some of these are computed
together: what is compared, the largest step, the number of blocks that all have room for, and CUDA graphs.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapted_modules import adaptable, by_kernels, plain
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.device import select_device
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import CudaCapture
from oaiserve.engine.model.gpu.decode_forwards import DecodeForwards, Run
from oaiserve.engine.model.gpu.device_memory import CudaMemory
from oaiserve.engine.model.gpu.prompt_graphs import PromptGraphs
from oaiserve.engine.model.memory import MemoryUse, cpu_sizes, longest_request
from oaiserve.engine.model.parallel import group
from oaiserve.engine.model.parallel.capture import MembersCapture
from oaiserve.engine.model.parallel.executor import Capacity, Needs, ParallelExecutor, Shard
from oaiserve.engine.model.parallel.group import Member, all_reduce_min
from oaiserve.engine.model.parallel.messages import Capture, Replay, TableChanges, What
from oaiserve.engine.model.parallel.workers import Workers
from oaiserve.engine.model.rehearsal import sampling_steps
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampling.logit_edits import ApplyMasks
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.states import States
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.gpu.fast_paths import FEATURES, FastPaths, Feature, find_fast_paths, may_fuse_layers
from oaiserve.engine.start.gpu.graph_capture import Captured, Graphs, Members, capture_graphs, capture_part
from oaiserve.engine.start.gpu.kernels import adapters_problem
from oaiserve.engine.start.gpu.kv_cache import gpu_sizes, with_measured_scales
from oaiserve.engine.start.gpu.layers import fuse_layers_checked
from oaiserve.engine.start.gpu.usable import is_usable
from oaiserve.engine.start.load import load_with
from oaiserve.engine.start.native import refuse_unless_possible, with_native_cache
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.start.started import CPU_STEP_TOKENS, GPU_STEP_TOKENS, Started, assemble

log = logging.getLogger(__name__)


class OnGpu:
    """The start of a model on one GPU."""

    name = "on a GPU"

    def accepts(self, request: StartRequest) -> str | None:
        return "its device is the CPU" if select_device(request.options.device).type == "cpu" else None

    def start(self, request: StartRequest) -> ServedModel:
        options = request.options
        loaded = request.load("weights", partial(load_with, options, request.source.path))
        return assemble(start_on_gpu(with_native_cache(loaded, options), options), request.tokenizer, options)


class TensorParallel:
    """The start of a model in several processes."""

    name = "tensor-parallel"

    def accepts(self, request: StartRequest) -> str | None:
        return "--tensor-parallel is 1" if request.options.tensor_parallel == 1 else None

    def start(self, request: StartRequest) -> ServedModel:
        tokenizer, path, options = request.tokenizer, request.source.path, request.options  # before any process
        workers = Workers(path, options)

        def load() -> LoadedModel:
            with group.environment(0), workers.explained():
                return load_with(options, path, Member(0, options.tensor_parallel, workers.meet))

        try:
            loaded = request.load("weights", load)
            with workers.explained():
                return assemble(start_on_gpu(loaded, options, workers), tokenizer, options)
        except BaseException:
            workers.stop()
            raise


class _Part(NamedTuple):
    """What this process computes of a model, all of it or its shard, and the room that it has for that."""

    options: EngineOptions  # without what the model, or a shard, cannot have
    paths: FastPaths
    executor: Executor
    num_blocks: int  # which all members have room for
    num_states: int
    max_model_len: int
    capacity: Capacity
    features: dict[Feature, bool]


def start_on_gpu(loaded: LoadedModel, options: EngineOptions, workers: Workers | None = None) -> Started:
    """Start a model that is on one GPU, or the server's part of one whose other parts `workers` hold.

    Raises StartupError if a device, or its memory, does not allow the options, or if a worker fails.
    """
    refuse_unless_possible(loaded, options)
    if workers is not None:
        has_graphs = options.cuda_graph and loaded.sums is not None and not loaded.is_on_cpu
        log.info(
            "The model is split into %d parts: %s%s",
            options.tensor_parallel,
            "fused layers" if may_fuse_layers(loaded, options) else "no compiled step",
            "" if has_graphs else ", no CUDA graphs",
        )
    if options.kv_cache_dtype == "fp8":
        loaded = with_measured_scales(loaded, options.block_size)
    part = _make_part(loaded, options)
    options, paths, features, executor = part.options, part.paths, part.features, part.executor
    tables = BlockTables.with_room(
        options.max_running,
        part.max_model_len,
        options.block_size,
        loaded.device,
        tell=None if workers is None else lambda *changes: workers.send(TableChanges(*changes)),
    )
    if workers is not None:
        workers.wait_until_ready()
        executor = ParallelExecutor(executor, workers, part.capacity, tables)
    if options.compile and not options.has_adapters and not features.get("fused_layers"):
        from oaiserve.engine.start.gpu.compiled import compile_layers  # late: it imports the compiler

        sizes = {"num_blocks": part.num_blocks, "block_size": options.block_size}
        features["compiled_layers"] = compile_layers(executor, loaded, **sizes)
    graphs = Graphs()
    if options.cuda_graph and paths.have_graphs:
        graphs = _capture(part, loaded, tables, executor, workers)
    features["decode_graphs"], features["prompt_graphs"] = graphs.decodes is not None, graphs.prompts is not None

    runner = ModelRunner(
        executor,
        loaded.device,
        options.block_size,
        sample_ids=paths.sample_ids,
        apply_masks=paths.apply_masks,
        graphs=graphs.decodes,
        prompt_graphs=graphs.prompts,
        tables=tables,
        states=States(loaded.state_shapes, part.num_states, loaded.device) if part.num_states else None,
        # If a worker is gone, the results that a GPU has reduced with it are wrong.
        check_results=None if workers is None else workers.check,
    )
    started = Started(
        loaded,
        adaptable(loaded.model) if options.has_adapters else {},
        runner,
        part.num_blocks,
        part.max_model_len,
        CPU_STEP_TOKENS if loaded.is_on_cpu else GPU_STEP_TOKENS,
        num_states=part.num_states,
        processes=workers,
    )
    if loaded.is_on_cpu:
        return started
    compiled = executor if features.get("compiled_layers") else None
    return started._replace(
        warm_up=partial(warm_up, runner, loaded, paths.apply_masks, options.block_size, compiled),
        features={name: features.get(name, False) for name in FEATURES},
    )


def start_member(loaded: LoadedModel, options: EngineOptions) -> Shard:
    """Get a worker's shard of a tensor-parallel model ready for the server's messages."""
    part = _make_part(loaded, options)
    tables = BlockTables.with_room(options.max_running, part.max_model_len, options.block_size, loaded.device)

    @cache
    def captured() -> Captured:
        return _captured(part, loaded, tables, CudaCapture(loaded.device))

    def capture(asked: Capture) -> DecodeForwards | PromptGraphs | None:
        return capture_part(asked, captured())

    return Shard(part.executor, part.capacity, tables, capture)


def _make_part(loaded: LoadedModel, options: EngineOptions) -> _Part:
    """Try the fast paths of this process's part, find its sizes, and make its executor: fused layers, or transformers'
    code. This blocks until all members have called it."""
    is_shard = options.tensor_parallel > 1
    if loaded.state_shapes:
        log.info("The model's layers are not compiled, and there are no CUDA graphs: some of them keep a state")
        options = replace(options, compile=False, cuda_graph=False)
    if options.has_adapters and options.compile:
        log.info("The model's layers are not compiled: steps may have adapters")
    paths = find_fast_paths(loaded, options)
    features = dict(paths.features)
    if is_shard:  # which is not compiled, and no member can try graphs alone where sums are not ours
        options = replace(options, compile=False, cuda_graph=options.cuda_graph and loaded.sums is not None)
    num_blocks, num_states, use = _sizes(loaded, options, paths)
    sizes = {"num_blocks": num_blocks, "block_size": options.block_size}
    eager = EagerExecutor.with_cache(loaded, backend=paths.backend, **sizes)
    executor: Executor = eager
    if options.has_adapters:
        features["adapters"] = is_usable(
            "Adapters by Triton's kernels",
            "plain torch adds them, which is slower",
            lambda: adapters_problem(loaded, by_kernels, options.block_size),
        )
        eager.add_adapters = by_kernels if features["adapters"] else plain
    if paths.layers is not None:
        executor = fuse_layers_checked(paths.layers, eager, loaded, paths.backend, **sizes) or eager
        features["fused_layers"] = executor is not eager
    capacity = Capacity()
    if is_shard and use is not None:
        max_step_tokens = options.step_tokens(GPU_STEP_TOKENS)
        step = {"largest_step_bytes": use.step, "max_step_tokens": max_step_tokens}
        capacity = Capacity(CudaMemory(loaded.device), Needs.of_model(loaded, options.block_size, **step))
    max_model_len = longest_request(loaded, num_blocks * options.block_size)
    return _Part(options, paths, executor, num_blocks, num_states, max_model_len, capacity, features)


def _sizes(loaded: LoadedModel, options: EngineOptions, paths: FastPaths) -> tuple[int, int, MemoryUse | None]:
    """Return the number of blocks that all members have room for, that of states, and the uses of a GPU's memory."""
    use: MemoryUse | None = None
    if loaded.is_on_cpu:
        num_blocks, num_states = cpu_sizes(loaded, options)
    else:
        num_blocks, num_states, use = gpu_sizes(loaded, options, paths)
    if options.tensor_parallel > 1:
        num_blocks = all_reduce_min(num_blocks, loaded.device)
    return num_blocks, num_states, use


def _capture(
    part: _Part, loaded: LoadedModel, tables: BlockTables, executor: Executor, workers: Workers | None
) -> Graphs:
    """Capture the graphs of a model that `executor` computes, with those of the workers' shards."""
    capture = CudaCapture(loaded.device)  # all graphs share its memory
    own = _captured(part, loaded, tables, capture)
    if workers is None:
        return capture_graphs(own, part.options)

    def begin(what: What, sizes: list[int]) -> None:
        workers.send(Capture(what, sizes))

    def replay(what: What, size: int, run: Run) -> None:
        with workers.explained():
            workers.send(Replay(what, size))
            run()

    workers.before_leaving(capture.release)
    return capture_graphs(own, part.options, Members(executor, capture, begin, replay))


def _captured(part: _Part, loaded: LoadedModel, tables: BlockTables, recorder: CudaCapture) -> Captured:
    own = Captured(
        part.executor, loaded, tables, recorder, part.num_blocks, part.options.block_size, part.max_model_len
    )
    if part.options.tensor_parallel == 1:
        return own
    assert loaded.sums is not None
    at_all = MembersCapture(recorder, loaded.sums)
    return replace(own, capture=at_all, make=at_all.make, share=loaded.sums.share)


def warm_up(
    runner: ModelRunner,
    loaded: LoadedModel,
    apply_masks: ApplyMasks | None,
    block_size: int,
    compiled: Executor | None = None,
) -> None:
    """Run a step of each kind, so that no request waits for the compilation of kernels and the handles of libraries.

    The thread that runs the steps calls this, because each has its own handles, and may have its own compiled code:
    `compiled` is an executor that has some. Kernels for long prompts have been compiled when memory was measured.
    """
    steps = sampling_steps()
    if compiled is not None:
        from oaiserve.engine.start.gpu.compiled import runs_compiled

        batch = build_batch(steps[0], block_size, loaded.device)
        if not runs_compiled(loaded, torch.inference_mode()(lambda: compiled.forward(batch))):
            log.warning("The model's compiled layers do not run on the engine's thread, so its steps are slower")
    for step in steps:
        runner.collect(runner.launch(step))
    if apply_masks is not None:
        words = np.zeros((1, -(-loaded.vocab_size // 32)), dtype=np.uint32)
        apply_masks(torch.zeros(1, loaded.vocab_size, device=loaded.device), [0], words)
