"""Starts a model that has no description: transformers' own code computes its steps, with its own cache."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from oaiserve.checkpoints.load_errors import reported
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.context_length import refuse_longer
from oaiserve.engine.decoder.model_spec import ids_of
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.fallback import CachedForward, FallbackExecutor
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.device import move, select_device
from oaiserve.engine.model.memory import CPU_SHARE, STATES_SHARE, gib, longest_request, sizes_of_caches
from oaiserve.engine.model.model_config import context_length, most_tokens, select_dtype
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.load import load_weights, read_checkpoint
from oaiserve.engine.start.measure import measure
from oaiserve.engine.start.request import StartRequest, needing_native
from oaiserve.engine.start.started import CPU_STEP_TOKENS, GPU_STEP_TOKENS, Started, assemble
from oaiserve.errors import StartupError
from oaiserve.system_cpus import default_threads
from oaiserve.system_memory import available_bytes

log = logging.getLogger(__name__)


class Fallback:
    name = "in transformers' own code"

    def accepts(self, request: StartRequest) -> str | None:
        return None

    def start(self, request: StartRequest) -> ServedModel:
        options = request.options
        name = request.source.location
        model = request.load("weights", lambda: load(request, select_device(options.device)))
        with request.times.part("measuring the cache"), reported(f"'{name}' cannot be served"):
            started = start_fallback(model, options, name)
            return assemble(started, request.tokenizer, options, request.runtime)


def load(request: StartRequest, device: torch.device) -> PreTrainedModel:
    """Load a model of transformers. Raises StartupError for one that its code cannot compute."""
    if device.type == "cpu":  # transformers would log requests for packages with GPU kernels
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    source = request.source
    options = request.options
    name = request.source.gguf_file or request.source.location
    checkpoint = read_checkpoint(source, name)
    config = checkpoint.config
    if options.media and (hasattr(config, "rope_axes") or hasattr(config, "num_deep_layers")):
        raise StartupError(
            f"'{name}' reads images by positions, or into layers, that transformers' code for its text model does not "
            "take; --no-media serves its text."
        )
    with reported(f"No model could be loaded from {source.shown}"):
        refuse_longer(options.max_model_len, most_tokens(config))
        dtype = select_dtype(options.dtype, config, device, is_gguf=checkpoint.is_gguf, for_tensor_cores=True)
    model = load_weights(checkpoint, dtype)
    move(model, device, name)
    return model


def start_fallback(model: PreTrainedModel, options: EngineOptions, name: str) -> Started:
    """Start a loaded model. Raises StartupError for options that need code of our own, and if there is too little
    memory."""
    flag = options.adapters_flag if options.has_adapters else needing_native(options)
    if flag is not None:
        raise StartupError(f"{flag} is not for '{name}', which runs in transformers' own code.")
    if model.device.type == "cpu":
        torch.set_num_threads(options.cpu_threads or default_threads())
    model.eval()
    forward = CachedForward(model)
    measured = measure(forward)
    spec = ModelSpec(
        name=type(model).__name__,
        device=model.device,
        dtype=model.dtype,
        vocab_size=measured.vocab_size,
        max_model_len=options.max_model_len or context_length(model.config),
        eos_token_ids=ids_of(model.config.eos_token_id)
        | ids_of(getattr(model.generation_config, "eos_token_id", None)),
        kv_shapes={},
    )
    num_caches, longest, num_blocks = sizes_of_caches(measured.cache, spec, options, _room(spec, options))
    executor = FallbackExecutor(forward, num_caches, continues_chunks=measured.continues_chunks)
    runner = ModelRunner(executor, model.device, options.block_size, states=executor.caches)
    return Started(
        spec,
        {},
        runner,
        num_blocks,
        longest_request(spec, longest),
        CPU_STEP_TOKENS if spec.is_on_cpu else GPU_STEP_TOKENS,
        num_states=num_caches,
        weight_bytes=executor.weight_bytes,
        features={"native_step" if spec.is_on_cpu else "kernels": "transformers' own code computes the steps"},
    )


def _room(spec: ModelSpec, options: EngineOptions) -> float:
    """Return the bytes for caches: --kv-cache-memory, or a share of the free memory.

    On a GPU, steps need as much again, because a cache is copied when it grows.
    """
    free: float = available_bytes()
    room = free * CPU_SHARE / options.num_sharing
    if not spec.is_on_cpu:
        on_device, total = torch.cuda.mem_get_info(spec.device)
        free = max(0.0, on_device - total * (1 - options.gpu_memory_utilization))
        room = free * STATES_SHARE
    if options.kv_cache_memory is None:
        return room
    if options.kv_cache_memory > free:
        raise StartupError(
            f"--kv-cache-memory is {options.kv_cache_memory}, but only {gib(free)} GiB are free on {spec.device}."
        )
    return options.kv_cache_memory
