"""Starts a text model on a CPU from a description of its files: in the native step, or else in plain PyTorch."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Decoder, NotKnown, matrices_in
from oaiserve.engine.decoder.sources.hub import HubTensors
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.native.build import BuildError
from oaiserve.engine.executors.native.kv_layout import refuse_unless_it_fits
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.memory import cpu_sizes
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.check import refuse_unless_finite
from oaiserve.engine.start.described import Described, describe_model
from oaiserve.engine.start.options import refuse_unless_possible
from oaiserve.engine.start.probe import WrongHere, refuse_unless_probed
from oaiserve.engine.start.request import Declined, StartRequest, needing_native, refuse_if_native_is_needed
from oaiserve.engine.start.start_record import recall_start, remember_start, subject_of
from oaiserve.engine.start.started import Started, assemble, started_on_cpu
from oaiserve.storage.start_cache import NotRemembered
from oaiserve.system_cpus import default_threads

log = logging.getLogger(__name__)


def is_on_cpu(options: EngineOptions) -> bool:
    """Decide from the options and this machine whether the model runs on a CPU."""
    return options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available())


class FromDescription:
    name = "from a description of its files"

    def accepts(self, request: StartRequest) -> str | None:
        if request.task != "generate":
            return f"it is for --task {request.task}"
        if is_on_cpu(request.options):
            return None
        return "it is for a GPU"

    def start(self, request: StartRequest) -> ServedModel:
        try:
            packs_blocks = request.source.gguf_file is not None
            started = request.load("weights", lambda: _started(request), packs_blocks=packs_blocks)
        except (BuildError, MemoryError, NotKnown) as reason:
            request.drop_reserved()
            refuse_if_native_is_needed(request.options, reason)
            raise Declined(str(reason)) from reason
        return assemble(started, request.tokenizer, request.options, request.runtime)


def _started(request: StartRequest) -> Started:
    options = request.options
    if request.compiling is not None:
        request.went_native.put(None)
        with request.times.part("native code"):
            request.compiling.join()
    subject = subject_of(request.source.checkpoint, options)
    blocks: Path | None = None
    is_recorded = False
    try:
        if subject is not None and not options.recheck:
            blocks = recall_start(subject)
            is_recorded = True
    except NotRemembered as reason:
        log.debug("No earlier start is recorded: %s", reason)
    spec, decoder, library, quantized, tensors = _described(request, blocks)
    adaptable = decoder.adaptable()
    refuse_unless_possible(spec, options, adaptable)
    unpacked_bytes = 0 if library is None else _unpacked_bytes(request, decoder)
    num_blocks, num_states = cpu_sizes(spec, options, unpacked_bytes)
    executor = _executor(request, spec, decoder, library, num_blocks)
    refuse_unless_finite(executor, spec, options.block_size)
    if isinstance(tensors, HubTensors) and isinstance(executor, NativeDecoder):
        tensors.give_back()  # The native decoder has copies of everything except the embedding.
    if subject is not None and (not is_recorded or quantized is not None):
        remember_start(subject, quantized, request.runtime)
    return started_on_cpu(executor, spec, options, adaptable, num_blocks=num_blocks, num_states=num_states)


def _described(request: StartRequest, blocks: Path | None) -> Described:
    """Describe the model. If a native library is needed by no option and can't be built, do without one."""
    source = request.source
    options = request.options
    try:
        return describe_model(source, options, blocks)
    except BuildError as error:
        if needing_native(options) is not None:
            raise
        log.warning("The model runs without native code, which is slower: %s", error)
        return describe_model(source, replace(options, compile=False), blocks)


def _unpacked_bytes(request: StartRequest, decoder: Decoder) -> int:
    """Return how many more bytes the system must provide for weights when native code packs them."""
    num_taken = 0 if request.reserved is None else request.reserved.num_taken
    weights = {id(matrix.weight): matrix.weight for matrix in matrices_in(decoder)}
    return max(0, sum(weight.nbytes for weight in weights.values()) - num_taken)


def _executor(
    request: StartRequest, spec: ModelSpec, decoder: Decoder, library: Library | None, num_blocks: int
) -> NativeDecoder | ReferenceExecutor:
    """Make the native step. If there is no native code for the model and no option needs it, make the reference
    executor."""
    options = request.options
    num_threads = options.cpu_threads or default_threads()
    try:
        if library is None:
            raise NotKnown("there is no native code for it" if options.compile else "--no-compile is given")
        refuse_unless_it_fits(spec.kv_shapes.values(), options.block_size)
        torch.set_num_threads(NativeDecoder.torch_threads)  # before torch computes anything and starts more threads
        refuse_unless_probed(library, again=options.recheck)
        return NativeDecoder(
            library,
            decoder,
            num_blocks=num_blocks,
            block_size=options.block_size,
            num_threads=num_threads,
            has_adapters=options.has_adapters,
            reserved=request.reserved,
            before_packing=lambda: request.went_native.put(None),
        )
    except NotKnown as error:
        if needing_native(options) is not None:
            raise
        if isinstance(error, WrongHere):
            level = logging.WARNING
        else:
            level = logging.DEBUG
        log.log(level, "The model runs in plain PyTorch, which is slower: %s", error)
    # Only at this point has the memory of the native step been freed.
    request.drop_reserved()
    torch.set_num_threads(num_threads)
    sizes = {"num_blocks": num_blocks, "block_size": options.block_size}
    return ReferenceExecutor(decoder, dtype=spec.dtype, device=spec.device, **sizes)
