"""Replaces the eager executor of a model on a CPU by the native step, after checking that it computes the same.

A model that the native step has no operations for gets an eager executor with native attention instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oaiserve.config import EngineOptions, Quantize
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.adapters import Adapter, probe_adapter
from oaiserve.engine.model.attention import Scoring
from oaiserve.engine.model.attention.reference import watched
from oaiserve.engine.model.cpu.attention import NativeAttention
from oaiserve.engine.model.cpu.build import BuildError, is_built
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.description import AttentionParameters, Decoder, NotKnown
from oaiserve.engine.model.cpu.kv_layout import latent_dim, refuse_unless_it_fits, rounded
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import KEY_GROUP, LoadedModel
from oaiserve.engine.start.cache import remember_checked
from oaiserve.engine.start.check import (
    NUM_TOKENS,
    UNRELATED,
    Differs,
    batches,
    may_round_more,
    own_logits,
    refuse_unless_equal,
)
from oaiserve.engine.start.check_layers import refuse_unless_layers_are_equal
from oaiserve.errors import StartupError
from oaiserve.facts.times import monotonic_ns
from oaiserve.files.start_cache import Subject

log = logging.getLogger(__name__)

# Gets the description of a model, and transformers' logits for the batches of the check.
WhenChecked = Callable[[Decoder, list[Tensor]], object]
_SLOWER = "The model runs without its native step, which is slower: %s"


def with_native_cache(loaded: LoadedModel, options: EngineOptions) -> LoadedModel:
    """Return the model with the form of KV cache that the options have its native step keep.

    Raises StartupError if they ask for eight bits where there is another form, or for a form of another device.
    """
    if options.kv_cache_dtype == "fp8" and loaded.device.type == "cpu":
        raise StartupError(f"--kv-cache-dtype fp8 is for --device cuda; '{loaded.name}' is on the CPU. Take int8.")
    is_native = loaded.device.type == "cpu" and options.compile
    numbers = latent_dim(loaded) if is_native else 0
    if numbers == 0:
        return loaded.with_cache(options.kv_cache_dtype)
    if options.kv_cache_dtype != "auto":
        raise StartupError(
            f"--kv-cache-dtype {options.kv_cache_dtype} is for keys and values, in place of which the KV cache of "
            f"'{loaded.name}' has latent vectors, of {numbers} numbers for a token and layer."
        )
    return loaded.with_latent_cache(numbers)


def start_native(
    runner: ModelRunner,
    eager: EagerExecutor,
    loaded: LoadedModel,
    options: EngineOptions,
    key: Subject | None = None,
    *,
    num_blocks: int,
    num_threads: int,
    problem: Exception | None = None,
) -> None:
    """Replace the runner's executor `eager` by the native step.

    That is done before this function returns if the library is on disk; otherwise a thread compiles the library first.
    If the model cannot have the native step, the reason is logged, and `eager` is replaced by an eager executor with
    native attention if possible. Raises StartupError if the native step cannot be used and a setting needs it.
    `problem` is the reason, if it is known already.
    """
    native_build = options.native_build

    def make() -> NativeDecoder:
        if problem is not None:
            raise problem
        return native_step(loaded, options, key, num_blocks=num_blocks, num_threads=num_threads)

    if (needed_by := _needing_native(options)) is not None:
        try:
            native = make()
        except (BuildError, NotKnown) as error:
            raise StartupError(f"{needed_by} needs the native step, which cannot be used: {error}.") from error
        runner.replace(_hand_over(eager, native, native))
        return
    try:
        is_on_disk = is_built(loaded.dtype, native_build=native_build)
    except BuildError as error:
        log.warning(_SLOWER, error)
        return
    started_ns = monotonic_ns()

    def start() -> None:
        try:
            native = make()
        except NotKnown as error:  # the reason is in the model: no user can do anything about it
            log.info(_SLOWER, error)
            start_attention()
        except (BuildError, MemoryError) as error:
            log.warning(_SLOWER, error)
        except Exception:  # transformers' code can raise anything: it is read and called in unusual ways
            log.exception(_SLOWER, "its code could not be read")
            start_attention()
        else:
            runner.replace(_hand_over(eager, native, native))
            log.info("The native step is ready after %.1f s", (monotonic_ns() - started_ns) / 1e9)

    def start_attention() -> None:
        if not loaded.kv_shapes:  # nothing attends
            runner.replace(_with_threads(eager, num_threads))
            return
        try:
            native = native_attention(
                loaded,
                num_blocks=num_blocks,
                block_size=options.block_size,
                num_threads=num_threads,
                native_build=native_build,
            )
        except (BuildError, MemoryError, NotKnown) as error:
            log.info("Its attention is in plain torch: %s", error)
        else:
            runner.replace(_hand_over(eager, native, EagerExecutor(loaded, native.caches, native.prepare)))
            log.info("Its attention is native after %.1f s", (monotonic_ns() - started_ns) / 1e9)

    thread = Thread(target=start, name="compile", daemon=True)
    thread.start()
    if is_on_disk:
        thread.join()


def _needing_native(options: EngineOptions) -> str | None:
    """Find the setting that needs the native step.

    No other code runs quantized weights, has a cache in eight bits, or verifies drafts to the bit.
    """
    if options.quantize != "none":
        return f"--quantize {options.quantize}"
    if options.kv_cache_dtype != "auto":
        return f"--kv-cache-dtype {options.kv_cache_dtype}"
    return None if options.draft_model is None else "--draft-model"


def _with_threads(eager: EagerExecutor, num_threads: int) -> Callable[[], Executor]:
    """Return the function for `ModelRunner.replace` that keeps the executor, and sets the number of torch's threads."""

    def keep() -> Executor:
        torch.set_num_threads(num_threads)
        return eager

    return keep


def _hand_over(
    eager: EagerExecutor, native: NativeDecoder | NativeAttention, executor: Executor
) -> Callable[[], Executor]:
    """Return the function for `ModelRunner.replace` that copies the KV cache from `eager` to `native`.

    `executor` is what uses `native`.
    """

    def hand_over() -> Executor:
        if eager.num_used_blocks:
            native.adopt(list(eager.caches.values()), eager.num_used_blocks)
        torch.set_num_threads(native.torch_threads)
        return executor

    return hand_over


def native_step(
    loaded: LoadedModel, options: EngineOptions, key: Subject | None = None, *, num_blocks: int, num_threads: int
) -> NativeDecoder:
    """Make the native step that the options ask for, and remember for `key` that it computes the same."""
    return native_decoder(
        loaded,
        num_blocks=num_blocks,
        num_threads=num_threads,
        block_size=options.block_size,
        quantize=options.quantize,
        native_build=options.native_build,
        has_adapters=options.has_adapters,
        when_checked=None if key is None else partial(remember_checked, key, loaded, options=options),
    )


@torch.inference_mode()
def native_decoder(
    loaded: LoadedModel,
    *,
    num_blocks: int,
    block_size: int,
    num_threads: int,
    quantize: Quantize = "none",
    native_build: bool = False,
    has_adapters: bool = False,
    when_checked: WhenChecked | None = None,
) -> NativeDecoder:
    """Make the native step of a model, and compile the library if that has not been done.

    With `has_adapters`, it can compute with adapters, and the check has one.
    `when_checked` gets the description, and what later starts compare the logits of the batches of the check with, once
    it has passed: transformers' logits, or the native step's own where these had to be compared layer by layer.
    Raises BuildError, and NotKnown for a model that the native step does not support or computes differently.
    """
    refuse_unless_it_fits(loaded.kv_shapes.values(), block_size)
    library = Library(loaded.dtype, quantize, native_build=native_build)
    expected, parameters = transformers_logits(loaded, block_size)
    decoder = describe(loaded, parameters)
    if has_adapters:
        refuse_unless_adaptable(loaded.model, decoder)
    probe = probe_adapter(decoder.adaptable(), loaded.dtype) if has_adapters else None
    if probe is not None:
        expected += transformers_logits(loaded, block_size, probe)[0]
    make = partial(NativeDecoder, library, num_threads=num_threads, block_size=block_size, has_adapters=has_adapters)
    native = make(decoder, num_blocks=num_blocks)
    rounds_more = may_round_more(decoder, loaded.dtype, is_quantized=quantize != "none")
    checked: Any = {"block_size": block_size, "is_quantized": rounds_more, "probe": probe}
    try:
        refuse_unless_equal(native, loaded, expected, **checked)
    except Differs as error:
        if not error.difference < UNRELATED:
            raise
        log.info("Each layer is checked by itself, because all together round so differently that %s", error)
        refuse_unless_layers_are_equal(
            lambda adapter: transformers_logits(loaded, block_size, adapter)[0],
            lambda part: make(part, num_blocks=1),
            loaded,
            decoder,
            **checked,
        )
        expected = own_logits(native, loaded, block_size, probe)
    if when_checked is not None:
        when_checked(decoder, expected)
    return native


def refuse_unless_adaptable(model: PreTrainedModel, decoder: Decoder) -> None:
    """Raise NotKnown if adapters may name a layer of the model to which its description has no place to add one."""
    if left_out := adaptable(model).keys() - decoder.adaptable().keys():
        raise NotKnown(f"adapters may name '{min(left_out)}', to which it cannot add one")


@torch.inference_mode()
def transformers_logits(
    loaded: LoadedModel, block_size: int, adapter: Adapter | None = None
) -> tuple[list[Tensor], dict[int, AttentionParameters]]:
    """Return transformers' logits of the batches of the check, and what its layers call attention with, by layer.

    Where the native cache has eight bits, keys and values are rounded to these here, too.
    """
    num_blocks = -(-NUM_TOKENS // block_size)
    caches = EagerExecutor.with_cache(loaded, num_blocks=num_blocks, block_size=block_size).caches
    parameters: dict[int, AttentionParameters] = {}

    def record(layer: int, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        scaling, sliding_window, softcap, sinks, slopes = scoring
        has_sinks = sinks is not None
        parameters[layer] = AttentionParameters(scaling, sliding_window, softcap, has_sinks=has_sinks, slopes=slopes)
        if (shape := loaded.kv_shapes[layer]).is_int8:
            return rounded(key, KEY_GROUP), rounded(value, shape.value_dim)
        return key, value

    recording = EagerExecutor(loaded, caches, watched(caches, record))
    return [recording.forward(batch) for batch in batches(loaded, block_size, adapter)], parameters


def native_attention(
    loaded: LoadedModel, *, num_blocks: int, block_size: int, num_threads: int, native_build: bool = False
) -> NativeAttention:
    """Make native attention for a model, and compile the library if that has not been done.

    Raises BuildError, and NotKnown for sizes that the library does not support.
    """
    refuse_unless_it_fits(loaded.kv_shapes.values(), block_size)
    return NativeAttention(
        Library(loaded.dtype, native_build=native_build),
        loaded.kv_shapes,
        loaded.dtype,
        num_threads=num_threads,
        num_blocks=num_blocks,
        block_size=block_size,
    )
