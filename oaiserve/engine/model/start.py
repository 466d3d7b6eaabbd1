"""Assembles what runs the steps of a loaded model: KV cache, attention backend, executor, CUDA graphs, runner.

This is the one place that knows which parts go together on which device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from oaiserve.config import Attention, EngineOptions
from oaiserve.engine.model.adapted_modules import adaptable, by_kernels, plain
from oaiserve.engine.model.attention import Backend
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.attention.select import select_backend
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.start import WhenChecked, native_decoder, start_native
from oaiserve.engine.model.draft import DraftWeights
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.device_experts import Compute
from oaiserve.engine.model.gpu.device_matrices import Multiply
from oaiserve.engine.model.gpu.fast_paths import (
    ADAPTERS,
    ATTENTION,
    COMPILED,
    DECODE_GRAPHS,
    EXPERTS,
    FEATURES,
    FP8_PRODUCTS,
    FUSED,
    ONE_SHOT,
    PACKED,
    PROJECTIONS,
    PROMPT_GRAPHS,
    SAMPLING,
    RoundedExperts,
    ScaledProducts,
    adapters_problem,
    attention_problem,
    compute_experts_checked,
    compute_plain_experts_checked,
    fuse_checked,
    fuse_layers,
    fuse_layers_checked,
    is_usable,
    multiply_checked,
    one_shot_checked,
    round_experts_checked,
    sampling_problem,
    scale_checked,
)
from oaiserve.engine.model.gpu.kv_scales import with_measured_scales
from oaiserve.engine.model.memory import MemoryUse, cpu_sizes, gib, kv_blocks, longest_request, num_states
from oaiserve.engine.model.parallel import one_shot
from oaiserve.engine.model.parallel.group import all_reduce_min
from oaiserve.engine.model.parallel.messages import Capture, Replay, TableChanges, What
from oaiserve.engine.model.parallel.room import Needs, Room
from oaiserve.engine.model.pooling.load import LoadedPooler
from oaiserve.engine.model.pooling.runner import PoolingRunner
from oaiserve.engine.model.profiler import NvtxRanges, TorchProfiler
from oaiserve.engine.model.rehearsal import sampling_steps
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampling.draw_rows import SampleIds
from oaiserve.engine.model.sampling.logit_edits import ApplyMasks
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.started import CPU_STEP_TOKENS, GPU_STEP_TOKENS, Started
from oaiserve.engine.model.states import States
from oaiserve.errors import StartupError

if TYPE_CHECKING:
    from oaiserve.engine.model.gpu.cuda_capture import CudaCapture
    from oaiserve.engine.model.gpu.decode_forwards import DecodeForwards, Run
    from oaiserve.engine.model.gpu.fused_layers import FusedLayers
    from oaiserve.engine.model.gpu.graph_capture import Members
    from oaiserve.engine.model.gpu.graphs import DecodeGraphs
    from oaiserve.engine.model.gpu.prompt_graphs import PromptGraphs
    from oaiserve.engine.model.parallel.part import Part
    from oaiserve.engine.model.parallel.workers import Workers

log = logging.getLogger(__name__)

LEAST_TABLES = 3  # sequences of a step that warms up or compares, which may be more than are to run


def start_model(
    loaded: LoadedModel,
    options: EngineOptions,
    workers: Workers | None = None,
    when_checked: WhenChecked | None = None,
    draft: DraftWeights | None = None,
) -> tuple[LoadedModel, Started]:
    """Start a model as `start_runner` does, and return it with the form of KV cache that it got.

    Only the native step reads a cache of latent vectors. Where that cannot be used, there are keys and values.
    """
    if not loaded.has_latent_cache:
        return loaded, start_runner(loaded, options, workers, when_checked, draft)
    try:
        return loaded, _start_latent(loaded, options, when_checked, draft)
    except StartupError:
        raise
    except Exception as error:  # transformers' code can raise anything: it is read and called in unusual ways
        loaded = loaded.with_latent_cache(0)
        return loaded, start_runner(loaded, options, workers, draft=draft, refused=error)


def start_runner(
    loaded: LoadedModel,
    options: EngineOptions,
    workers: Workers | None = None,
    when_checked: WhenChecked | None = None,
    draft: DraftWeights | None = None,
    refused: Exception | None = None,
) -> Started:
    """Make the runner of a model, and get it ready for requests.

    `workers` hold the other parts of a model that is split. `when_checked` is called when the native step has been
    compared with transformers' code, which can be after this returns. `draft` guesses tokens for the model. `refused`
    says why there is no native step, if that is known. Raises StartupError if the device, or its memory, does not allow
    what the options ask for.
    """
    on_cpu = _is_on_cpu(loaded)
    _refuse_unless_possible(loaded, options, is_split=workers is not None)
    fuses = _fuses_layers(loaded, options)
    options = _for_parts(loaded, options)
    if workers is not None:
        what = "fused layers" if fuses else "no compiled step"
        what += "" if options.cuda_graph and not on_cpu else ", no CUDA graphs"
        log.info("The model is split into %d parts: %s", options.tensor_parallel, what)
    if loaded.state_shapes and not on_cpu:
        log.info("The model's layers are not compiled, and there are no CUDA graphs: some of them keep a state")
        options = replace(options, compile=False, cuda_graph=False)
    if options.has_adapters and options.compile and not on_cpu:
        log.info("The model's layers are not compiled: steps may have adapters")
    if options.kv_cache_dtype == "fp8":
        loaded = with_measured_scales(loaded, options.block_size)
    backend, (sample_ids, apply_masks), layers, features = _ways(loaded, options, fuses=fuses)
    num_blocks, most_states, use = _sizes(loaded, options, backend, sample_ids, draft)
    block_size, max_model_len = options.block_size, longest_request(loaded, num_blocks * options.block_size)

    eager = EagerExecutor.with_cache(loaded, num_blocks=num_blocks, block_size=block_size, backend=backend)
    if options.has_adapters and not on_cpu:
        features[ADAPTERS] = is_usable(
            "Adapters by Triton's kernels",
            "plain torch adds them, which is slower",
            lambda: adapters_problem(loaded, by_kernels, block_size),
        )
        eager.add_adapters = by_kernels if features[ADAPTERS] else plain
    executor: Executor = eager
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    if layers is not None:
        fused = fuse_layers_checked(layers, eager, loaded, backend, **sizes)
        features[FUSED], executor = fused is not None, fused or eager
    tables: BlockTables | None = None
    part = executor
    if workers is not None:
        from oaiserve.engine.model.parallel.executor import ParallelExecutor

        workers.wait_until_ready()
        tables = _tables(loaded, options, num_blocks, lambda *changes: workers.send(TableChanges(*changes)))
        executor = ParallelExecutor(part, workers, _room(loaded, options, use), tables)
    elif not on_cpu:
        tables = _tables(loaded, options, num_blocks)
    if options.compile and not on_cpu and not options.has_adapters and not features.get(FUSED):
        from oaiserve.engine.model.gpu.compiled import compile_layers

        features[COMPILED] = compile_layers(executor, loaded, **sizes)
    graphs: DecodeGraphs | None = None
    prompt_graphs: PromptGraphs | None = None
    if tables is not None and _has_graphs(options, backend, sample_ids):
        from oaiserve.engine.model.gpu.cuda_capture import CudaCapture
        from oaiserve.engine.model.gpu.graph_capture import capture_decodes, capture_prompts

        capture = CudaCapture(loaded.device)  # all graphs share its memory
        members = None if workers is None else _members(part, loaded, capture, workers)
        graphs = capture_decodes(
            executor,
            loaded,
            tables,
            capture,
            max_running=options.max_running,
            max_model_len=max_model_len,
            members=members,
            **sizes,
        )
        if options.attention != "varlen":  # which looks at the lengths of prompts on the host
            step_tokens = options.step_tokens(GPU_STEP_TOKENS)
            prompt_graphs = capture_prompts(
                executor, loaded, tables, capture, max_step_tokens=step_tokens, members=members, **sizes
            )
    features |= {DECODE_GRAPHS: graphs is not None, PROMPT_GRAPHS: prompt_graphs is not None}
    runner = ModelRunner(
        executor,
        loaded.device,
        block_size,
        sample_ids=sample_ids,
        apply_masks=apply_masks,
        graphs=graphs,
        prompt_graphs=prompt_graphs,
        tables=tables,
        states=States(loaded.state_shapes, most_states, loaded.device) if most_states else None,
        # If a worker is gone, the results that a GPU has reduced with it are wrong.
        check_results=None if workers is None else workers.check,
    )
    if options.compile and on_cpu:
        start_native(
            runner,
            eager,
            loaded,
            quantize=options.quantize,
            native_build=options.native_build,
            has_adapters=options.has_adapters,
            **sizes,
            num_threads=options.cpu_threads or default_threads(),
            when_checked=when_checked,
            needed_by=_needing_native(options),
            refused=refused,
        )
    return Started(
        runner,
        num_blocks,
        max_model_len,
        CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS,
        TorchProfiler(loaded.device),
        NvtxRanges() if options.nvtx else None,
        adaptable(loaded.model) if options.has_adapters else {},
        None if draft is None else draft.start(options, num_blocks=num_blocks, vocab_size=loaded.vocab_size),
        most_states,
        _nothing
        if on_cpu
        else partial(_warm_up, runner, loaded, apply_masks, executor if features.get(COMPILED) else None, block_size),
        {} if on_cpu else dict.fromkeys(FEATURES, False) | features,
    )


def _nothing() -> None:
    """Warm up nothing."""


def _warm_up(
    runner: ModelRunner,
    loaded: LoadedModel,
    apply_masks: ApplyMasks | None,
    compiled: Executor | None,
    block_size: int,
) -> None:
    """Run a step of each kind, whose first run compiles kernels and makes the handles of libraries, so that no request
    waits for that.

    The thread that runs the steps calls this, because each thread has its own handles, and may have its own compiled
    code: `compiled` is an executor that has some. The kernels for long prompts and long sequences have been compiled
    when memory was measured.
    """
    steps = sampling_steps()
    if compiled is not None:
        from oaiserve.engine.model.gpu.compiled import runs_compiled

        batch = build_batch(steps[0], block_size, loaded.device)
        if not runs_compiled(loaded, torch.inference_mode()(lambda: compiled.forward(batch))):
            log.warning("The model's compiled layers do not run on the engine's thread, so its steps are slower")
    for step in steps:
        runner.collect(runner.launch(step))
    if apply_masks is not None:
        words = np.zeros((1, -(-loaded.vocab_size // 32)), dtype=np.uint32)
        apply_masks(torch.zeros(1, loaded.vocab_size, device=loaded.device), [0], words)


def _start_latent(
    loaded: LoadedModel, options: EngineOptions, when_checked: WhenChecked | None, draft: DraftWeights | None
) -> Started:
    """Start a model whose KV cache has latent vectors, which only the native step reads. So it is there from the first
    request on, also where its library has to be compiled.

    Raises what `native_decoder` does, and StartupError as `start_runner` does.
    """
    _refuse_unless_possible(loaded, options, is_split=False)
    num_blocks, most_states = cpu_sizes(loaded, options, None if draft is None else draft.spec)
    native = native_decoder(
        loaded,
        quantize=options.quantize,
        native_build=options.native_build,
        has_adapters=options.has_adapters,
        num_blocks=num_blocks,
        block_size=options.block_size,
        num_threads=options.cpu_threads or default_threads(),
        when_checked=when_checked,
    )
    torch.set_num_threads(native.torch_threads)
    return Started(
        ModelRunner(
            native,
            loaded.device,
            options.block_size,
            states=States(loaded.state_shapes, most_states, loaded.device) if most_states else None,
        ),
        num_blocks,
        longest_request(loaded, num_blocks * options.block_size),
        CPU_STEP_TOKENS,
        TorchProfiler(loaded.device),
        ranges=None,
        adaptable=adaptable(loaded.model) if options.has_adapters else {},
        draft=None if draft is None else draft.start(options, num_blocks=num_blocks, vocab_size=loaded.vocab_size),
        num_states=most_states,
    )


class StartedPooling(NamedTuple):
    """All that the engine needs of a model that pools."""

    runner: PoolingRunner
    max_step_tokens_default: int
    profiler: TorchProfiler


def start_pooling(pooler: LoadedPooler, options: EngineOptions) -> StartedPooling:
    """Make the runner of a model that pools."""
    on_cpu = pooler.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(options.cpu_threads or default_threads())
    runner = PoolingRunner(pooler)
    return StartedPooling(runner, CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS, TorchProfiler(pooler.device))


def start_member(loaded: LoadedModel, options: EngineOptions) -> Part:
    """Get a worker's part of a model that is split ready for the server's messages."""
    from oaiserve.engine.model.parallel.part import Part

    fuses = _fuses_layers(loaded, options)
    options = _for_parts(loaded, options)
    backend, (sample_ids, _), layers, _ = _ways(loaded, options, fuses=fuses)
    num_blocks, _, use = _sizes(loaded, options, backend, sample_ids)
    sizes = {"num_blocks": num_blocks, "block_size": options.block_size}
    eager = EagerExecutor.with_cache(loaded, backend=backend, **sizes)
    fused = None if layers is None else fuse_layers_checked(layers, eager, loaded, backend, **sizes)
    executor, tables = fused or eager, _tables(loaded, options, num_blocks)

    @cache
    def recorder() -> CudaCapture:
        from oaiserve.engine.model.gpu.cuda_capture import CudaCapture

        return CudaCapture(loaded.device)

    def capture(asked: Capture) -> DecodeForwards | PromptGraphs | None:
        from oaiserve.engine.model.gpu.graph_capture import capture_part
        from oaiserve.engine.model.parallel.capture import MembersCapture

        assert loaded.sums is not None
        at_all = MembersCapture(recorder(), loaded.sums)
        max_model_len = longest_request(loaded, num_blocks * options.block_size)
        lengths = {"max_model_len": max_model_len, "block_size": options.block_size}
        return capture_part(asked, executor, loaded, tables, at_all, loaded.sums.share, **lengths)

    return Part(executor, _room(loaded, options, use), tables, capture)


def _members(part: Executor, loaded: LoadedModel, capture: CudaCapture, workers: Workers) -> Members:
    """Return what the server does for graphs of a model that is split."""
    from oaiserve.engine.model.gpu.graph_capture import Members
    from oaiserve.engine.model.parallel.capture import MembersCapture

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


def _tables(
    loaded: LoadedModel,
    options: EngineOptions,
    num_blocks: int,
    tell: Callable[[list[int], list[int]], object] | None = None,
) -> BlockTables:
    """Return the block tables of a device. Those of all members of a model that is split are alike."""
    block_size = options.block_size
    max_model_len = longest_request(loaded, num_blocks * block_size)
    most = max(options.max_running, LEAST_TABLES)
    return BlockTables(most, -(-max_model_len // block_size), block_size, loaded.device, tell)


class _Ways(NamedTuple):
    """_Ways says how a process computes all of a model, or its part of one that is split."""

    backend: Backend
    sampling: tuple[SampleIds | None, ApplyMasks | None]
    layers: FusedLayers | None
    features: dict[str, bool]


def _ways(loaded: LoadedModel, options: EngineOptions, *, fuses: bool) -> _Ways:
    """Find out which faster ways there are. All members of a model that is split call this, and get the same."""
    backend, sampling = _fast_paths(loaded, options)
    features = {ATTENTION: backend is not ReferenceAttention, SAMPLING: sampling[0] is not None}
    if not _is_on_cpu(loaded):
        features[PACKED] = multiply_checked(loaded, _multiply)
        features[FP8_PRODUCTS] = scale_checked(loaded, _scaled_products)
        features[EXPERTS] = compute_experts_checked(loaded, _compute_experts)
        if features[EXPERTS]:
            features[FP8_PRODUCTS] |= round_experts_checked(loaded, _rounded_experts)
        features[EXPERTS] |= compute_plain_experts_checked(loaded, _compute_experts)
        features[ONE_SHOT] = one_shot_checked(loaded, one_shot.missing, one_shot.OneShotSums)
    layers: FusedLayers | None = None
    if fuses:
        features[PROJECTIONS] = fuse_checked(loaded, options.block_size)
        if backend is not ReferenceAttention:
            layers = fuse_layers(loaded, options.block_size)
    return _Ways(backend, sampling, layers, features)


def _fuses_layers(loaded: LoadedModel, options: EngineOptions) -> bool:
    """Return whether layers may run by their description, or compiled: those of a split model, only with our sums."""
    if _is_on_cpu(loaded) or not options.compile or options.has_adapters or loaded.state_shapes:
        return False
    return options.tensor_parallel == 1 or loaded.sums is not None


def _room(loaded: LoadedModel, options: EngineOptions, use: MemoryUse | None) -> Room:
    """Return what knows the room of a member. `use` is that of a GPU's memory."""
    if use is None:
        return Room()
    from oaiserve.engine.model.gpu.device_memory import CudaMemory

    max_step_tokens = options.step_tokens(GPU_STEP_TOKENS)
    sizes = {"largest_step_bytes": use.step, "max_step_tokens": max_step_tokens}
    return Room(CudaMemory(loaded.device), Needs.of_model(loaded, options.block_size, **sizes))


def _is_on_cpu(loaded: LoadedModel) -> bool:
    return loaded.device.type == "cpu"


def _refuse_unless_possible(loaded: LoadedModel, options: EngineOptions, *, is_split: bool) -> None:
    on_cpu = _is_on_cpu(loaded)
    if options.quantize != "none" and not on_cpu:
        raise StartupError(f"--quantize {options.quantize} is for --device cpu; the model is on {loaded.device}.")
    if options.kv_cache_dtype != "auto" and (options.kv_cache_dtype == "int8") != on_cpu:
        asked, device = f"--kv-cache-dtype {options.kv_cache_dtype}", "cuda" if on_cpu else "cpu"
        raise StartupError(f"{asked} is for --device {device}; the model is on {loaded.device}.")
    if options.nvtx and on_cpu:
        raise StartupError(f"--nvtx is for --device cuda; the model is on {loaded.device}.")
    if options.draft_model is not None and not on_cpu:
        raise StartupError(f"--draft-model is for --device cpu; the model is on {loaded.device}.")
    if options.has_adapters and loaded.state_shapes:
        flag = "--lora" if options.lora else "--lora-dir"
        raise StartupError(f"{flag} is not for '{loaded.name}', which has layers that keep a state.")
    if options.tensor_parallel > 1 and not is_split:
        raise StartupError(f"--tensor-parallel is {options.tensor_parallel}, but the model is loaded as a whole.")


def _needing_native(options: EngineOptions) -> str | None:
    """Return the setting that needs the native step, if there is one."""
    if options.quantize != "none":
        return f"--quantize {options.quantize}"
    if options.kv_cache_dtype != "auto":
        return f"--kv-cache-dtype {options.kv_cache_dtype}"
    return None if options.draft_model is None else "--draft-model"


def _for_parts(loaded: LoadedModel, options: EngineOptions) -> EngineOptions:
    """Return the options without what a model that is split does not have: compiled layers, and CUDA graphs with sums
    that are not ours, which no member can try alone."""
    if options.tensor_parallel == 1:
        return options
    return replace(options, compile=False, cuda_graph=options.cuda_graph and loaded.sums is not None)


def _sizes(
    loaded: LoadedModel,
    options: EngineOptions,
    backend: Backend,
    sample_ids: SampleIds | None,
    draft: DraftWeights | None = None,
) -> tuple[int, int, MemoryUse | None]:
    """Return the number of blocks of the KV cache, and of states, and how a GPU's memory is used. For a model that is
    split, all members have room for so many blocks.

    The members of such a model compute the largest step together, so this blocks until all have called it.
    """
    use: MemoryUse | None = None
    if not _is_on_cpu(loaded):
        num_blocks, most_states, use = _gpu_sizes(loaded, options, backend, sample_ids)
    else:
        num_blocks, most_states = cpu_sizes(loaded, options, None if draft is None else draft.spec)
    if options.tensor_parallel > 1:
        num_blocks = all_reduce_min(num_blocks, loaded.device)
    return num_blocks, most_states, use


def _gpu_sizes(
    loaded: LoadedModel, options: EngineOptions, backend: Backend, sample_ids: SampleIds | None
) -> tuple[int, int, MemoryUse]:
    """Measure the memory of the GPU, log its uses, and return the number of blocks and of states that it has room
    for, and the uses."""
    from oaiserve.engine.model.gpu.device_memory import CudaMemory, measure
    from oaiserve.engine.model.gpu.graph_capture import graph_memory_bytes

    max_step_tokens = options.step_tokens(GPU_STEP_TOKENS)
    graph_bytes = 0
    if _has_graphs(options, backend, sample_ids):
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
        backend=backend,
        sample_ids=sample_ids,
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
    return num_blocks, most_states, use


def _has_graphs(options: EngineOptions, backend: Backend, sample_ids: SampleIds | None) -> bool:
    """Return whether decode steps are captured as CUDA graphs, which needs kernels for attention and for sampling."""
    return options.cuda_graph and sample_ids is not None and backend is not ReferenceAttention


def _fast_paths(
    loaded: LoadedModel, options: EngineOptions
) -> tuple[Backend, tuple[SampleIds | None, ApplyMasks | None]]:
    """Return the attention backend, and the functions that sample, as far as they compute what the plain ones do.

    The members of a model that is split by transformers' hooks compute each layer together, so they do not try alone.
    """
    if _is_on_cpu(loaded):
        return _backend(loaded, options.attention), (None, None)
    if options.tensor_parallel > 1 and loaded.sums is None:
        return _backend(loaded, options.attention), _sampling()

    def of_attention() -> str | None:
        return attention_problem(loaded, _backend(loaded, options.attention), options.block_size)

    def of_sampling() -> str | None:
        sample_ids, apply_masks = _sampling()
        return None if sample_ids is None or apply_masks is None else sampling_problem(loaded, sample_ids, apply_masks)

    instead = "plain torch computes it, which is much slower and has no CUDA graphs"
    backend: Backend = ReferenceAttention
    sampling: tuple[SampleIds | None, ApplyMasks | None] = None, None
    if is_usable("Attention by Triton's kernels", instead, of_attention, loaded.sums):
        backend = _backend(loaded, options.attention)
    if is_usable("Sampling by Triton's kernels", instead, of_sampling, loaded.sums):
        sampling = _sampling()
    return backend, sampling


def _multiply() -> Multiply:
    """Return the function that multiplies with packed matrices by a kernel. Raises ImportError without Triton."""
    from oaiserve.engine.model.gpu.triton_matrices import multiply

    return multiply


def _scaled_products() -> ScaledProducts:
    """Return the products of 8 bits. Raises ImportError without Triton."""
    from oaiserve.engine.model.gpu import triton_scaled

    return triton_scaled


def _compute_experts() -> Compute:
    """Return the function that computes packed experts by kernels. Raises ImportError without Triton."""
    from oaiserve.engine.model.gpu.triton_experts import compute

    return compute


def _rounded_experts() -> RoundedExperts:
    """Return packed experts whose inputs are rounded to 8 bits. Raises ImportError without Triton."""
    from oaiserve.engine.model.gpu import triton_experts

    return triton_experts


def _sampling() -> tuple[SampleIds | None, ApplyMasks | None]:
    """Return the functions that sample with Triton kernels, or None for both where there is no Triton."""
    if find_spec("triton") is None:
        return None, None
    from oaiserve.engine.model.sampling import triton_sampling

    return triton_sampling.sample_ids, triton_sampling.apply_masks


def _backend(loaded: LoadedModel, name: Attention) -> Backend:
    """Return the attention backend of this name. Raises StartupError if device or model do not support it."""
    backend = select_backend(loaded.device, name)
    if name == "varlen":
        from oaiserve.engine.model.attention.varlen import refuse_unless_supported

        refuse_unless_supported(loaded)
    return backend
