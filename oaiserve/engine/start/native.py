"""Refuses options in vain, and replaces the eager executor of a model on a CPU by the native step, once it is checked.

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

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.adapters import Adapter, probe_adapter, refuse_unless_they_fit
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
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import KEY_GROUP, LoadedModel
from oaiserve.engine.start.cache import remember_checked
from oaiserve.engine.start.check import NUM_TOKENS, batches, may_round_more, refuse_unless_equal
from oaiserve.errors import StartupError
from oaiserve.facts.times import monotonic_ns
from oaiserve.files.start_cache import Subject

log = logging.getLogger(__name__)

_SLOWER = "The model runs without its native step, which is slower: %s"


def refuse_unless_possible(loaded: LoadedModel, options: EngineOptions) -> None:
    """Raise StartupError for the first option that the device, or the model, cannot obey."""
    on_cpu = loaded.is_on_cpu
    if options.kv_cache_dtype != "auto" and (options.kv_cache_dtype == "int8") != on_cpu:
        setting, device = f"--kv-cache-dtype {options.kv_cache_dtype}", "cuda" if on_cpu else "cpu"
        raise StartupError(f"{setting} is for --device {device}; the model is on {loaded.device}.")
    if options.has_adapters and loaded.state_shapes:
        flag = "--lora" if options.lora else "--lora-dir"
        raise StartupError(f"{flag} is not for '{loaded.name}', which has layers that keep a state.")
    if options.adapters:
        refuse_unless_they_fit(options.adapters, adaptable(loaded.model))


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
    """Replace the runner's executor `eager` by the native step, at once or when a thread has compiled its library.

    If the model cannot have the native step, the reason is logged, and `eager` is replaced by an eager executor with
    native attention if possible. `problem` is the reason, if it is known already. Raises StartupError if a setting
    needs the native step.
    """

    def start_step() -> None:
        if problem is not None:
            raise problem
        native = native_step(loaded, options, key, num_blocks=num_blocks, num_threads=num_threads)
        runner.replace(native, _hand_over(eager, native))

    if (needed_by := _needing_native(options)) is not None:
        try:
            start_step()
        except (BuildError, NotKnown) as error:
            raise StartupError(f"{needed_by} needs the native step, which cannot be used: {error}.") from error
        return
    try:
        is_on_disk = is_built(loaded.dtype)
    except BuildError as error:
        log.warning(_SLOWER, error)
        return
    started_ns = monotonic_ns()

    def start() -> None:
        try:
            start_step()
        except NotKnown as error:  # the reason is in the model: no user can do anything about it
            log.info(_SLOWER, error)
            start_attention()
        except (BuildError, MemoryError) as error:
            log.warning(_SLOWER, error)
        except Exception:  # transformers' code can raise anything: it is read and called in unusual ways
            log.exception(_SLOWER, "its code could not be read")
            start_attention()
        else:
            log.info("The native step is ready after %.1f s", (monotonic_ns() - started_ns) / 1e9)

    def start_attention() -> None:
        if not loaded.kv_shapes:  # nothing attends
            runner.replace(eager, partial(torch.set_num_threads, num_threads))
            return
        sizes = {"num_blocks": num_blocks, "block_size": options.block_size, "num_threads": num_threads}
        try:
            native = native_attention(loaded, **sizes)
        except (BuildError, MemoryError, NotKnown) as error:
            log.info("Its attention is in plain torch: %s", error)
        else:
            attending = EagerExecutor(loaded, native.caches, native.prepare)
            runner.replace(attending, _hand_over(eager, native))
            log.info("Its attention is native after %.1f s", (monotonic_ns() - started_ns) / 1e9)

    thread = Thread(target=start, name="compile", daemon=True)
    thread.start()
    if is_on_disk:
        thread.join()


def _needing_native(options: EngineOptions) -> str | None:
    """Return the flag that only the native step obeys, or None."""
    if options.kv_cache_dtype != "auto":
        return f"--kv-cache-dtype {options.kv_cache_dtype}"
    return None if options.prefix_cache_dir is None else "--prefix-cache-dir"


def _hand_over(eager: EagerExecutor, native: NativeDecoder | NativeAttention) -> Callable[[], None]:
    """Return the function that copies the KV cache from `eager` to `native`."""

    def hand_over() -> None:
        if eager.num_used_blocks:
            native.adopt(list(eager.caches.values()), eager.num_used_blocks)
        torch.set_num_threads(native.torch_threads)

    return hand_over


@torch.inference_mode()
def native_step(
    loaded: LoadedModel, options: EngineOptions, key: Subject | None = None, *, num_blocks: int, num_threads: int
) -> NativeDecoder:
    """Make the native step that the options ask for, and compile the library if that has not been done.

    What has been compared is remembered for `key`, by which later starts find it. Raises BuildError, and NotKnown for a
    model that the native step does not support or computes differently.
    """
    block_size = options.block_size
    refuse_unless_it_fits(loaded.kv_shapes.values(), block_size)
    library = Library(loaded.dtype)
    expected, parameters = transformers_logits(loaded, block_size)
    decoder, probe = describe(loaded, parameters), None
    if options.has_adapters:
        refuse_unless_adaptable(loaded.model, decoder)
        probe = probe_adapter(decoder.adaptable(), loaded.dtype)
        expected += transformers_logits(loaded, block_size, probe)[0]
    sizes: Any = {"num_blocks": num_blocks, "block_size": block_size, "num_threads": num_threads}
    native = NativeDecoder(library, decoder, **sizes, has_adapters=options.has_adapters)
    rounds_more = may_round_more(decoder, loaded.dtype, is_quantized=False)
    refuse_unless_equal(native, loaded, expected, block_size=block_size, is_quantized=rounds_more, probe=probe)
    if key is not None:
        remember_checked(key, loaded, decoder, expected, options)
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
        scaling, sliding_window, softcap, sinks = scoring
        parameters[layer] = AttentionParameters(scaling, sliding_window, softcap, has_sinks=sinks is not None)
        if (shape := loaded.kv_shapes[layer]).is_int8:
            return rounded(key, KEY_GROUP), rounded(value, shape.value_dim)
        return key, value

    recording = EagerExecutor(loaded, caches, watched(caches, record))
    return [recording.forward(batch) for batch in batches(loaded, block_size, adapter)], parameters


def native_attention(loaded: LoadedModel, *, num_blocks: int, block_size: int, num_threads: int) -> NativeAttention:
    """Make native attention for a model, and compile the library if that has not been done.

    Raises BuildError, and NotKnown for sizes that the library does not support.
    """
    refuse_unless_it_fits(loaded.kv_shapes.values(), block_size)
    return NativeAttention(
        Library(loaded.dtype),
        loaded.kv_shapes,
        loaded.dtype,
        num_threads=num_threads,
        num_blocks=num_blocks,
        block_size=block_size,
    )
