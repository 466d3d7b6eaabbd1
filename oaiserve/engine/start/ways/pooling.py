"""Starts a model that turns texts into vectors or scores. It has no KV cache."""

from __future__ import annotations

import logging
from functools import partial

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.pooling.pooler import LoadedPooler, PoolingRunner
from oaiserve.engine.model.profiler import TorchProfiler
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.load_pooler import load_pooler
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.start.started import CPU_STEP_TOKENS, GPU_STEP_TOKENS
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError

log = logging.getLogger(__name__)


class Pooling:
    """The start of a model that pools."""

    name = "to pool"

    def accepts(self, request: StartRequest) -> str | None:
        return "it generates text" if request.task == "generate" else None

    def start(self, request: StartRequest) -> ServedModel:
        source, task, options = request.source, request.task, request.options
        if options.has_adapters:
            flag = "--lora" if options.lora else "--lora-dir"
            raise StartupError(f"{flag} is for models that generate text, and '{source.path}' is for --task {task}.")
        if options.draft_model is not None:
            raise StartupError(
                f"--draft-model is for models that generate text; the task of '{source.path}' is {task}."
            )
        pooler = request.load("weights", partial(load_pooler, source.path, task, options))
        return start_pooling(pooler, request.tokenizer, options)


def start_pooling(pooler: LoadedPooler, tokenizer: Tokenizer, options: EngineOptions) -> ServedModel:
    """Make the runner of a model that pools."""
    dtype = str(pooler.dtype).removeprefix("torch.")
    log.info(
        "%s on %s in %s, for --task %s: up to %d tokens a text",
        type(pooler.layers).__name__,
        pooler.device,
        dtype,
        pooler.pooling.task,
        pooler.max_model_len,
    )
    on_cpu = pooler.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(options.cpu_threads or default_threads())
    return ServedModel(
        tokenizer=tokenizer,
        runner=PoolingRunner(pooler),
        num_blocks=0,
        max_model_len=pooler.max_model_len,
        vocab_size=pooler.vocab_size,
        max_step_tokens_default=CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS,
        device=str(pooler.device),
        dtype=dtype,
        profiler=TorchProfiler(pooler.device),
        pooling=pooler.pooling,
    )
