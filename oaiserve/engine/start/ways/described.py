"""Starts a text model on a CPU from a description of its files, in the native step, or the reference for odd sizes."""

from __future__ import annotations

import logging

import torch

from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.adapters import refuse_unless_they_fit
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.kv_layout import refuse_unless_it_fits
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.memory import cpu_sizes
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.cache import is_native
from oaiserve.engine.start.check import refuse_unless_finite
from oaiserve.engine.start.described import describe_model
from oaiserve.engine.start.request import Declined, StartRequest, needing_native
from oaiserve.engine.start.started import Started, assemble, started_on_cpu

log = logging.getLogger(__name__)


class FromDescription:
    """The start of a model that its family describes."""

    name = "from a description of its files"

    def accepts(self, request: StartRequest) -> str | None:
        options = request.options
        if not is_native(options):
            return "these options, or this device, do without the native step"
        return "--quantize is not for it" if options.quantize != "none" else None

    def start(self, request: StartRequest) -> ServedModel:
        try:
            started = request.load("weights", lambda: _started(request))
        except (BuildError, MemoryError, NotKnown) as reason:
            raise Declined(str(reason)) from reason
        return assemble(started, request.tokenizer, request.options)


def _started(request: StartRequest) -> Started:
    options = request.options
    spec, decoder, library = describe_model(request.source, options)
    adaptable = decoder.adaptable()
    refuse_unless_they_fit(options.adapters, adaptable)
    num_blocks, num_states = cpu_sizes(spec, options)
    executor = _executor(request, spec, decoder, library, num_blocks)
    refuse_unless_finite(executor, spec, options.block_size)
    return started_on_cpu(executor, spec, options, adaptable, num_blocks=num_blocks, num_states=num_states)


def _executor(
    request: StartRequest, spec: ModelSpec, decoder: Decoder, library: Library, num_blocks: int
) -> NativeDecoder | ReferenceExecutor:
    """Make the native step, or the reference where native code does not take the sizes and no option needs it."""
    options = request.options
    num_threads = options.cpu_threads or default_threads()
    try:
        refuse_unless_it_fits(spec.kv_shapes.values(), options.block_size)
        torch.set_num_threads(NativeDecoder.torch_threads)  # before torch computes anything and starts more
        return NativeDecoder(
            library,
            decoder,
            num_blocks=num_blocks,
            block_size=options.block_size,
            num_threads=num_threads,
            has_adapters=options.has_adapters,
            reserved=request.reserved,
        )
    except NotKnown as error:
        if needing_native(options) is not None:
            raise
        log.debug("The model runs in plain PyTorch, which is slower: %s", error)
    # Only here has the memory of the native step been freed.
    request.drop_reserved()
    torch.set_num_threads(num_threads)
    sizes = {"num_blocks": num_blocks, "block_size": options.block_size}
    return ReferenceExecutor(decoder, dtype=spec.dtype, device=spec.device, **sizes)
