"""Starts a tensor-parallel model in several processes: the server with its shard, and each worker with its own.

All members take the same steps in the same order, because some of these are computed together: what is compared, the
largest step, the number of blocks that all have room for, and CUDA graphs.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial

from oaiserve.config import EngineOptions
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
from oaiserve.engine.model.parallel.group import all_reduce_min
from oaiserve.engine.model.parallel.messages import Capture, Replay, TableChanges, What
from oaiserve.engine.model.parallel.workers import Workers
from oaiserve.engine.model.profiler import TorchProfiler, nvtx_ranges
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.split import Member
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.assemble import assemble
from oaiserve.engine.start.gpu.checks.layers import fuse_layers_checked
from oaiserve.engine.start.gpu.fast_paths import (
    DECODE_GRAPHS,
    FEATURES,
    FUSED,
    PROMPT_GRAPHS,
    FastPaths,
    find_fast_paths,
    may_fuse_layers,
)
from oaiserve.engine.start.gpu.graph_capture import Graphs, Members, capture_graphs, capture_part
from oaiserve.engine.start.gpu.sizes import gpu_sizes
from oaiserve.engine.start.gpu.warm_up import warm_up
from oaiserve.engine.start.load import load_model
from oaiserve.engine.start.refuse import refuse_unless_possible
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.start.started import CPU_STEP_TOKENS, GPU_STEP_TOKENS, Started

log = logging.getLogger(__name__)


class TensorParallel:
    """The start of a model in several processes."""

    name = "tensor-parallel"

    def accepts(self, request: StartRequest) -> str | None:
        return "--tensor-parallel is 1" if request.options.tensor_parallel == 1 else None

    def start(self, request: StartRequest) -> ServedModel:
        tokenizer, path, options = request.tokenizer, request.source.path, request.options  # before any process
        workers = Workers(path, options)

        def load() -> LoadedModel:
            member = Member(0, options.tensor_parallel, workers.meet)
            with group.environment(0), workers.explained():
                return load_model(
                    path,
                    device=options.device,
                    dtype=options.dtype,
                    max_model_len=options.max_model_len,
                    member=member,
                )

        try:
            loaded = request.load("weights", load)
            with workers.explained():
                return assemble(start_split(loaded, options, workers), tokenizer, options)
        except BaseException:
            workers.stop()
            raise


def start_split(loaded: LoadedModel, options: EngineOptions, workers: Workers) -> Started:
    """Start the server's part of a model whose other parts `workers` hold, and make the runner of the whole model.

    Raises StartupError if a member has no room for what the options ask for, or if a worker fails.
    """
    refuse_unless_possible(loaded, options)
    has_graphs = options.cuda_graph and loaded.sums is not None and not loaded.is_on_cpu
    log.info(
        "The model is split into %d parts: %s%s",
        options.tensor_parallel,
        "fused layers" if may_fuse_layers(loaded, options) else "no compiled step",
        "" if has_graphs else ", no CUDA graphs",
    )
    paths = find_fast_paths(loaded, options)
    options = _for_parts(loaded, options)
    num_blocks, use = _agreed_sizes(loaded, options, paths)
    max_model_len = longest_request(loaded, num_blocks * options.block_size)
    part = _executor_of_part(loaded, options, paths, num_blocks)
    features = dict(paths.features)
    if paths.layers is not None:
        features[FUSED] = not isinstance(part, EagerExecutor)

    workers.wait_until_ready()
    tables = BlockTables.with_room(
        options.max_running,
        max_model_len,
        options.block_size,
        loaded.device,
        tell=lambda *changes: workers.send(TableChanges(*changes)),
    )
    executor = ParallelExecutor(part, workers, _capacity(loaded, options, use), tables)
    graphs = Graphs()
    if options.cuda_graph and paths.have_graphs:
        capture = CudaCapture(loaded.device)  # all graphs share its memory
        members = _members(part, loaded, capture, workers)
        lengths = {"num_blocks": num_blocks, "max_model_len": max_model_len}
        graphs = capture_graphs(executor, loaded, options, tables, capture, members=members, **lengths)
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
        # If a worker is gone, the results that a GPU has reduced with it are wrong.
        check_results=workers.check,
    )
    profiler, ranges = TorchProfiler(loaded.device), nvtx_ranges() if options.nvtx else None
    if loaded.is_on_cpu:
        return Started(loaded, runner, num_blocks, max_model_len, CPU_STEP_TOKENS, profiler, ranges, workers=workers)
    return Started(
        loaded,
        runner,
        num_blocks,
        max_model_len,
        GPU_STEP_TOKENS,
        profiler,
        ranges,
        warm_up=partial(warm_up, runner, loaded, paths.apply_masks, options.block_size),
        features=dict.fromkeys(FEATURES, False) | features,
        workers=workers,
    )


def start_member(loaded: LoadedModel, options: EngineOptions) -> Shard:
    """Get a worker's shard of a tensor-parallel model ready for the server's messages."""
    paths = find_fast_paths(loaded, options)
    options = _for_parts(loaded, options)
    num_blocks, use = _agreed_sizes(loaded, options, paths)
    max_model_len = longest_request(loaded, num_blocks * options.block_size)
    executor = _executor_of_part(loaded, options, paths, num_blocks)
    tables = BlockTables.with_room(options.max_running, max_model_len, options.block_size, loaded.device)

    @cache
    def recorder() -> CudaCapture:
        return CudaCapture(loaded.device)

    def capture(asked: Capture) -> DecodeForwards | PromptGraphs | None:
        assert loaded.sums is not None
        at_all = MembersCapture(recorder(), loaded.sums)
        lengths = {"max_model_len": max_model_len, "block_size": options.block_size}
        return capture_part(asked, executor, loaded, tables, at_all, loaded.sums.share, **lengths)

    return Shard(executor, _capacity(loaded, options, use), tables, capture)


def _for_parts(loaded: LoadedModel, options: EngineOptions) -> EngineOptions:
    """Return the options without what parts do not have: compiled layers, and CUDA graphs with sums that are not ours,
    which no member can try alone."""
    return replace(options, compile=False, cuda_graph=options.cuda_graph and loaded.sums is not None)


def _agreed_sizes(loaded: LoadedModel, options: EngineOptions, paths: FastPaths) -> tuple[int, MemoryUse | None]:
    """Return the number of blocks that all members have room for, and how this one's memory is used if it is a GPU's.

    This blocks until all members have called it.
    """
    use: MemoryUse | None = None
    if loaded.is_on_cpu:
        num_blocks, _ = cpu_sizes(loaded, options)
    else:
        num_blocks, _, use = gpu_sizes(loaded, options, paths)
    return all_reduce_min(num_blocks, loaded.device), use


def _executor_of_part(loaded: LoadedModel, options: EngineOptions, paths: FastPaths, num_blocks: int) -> Executor:
    """Make the executor of this member's shard: fused layers, or transformers' code."""
    sizes = {"num_blocks": num_blocks, "block_size": options.block_size}
    eager = EagerExecutor.with_cache(loaded, backend=paths.backend, **sizes)
    if paths.layers is None:
        return eager
    return fuse_layers_checked(paths.layers, eager, loaded, paths.backend, **sizes) or eager


def _capacity(loaded: LoadedModel, options: EngineOptions, use: MemoryUse | None) -> Capacity:
    """Make the capacity of a member. `use` is that of a GPU's memory."""
    if use is None:
        return Capacity()
    max_step_tokens = options.step_tokens(GPU_STEP_TOKENS)
    sizes = {"largest_step_bytes": use.step, "max_step_tokens": max_step_tokens}
    return Capacity(CudaMemory(loaded.device), Needs.of_model(loaded, options.block_size, **sizes))


def _members(part: Executor, loaded: LoadedModel, capture: CudaCapture, workers: Workers) -> Members:
    """Make the server's side of the graphs of a tensor-parallel model."""

    def replay(what: What, size: int, run: Run) -> None:
        with workers.explained():
            workers.send(Replay(what, size))
            run()

    assert loaded.sums is not None
    workers.before_leaving(capture.release)
    at_all = MembersCapture(capture, loaded.sums)
    return Members(
        part,
        at_all,
        at_all.make,
        loaded.sums.share,
        lambda what, sizes: workers.send(Capture(what, sizes)),
        replay,
    )
