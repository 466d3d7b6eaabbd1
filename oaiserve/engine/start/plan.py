"""Starts a model: finds its files, tries the ways to start it in turn, and assembles the engine's model.

Ways that start from a description come first. They are fast, because they import nothing from transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import MappingProxyType

from oaiserve.checkpoints import demo
from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.hub import fetched
from oaiserve.checkpoints.load_errors import reported
from oaiserve.checkpoints.model_defaults import ModelDefaults, model_defaults
from oaiserve.checkpoints.soundness import refuse_unless_sound, refuse_without_tokenizer, warn_of_other_weights
from oaiserve.checkpoints.source import ModelSource, find_mmproj, find_model
from oaiserve.checkpoints.wrong_settings import wrong_setting
from oaiserve.config import EngineOptions
from oaiserve.engine.encoder import Media
from oaiserve.engine.executors.native.reserved import packed_bytes, reserve
from oaiserve.engine.sequences.draw_columns import DRAW_COLUMNS
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.named_tokens import warn_of_missing_tokens
from oaiserve.engine.start.request import (
    ON_GPU,
    Declined,
    LoadMedia,
    StartRequest,
    Way,
    refuse_if_native_is_needed,
    without_generation,
)
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.engine.start.task import find_task
from oaiserve.engine.start.torch_library import load_library
from oaiserve.errors import StartupError
from oaiserve.runtime import Runtime
from oaiserve.system_cpus import usable_cpus
from oaiserve.system_memory import available_bytes

log = logging.getLogger(__name__)


def start_model(
    model: str | Path,
    options: EngineOptions,
    times: StartTimes,
    meanwhile: Callable[[], object],
    runtime: Runtime,
    default_params: Mapping[str, float] = MappingProxyType({}),
    ways: Callable[[], Iterable[Way]] = tuple,
    load_media: LoadMedia | None = None,
) -> ServedModel:
    """Load a model and get it ready for an engine. `Engine.from_pretrained` documents the arguments.

    `default_params` are the default sampling parameters of requests if the model's files state none. If they aren't
    given either, the recommendations of the model's publisher are the defaults.
    """
    if model == "demo":
        folder = demo.fetched()
        # Digests are computed during the imports, which leave a core idle.
        with runtime.executor("digests") as beside:
            unchanged = beside.submit(times.run, "digests", demo.refuse_unless_unchanged, folder)
            try:
                return start_model(folder, options, times, meanwhile, runtime, demo.DEFAULTS, ways, load_media)
            finally:
                unchanged.result()  # Its error, if any, explains the one that was raised.
    if options.device != "cuda" and (options.cpu_threads or 0) > usable_cpus():
        log.warning(
            "--cpu-threads is %d, but this process may run on %d CPUs only. Threads that share one wait for each "
            "other, so steps take longer",
            options.cpu_threads,
            usable_cpus(),
        )
    _refuse_offload(options)
    source = find_model(model)
    if not source.is_local:
        source = times.run("files of the hub", lambda: fetched(source, with_media=options.media))
    with reported(f"No model could be loaded from {source.shown}"), _wrong_setting_named(source):
        refuse_unless_sound(source)
        refuse_without_tokenizer(source)
        warn_of_other_weights(source)
        served = _started(StartRequest(source, options, runtime, times, meanwhile, default_params), ways, load_media)
        warn_of_missing_tokens(source, served.vocab_size, served.eos_token_ids)
        if not options.nvtx:
            return served
        from oaiserve.engine.model.torch_ranges import ranges_on

        return replace(served, ranges=ranges_on(served.device))


@contextmanager
def _wrong_setting_named(source: ModelSource) -> Iterator[None]:
    """In the `with` block, raise transformers' refusal of a setting instead of another error, if there is one."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StartupError) or source.gguf_file is not None:
            raise
        from oaiserve.engine.start.load import config_of

        try:
            config_of(source)
        except Exception as refusal:
            if isinstance(refusal, StartupError) or wrong_setting(refusal) is not None:
                raise
        raise


def _started(
    request: StartRequest, ways_of_plugins: Callable[[], Iterable[Way]], load_media: LoadMedia | None
) -> ServedModel:
    source = request.source
    declined: list[str] = []
    media = _media(request, load_media)
    for way in _ways(request, ways_of_plugins):
        reason = way.accepts(request)
        if reason is None:
            try:
                defaults = _defaults(request)
                started = way.start(request)
                served = replace(
                    started,
                    media=started.media or media,
                    path=source.path,
                    default_params=defaults.values,
                    recommendation=defaults.recommendation,
                )
            except Declined as error:
                reason = str(error)
                log.debug("The model does not start %s: %s", way.name, reason)
            else:  # If the model is refused, only the refusal is logged.
                log.debug("The model starts %s%s", way.name, f" (not {'; not '.join(declined)})" if declined else "")
                return _with_tier(served, request)
        declined.append(f"{way.name}: {reason}")
    raise AssertionError(declined)  # The last way starts any model, or tells the user what to do.


def _refuse_offload(options: EngineOptions, kv_bytes: int = 0) -> None:
    """Raise StartupError if --kv-offload does not fit into the memory that the KV cache leaves."""
    size = options.kv_offload
    free_bytes = max(0, available_bytes() - kv_bytes)
    if size is not None and size > free_bytes:
        raise StartupError(f"--kv-offload is {size}, but only {free_bytes / 2**30:.1f} GiB of memory are available.")


def _with_tier(served: ServedModel, request: StartRequest) -> ServedModel:
    """Return the model with the lower tier of KV blocks that the options request. Call this once torch is loaded."""
    options = request.options
    if (cache_dir := options.prefix_cache_dir) is not None:
        from oaiserve.engine.start.kept_blocks import keep_blocks

        return keep_blocks(served, request.source, cache_dir, options)
    if options.kv_offload is not None:
        from oaiserve.engine.start.host_memory import offload_blocks

        # On a CPU, the KV cache only takes up memory as it fills.
        _refuse_offload(options, served.num_blocks * served.block_bytes if served.device == "cpu" else 0)
        return offload_blocks(served, options.kv_offload)
    return served


def _defaults(request: StartRequest) -> ModelDefaults:
    if request.options.generation_config:
        return model_defaults(request.source, (*DRAW_COLUMNS, "repetition_penalty"), request.default_params)
    return ModelDefaults({})


def _media(request: StartRequest, load_media: LoadMedia | None) -> Media | None:
    """Load what reads images and sounds for a multimodal model, before the KV cache takes all remaining memory."""
    source = request.source
    options = request.options
    mmproj = find_mmproj(source, options.mmproj) if options.media else None
    try:
        parts = source.checkpoint.config if source.gguf_file is None else {}
    except (BadFile, OSError):  # The load reports what is wrong.
        parts = {}
    has_tower = mmproj is not None or parts.get("vision_config") is not None or parts.get("audio_config") is not None
    if not options.media or not has_tower:
        return None
    if load_media is None:
        log.warning(
            "Images and sounds of '%s' are not read: that needs the plug-in 'media', which is not loaded", source.path
        )
        return None
    from oaiserve.engine.start.first_use import prepare_torch

    prepare_torch(options.cpu_features)  # Torch ignores limits once it has loaded a tower.
    return load_media(request, mmproj)


def compile_early(options: EngineOptions, stored: str | None) -> Thread | None:
    """Start a thread that compiles the native code for this dtype, if it is known, while the start continues. Return
    None if there is nothing to compile. Raises StartupError for options that a CPU doesn't support."""
    import torch

    from oaiserve.engine.executors.native.build import build_beside
    from oaiserve.engine.start.first_use import prepare_torch
    from oaiserve.engine.start.options import refuse_on_device
    from oaiserve.engine.start.ways.described import is_on_cpu

    prepare_torch(options.cpu_features)
    if is_on_cpu(options):
        refuse_on_device(options, "cpu")
    if stored is None or not (options.compile and is_on_cpu(options)) or options.task in ("embed", "score"):
        return None
    if options.dtype == "auto":
        name = {"float16": "float32"}.get(stored, stored)
    else:
        name = options.dtype
    dtype = getattr(torch, name, None)
    return build_beside(dtype) if isinstance(dtype, torch.dtype) else None  # Otherwise the load reports what is wrong.


def refuse_early(source: ModelSource, options: EngineOptions) -> None:
    """Raise StartupError for options that a model doesn't support on a CPU, before compiling native code for
    minutes."""
    from oaiserve.engine.decoder.description import NotKnown
    from oaiserve.engine.start.described import refuse_by_header

    try:
        refuse_by_header(source, options)
    except NotKnown as reason:
        refuse_if_native_is_needed(options, reason)


def _stored_dtype(source: ModelSource, options: EngineOptions) -> str | None:
    """Return the name of the dtype in which a decoder's native code computes by default; None if its files don't state
    one."""
    if source.gguf_file is not None or options.quantize != "none":
        return "bfloat16"
    try:
        config = source.checkpoint.config
        if config.get("quantization_config"):
            return "bfloat16"
        stored = config.get("dtype") or config["torch_dtype"]
        if isinstance(stored, str):
            return stored
        return None
    except (BadFile, OSError, KeyError):  # The load reports what is wrong.
        return None


def _ways(request: StartRequest, of_plugins: Callable[[], Iterable[Way]]) -> Iterator[Way]:
    """Yield the ways to start, in the order in which they are tried. Those of plug-ins come first, and then those that
    import nothing from transformers. Raises StartupError for a model that needs a plug-in."""
    source = request.source
    options = request.options
    times = request.times
    request.task = find_task(source, options.task)
    is_text = request.task == "generate"
    if not is_text:
        request.options = without_generation(options)
    if is_text and source.gguf_file is not None and options.compile and options.device != "cuda":
        # The system provides memory for packed weights while a core is idle during imports.
        file_bytes = sum(part.stat().st_size for part in source.checkpoint.head.paths)
        request.reserved = reserve(packed_bytes(file_bytes), request.runtime)
    load_library()
    request.meanwhile()  # imports Python code, while a core loads the library
    with times.part("import of torch"):
        from oaiserve.engine.start.first_use import prepare_torch
    prepare_torch(options.cpu_features)
    ways = [*of_plugins()]
    yield from ways
    if not is_text:
        raise StartupError(
            f"'{source.path}' cannot be served for --task {request.task}: that needs the plug-in "
            f"'{'speech' if request.task == 'transcribe' else 'pooling'}', which is not loaded."
        )
    with times.part("import of the native step"):
        from oaiserve.engine.start.ways.described import FromDescription, is_on_cpu
    if is_on_cpu(options):
        refuse_early(source, options)
    request.compiling = compile_early(options, _stored_dtype(source, options))
    yield FromDescription()
    if not is_on_cpu(options) and all(way.name != ON_GPU for way in ways):
        from oaiserve.engine.model.device import select_device

        select_device(options.device)  # raises if there is no GPU
        log.warning(
            "Transformers' own code computes '%s' on the GPU, which is slower: kernels for it need the plug-in 'cuda', "
            "which is not loaded",
            source.path,
        )
    with request.importing_transformers():
        from oaiserve.engine.start.ways.fallback import Fallback
    yield Fallback()
