"""Starts a model on a CPU: transformers' code with a KV cache, and the native step in its place as soon as it is ready.

A KV cache of latent vectors is read by the native step alone, so a model that has one starts with that.
"""

from __future__ import annotations

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.attention.select import backend_for
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.memory import cpu_sizes, longest_request
from oaiserve.engine.model.profiler import TorchProfiler
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.states import States
from oaiserve.engine.start.draft_weights import DraftWeights
from oaiserve.engine.start.native import WhenChecked, native_decoder, start_native
from oaiserve.engine.start.started import CPU_STEP_TOKENS, Started
from oaiserve.errors import StartupError


def start_on_cpu(
    loaded: LoadedModel,
    options: EngineOptions,
    when_checked: WhenChecked | None = None,
    draft: DraftWeights | None = None,
    refused: Exception | None = None,
) -> Started:
    """Start a model with transformers' code, and replace that by native code, if the options and the model allow it.

    For the arguments see `start_runner`; `refused` says why there is no native step, if that is known. Raises
    StartupError where the options need the native step and it cannot be used, or where memory is too small.
    """
    num_blocks, num_states = cpu_sizes(loaded, options, None if draft is None else draft.spec)
    sizes = {"num_blocks": num_blocks, "block_size": options.block_size}
    eager = EagerExecutor.with_cache(loaded, backend=backend_for(loaded, options.attention), **sizes)
    runner = _runner(eager, loaded, options, num_states)
    if options.compile:
        start_native(
            runner,
            eager,
            loaded,
            quantize=options.quantize,
            native_build=options.native_build,
            has_adapters=options.has_adapters,
            num_threads=options.cpu_threads or default_threads(),
            when_checked=when_checked,
            needed_by=_needing_native(options),
            refused=refused,
            **sizes,
        )
    return _started(runner, loaded, options, draft, num_blocks=num_blocks, num_states=num_states)


def start_with_latent_cache(
    loaded: LoadedModel, options: EngineOptions, when_checked: WhenChecked | None, draft: DraftWeights | None
) -> tuple[LoadedModel, Started]:
    """Start a model whose KV cache has latent vectors with its native step, also where the library has to be compiled.

    Return the model with the form of cache that it got: where the native step cannot be used, keys and values, and
    transformers' code. Raises StartupError as `start_on_cpu` does.
    """
    try:
        return loaded, _start_latent(loaded, options, when_checked, draft)
    except StartupError:
        raise
    except Exception as error:  # transformers' code can raise anything: it is read and called in unusual ways
        loaded = loaded.with_latent_cache(0)
        return loaded, start_on_cpu(loaded, options, draft=draft, refused=error)


def _start_latent(
    loaded: LoadedModel, options: EngineOptions, when_checked: WhenChecked | None, draft: DraftWeights | None
) -> Started:
    """Start the native step at once. Raises what `native_decoder` does, and StartupError."""
    num_blocks, num_states = cpu_sizes(loaded, options, None if draft is None else draft.spec)
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
    runner = _runner(native, loaded, options, num_states)
    return _started(runner, loaded, options, draft, num_blocks=num_blocks, num_states=num_states)


def _runner(executor: Executor, loaded: LoadedModel, options: EngineOptions, num_states: int) -> ModelRunner:
    states = States(loaded.state_shapes, num_states, loaded.device) if num_states else None
    return ModelRunner(executor, loaded.device, options.block_size, states=states)


def _started(
    runner: ModelRunner,
    loaded: LoadedModel,
    options: EngineOptions,
    draft: DraftWeights | None,
    *,
    num_blocks: int,
    num_states: int,
) -> Started:
    return Started(
        runner,
        num_blocks,
        longest_request(loaded, num_blocks * options.block_size),
        CPU_STEP_TOKENS,
        TorchProfiler(loaded.device),
        ranges=None,
        adaptable=adaptable(loaded.model) if options.has_adapters else {},
        draft=None if draft is None else draft.start(options, num_blocks=num_blocks, vocab_size=loaded.vocab_size),
        num_states=num_states,
    )


def _needing_native(options: EngineOptions) -> str | None:
    """Return the setting that needs the native step, if there is one."""
    if options.quantize != "none":
        return f"--quantize {options.quantize}"
    if options.kv_cache_dtype != "auto":
        return f"--kv-cache-dtype {options.kv_cache_dtype}"
    return None if options.draft_model is None else "--draft-model"
