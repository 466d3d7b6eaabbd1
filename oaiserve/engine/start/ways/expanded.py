"""Starts a model on a CPU with the weights that transformers loads, in the native step or in transformers' own code."""

from __future__ import annotations

from functools import partial

from oaiserve.config import EngineOptions
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.memory import cpu_sizes
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.kv_form import with_native_cache
from oaiserve.engine.start.load import load_with
from oaiserve.engine.start.native import eager_on_cpu, native_or_none, refuse_unless_possible
from oaiserve.engine.start.reference import reference_or_none
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.start.started import Started, assemble, started_on_cpu
from oaiserve.files.start_cache import Subject


class Expanded:
    """The start of any model on a CPU, with its weights as transformers loads them."""

    name = "with expanded weights"

    def accepts(self, request: StartRequest) -> str | None:
        return None

    def start(self, request: StartRequest) -> ServedModel:
        options = request.options
        loaded = request.load("weights", partial(load_with, options, request.source.path))
        loaded = with_native_cache(loaded, options)
        key = None if request.source.gguf_file is not None else request.key  # expanded weights are in no file
        with request.times.part("native step"):
            return assemble(start_on_cpu(loaded, options, key), request.tokenizer, options)


def start_on_cpu(loaded: LoadedModel, options: EngineOptions, key: Subject | None = None) -> Started:
    """Start a model with the native step, or else with the reference or transformers' code, as options and sizes allow.

    For `key`, the native step is remembered when it has been compared. Raises StartupError where the options need the
    native step and it cannot be used, or where memory is too small.
    """
    refuse_unless_possible(loaded, options)
    num_threads = options.cpu_threads or default_threads()
    num_blocks, num_states = cpu_sizes(loaded, options)
    executor: EagerExecutor | NativeDecoder | ReferenceExecutor | None = None
    if options.compile:
        executor = native_or_none(loaded, options, key, num_blocks=num_blocks, num_threads=num_threads)
        executor = executor or reference_or_none(loaded, options, num_blocks=num_blocks, num_threads=num_threads)
    if executor is None:
        if loaded.has_latent_cache:  # which the native step alone reads
            loaded = loaded.with_latent_cache(0)
            num_blocks, num_states = cpu_sizes(loaded, options)
        executor = eager_on_cpu(loaded, options, num_blocks=num_blocks, num_threads=num_threads)
    sizes = {"num_blocks": num_blocks, "num_states": num_states}
    return started_on_cpu(executor, loaded, options, adaptable(loaded.model), **sizes)
