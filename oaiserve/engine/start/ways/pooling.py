"""Starts a model that pools."""

from __future__ import annotations

from typing import NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.pooling.pooler import LoadedPooler
from oaiserve.engine.model.pooling.runner import PoolingRunner
from oaiserve.engine.model.profiler import TorchProfiler
from oaiserve.engine.start.started import CPU_STEP_TOKENS, GPU_STEP_TOKENS


class StartedPooling(NamedTuple):
    """All that the engine needs of a model that pools."""

    runner: PoolingRunner
    max_step_tokens_default: int
    profiler: TorchProfiler


def start_pooling(pooler: LoadedPooler, options: EngineOptions) -> StartedPooling:
    """Make the runner of a model that pools."""
    on_cpu = pooler.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(options.cpu_threads or default_threads())
    runner = PoolingRunner(pooler)
    return StartedPooling(runner, CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS, TorchProfiler(pooler.device))
