"""Refuses options in vain, and makes the executor of a model on a CPU: the native step, once it is checked.

A model that the native step has no operations for gets an eager executor with native attention instead.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from oaiserve.config import EngineOptions, KVCacheDtype
from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.adapters import refuse_unless_they_fit
from oaiserve.engine.model.attention.select import select_backend
from oaiserve.engine.model.cpu.attention import NativeAttention
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.kv_layout import refuse_unless_it_fits
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.start.cache import remember_checked
from oaiserve.engine.start.check import Part, refuse_unless_as_checked, refuse_unless_finite
from oaiserve.engine.start.request import needing_native
from oaiserve.engine.start.small_model import (
    Reference,
    attention_parameters,
    outline,
    part_described,
    reference_of,
    small_model,
)
from oaiserve.errors import StartupError
from oaiserve.facts.times import monotonic_ns
from oaiserve.files.start_cache import Subject

log = logging.getLogger(__name__)

_SLOWER = "The model runs without native code, which is slower: %s"


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
        if (needed_by := needing_native(options)) is not None:
            raise StartupError(f"{needed_by} needs the native step, which cannot be used: {error}.") from error
        # About a reason in the model, no user can do anything.
        log.log(logging.DEBUG if isinstance(error, NotKnown) else logging.WARNING, _SLOWER, error)
        return None
    except StartupError:
        raise
    except Exception:  # transformers' code can raise anything: it is read and called in unusual ways
        if needing_native(options) is not None:
            raise
        log.exception(_SLOWER, "its code could not be read")
        return None
    torch.set_num_threads(native.torch_threads)
    log.debug("The native step is ready after %.1f s", (monotonic_ns() - started_ns) / 1e9)
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
            log.debug("Attention runs in plain PyTorch: %s", error)
        else:
            torch.set_num_threads(native.torch_threads)
            log.debug("Attention runs natively after %.1f s", (monotonic_ns() - started_ns) / 1e9)
            return EagerExecutor(loaded, native.caches, native.prepare)
    elif options.compile:  # nothing attends
        torch.set_num_threads(num_threads)
    backend = select_backend(loaded.device, options.attention)
    return EagerExecutor.with_cache(loaded, backend=backend, **sizes)


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
    decoder = describe(loaded, attention_parameters(loaded, block_size))
    if options.has_adapters:
        refuse_unless_adaptable(loaded.model, decoder)
    reference = _reference(loaded, decoder, options)
    sizes: Any = {"block_size": block_size, "num_threads": num_threads, "has_adapters": options.has_adapters}
    refuse_unless_as_checked(library, decoder, loaded, reference.checked, options, num_threads=num_threads)
    native = NativeDecoder(library, decoder, num_blocks=num_blocks, **sizes)
    refuse_unless_finite(native, loaded, block_size)
    if key is not None:
        remember_checked(key, loaded, decoder, reference.checked)
    return native


def _reference(loaded: LoadedModel, decoder: Decoder, options: EngineOptions) -> Reference:
    """Let transformers' code compute a part of a loaded model. Raises NotKnown unless that is described alike."""
    model, part = small_model_of(loaded, decoder)
    cache: KVCacheDtype = "int8" if any(shape.is_int8 for shape in loaded.kv_shapes.values()) else "auto"
    sized = replace(options, max_model_len=loaded.max_model_len, kv_cache_dtype=cache)
    found = reference_of(model, part, loaded.name, sized, loaded.dtype, is_quantized=decoder.has_experts)
    refuse_unless_described_alike(describe(found.loaded, found.parameters), decoder, part)
    return found


def small_model_of(loaded: LoadedModel, decoder: Decoder) -> tuple[PreTrainedModel, Part]:
    """Make a model in float32 of a part of a loaded one, which has a layer of each kind."""
    config = loaded.model.config
    whole = dict(loaded.model.named_buffers()) | loaded.model.state_dict()
    part = part_described(config, decoder.layers, loaded.vocab_size)
    model = small_model(config, part, whole.__getitem__)
    for name, buffer in model.named_buffers():
        own = whole[part.name_in_whole(name)]
        if own.shape == buffer.shape:
            buffer.copy_(own)  # rotary frequencies may be of a file
    return model, part


def refuse_unless_described_alike(small: Decoder, whole: Decoder, part: Part) -> None:
    """Raise NotKnown unless the layers of a part have, in a model of their own, the description that the whole has."""
    if [outline(layer) for layer in small.layers] != [outline(whole.layers[layer]) for layer in part.layers]:
        raise NotKnown("a part of its layers is described otherwise than in the whole model")


def refuse_unless_adaptable(model: PreTrainedModel, decoder: Decoder) -> None:
    """Raise NotKnown if adapters may name a layer of the model to which its description has no place to add one."""
    if left_out := adaptable(model).keys() - decoder.adaptable().keys():
        raise NotKnown(f"adapters may name '{min(left_out)}', to which it cannot add one")


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
