"""Starts a model on a CPU: transformers' code with a KV cache, and the native step in its place as soon as it is ready.

A KV cache of latent vectors is read by the native step alone, so a model that has one starts with that.
"""

from __future__ import annotations

from functools import partial

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.attention.select import select_backend
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.memory import cpu_sizes
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.load import load_with
from oaiserve.engine.start.native import native_step, refuse_unless_possible, start_native, with_native_cache
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.start.started import Started, assemble, started_on_cpu
from oaiserve.errors import StartupError
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
    """Start a model with transformers' code, and replace that by native code, if the options and the model allow it.

    For `key`, the native step is remembered when it has been compared. Raises StartupError where the options need the
    native step and it cannot be used, or where memory is too small.
    """
    refuse_unless_possible(loaded, options)
    num_threads = options.cpu_threads or default_threads()
    problem: Exception | None = None
    if loaded.has_latent_cache:
        num_blocks, num_states = cpu_sizes(loaded, options)
        try:
            native = native_step(loaded, options, key, num_blocks=num_blocks, num_threads=num_threads)
        except StartupError:
            raise
        except Exception as error:  # transformers' code can raise anything: it is read and called in unusual ways
            loaded, problem = loaded.with_latent_cache(0), error
        else:
            torch.set_num_threads(native.torch_threads)
            sizes = {"num_blocks": num_blocks, "num_states": num_states}
            return started_on_cpu(native, loaded, options, adaptable(loaded.model), **sizes)
    num_blocks, num_states = cpu_sizes(loaded, options)
    backend = select_backend(loaded.device, options.attention)
    eager = EagerExecutor.with_cache(loaded, backend=backend, num_blocks=num_blocks, block_size=options.block_size)
    sizes = {"num_blocks": num_blocks, "num_states": num_states}
    started = started_on_cpu(eager, loaded, options, adaptable(loaded.model), **sizes)
    if options.compile:
        sizes = {"num_blocks": num_blocks, "num_threads": num_threads}
        start_native(started.runner, eager, loaded, options, key, problem=problem, **sizes)
    return started
