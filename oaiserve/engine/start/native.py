"""Refuses options in vain, and makes the executor of a model on a CPU: the native step, once it is checked.

A model that the native step has no operations for gets an eager executor with native attention instead.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.adapters import Adapter, probe_adapter, refuse_unless_they_fit
from oaiserve.engine.model.attention import Scoring
from oaiserve.engine.model.attention.reference import watched
from oaiserve.engine.model.attention.select import select_backend
from oaiserve.engine.model.cpu.attention import NativeAttention
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.description import AttentionParameters, Decoder, NotKnown
from oaiserve.engine.model.cpu.kv_layout import latent_dim, refuse_unless_it_fits, rounded
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.eager import EagerExecutor
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


def native_or_none(
    loaded: LoadedModel, options: EngineOptions, key: Subject | None = None, *, num_blocks: int, num_threads: int
) -> NativeDecoder | None:
    """Make the native step; None, with the reason in the log, if the model cannot have it.

    Raises StartupError if a setting needs it.
    """
    started_ns = monotonic_ns()
    try:
        native = native_step(loaded, options, key, num_blocks=num_blocks, num_threads=num_threads)
    except (BuildError, NotKnown, MemoryError) as error:
        if (needed_by := _needing_native(options)) is not None:
            raise StartupError(f"{needed_by} needs the native step, which cannot be used: {error}.") from error
        # About a reason in the model, no user can do anything.
        log.log(logging.INFO if isinstance(error, NotKnown) else logging.WARNING, _SLOWER, error)
        return None
    except StartupError:
        raise
    except Exception:  # transformers' code can raise anything: it is read and called in unusual ways
        if _needing_native(options) is not None:
            raise
        log.exception(_SLOWER, "its code could not be read")
        return None
    torch.set_num_threads(native.torch_threads)
    log.info("The native step is ready after %.1f s", (monotonic_ns() - started_ns) / 1e9)
    return native


def eager_on_cpu(loaded: LoadedModel, options: EngineOptions, *, num_blocks: int, num_threads: int) -> EagerExecutor:
    """Make the executor of a model without a native step: with native attention if that is possible."""
    started_ns, sizes = monotonic_ns(), {"num_blocks": num_blocks, "block_size": options.block_size}
    if options.compile and loaded.kv_shapes:
        try:
            native = native_attention(loaded, **sizes, num_threads=num_threads)
        except BuildError:
            pass  # it is the reason why there is no native step, either
        except (MemoryError, NotKnown) as error:
            log.info("Its attention is in plain torch: %s", error)
        else:
            torch.set_num_threads(native.torch_threads)
            log.info("Its attention is native after %.1f s", (monotonic_ns() - started_ns) / 1e9)
            return EagerExecutor(loaded, native.caches, native.prepare)
    elif options.compile:  # nothing attends
        torch.set_num_threads(num_threads)
    backend = select_backend(loaded.device, options.attention)
    return EagerExecutor.with_cache(loaded, backend=backend, **sizes)


def _needing_native(options: EngineOptions) -> str | None:
    """Return the flag that only the native step obeys, or None."""
    if options.kv_cache_dtype != "auto":
        return f"--kv-cache-dtype {options.kv_cache_dtype}"
    if options.exact:
        return "--exact"
    return None if options.prefix_cache_dir is None else "--prefix-cache-dir"


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
        remember_checked(key, loaded, decoder, expected)
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
        scaling, sliding_window, softcap, sinks, looks_ahead = scoring
        parameters[layer] = AttentionParameters(scaling, sliding_window, softcap, sinks is not None, looks_ahead)
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
