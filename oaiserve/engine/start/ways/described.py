"""Starts a text model on a CPU from a description of its files, in the native step."""

from __future__ import annotations

import logging

import torch

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.model.adapters import refuse_unless_they_fit
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.kv_layout import refuse_unless_it_fits
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.memory import cpu_sizes
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.cache import is_native
from oaiserve.engine.start.check import refuse_unless_finite
from oaiserve.engine.start.described import describe_model
from oaiserve.engine.start.request import Declined, StartRequest
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
    refuse_unless_it_fits(spec.kv_shapes.values(), options.block_size)
    adaptable = decoder.adaptable()
    refuse_unless_they_fit(options.adapters, adaptable)
    num_blocks, num_states = cpu_sizes(spec, options)
    torch.set_num_threads(NativeDecoder.torch_threads)  # before torch computes anything and starts more
    native = NativeDecoder(
        library,
        decoder,
        num_blocks=num_blocks,
        block_size=options.block_size,
        num_threads=options.cpu_threads or default_threads(),
        has_adapters=options.has_adapters,
        reserved=request.reserved,
    )
    refuse_unless_finite(native, spec, options.block_size)
    return started_on_cpu(native, spec, options, adaptable, num_blocks=num_blocks, num_states=num_states)
