"""Measures the engine with its default settings: how long it takes to start, and the size of its KV cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from tools.engine_load import complete, random_prompts
from tools.gpu.target import NOT_ON_CPU, Target
from tools.gpu.workload import load, release, running_engine

MODELS = ("llama-3.2-1b", "llama-3.1-8b")


def run(target: Target) -> Iterator[dict[str, Any]]:
    if not target.is_gpu:
        yield {"problem": NOT_ON_CPU}
        return
    for name in MODELS[:1] if target.quick else MODELS:
        loaded = load(name, target)
        began = time.perf_counter()
        with running_engine(loaded) as engine:
            started = time.perf_counter()
            complete(engine, random_prompts(1, 32, loaded.vocab_size), 8)
            answered = time.perf_counter()
            free, total = torch.cuda.mem_get_info(target.device)
            blocks = engine.snapshot().blocks_total
            yield {
                name: {
                    "start_seconds": started - began,
                    "first_answer_seconds": answered - started,
                    "max_model_len": engine.max_model_len,
                    "kv_blocks": blocks,
                    "kv_bytes": blocks * int(engine.model_info["block_size"]) * loaded.kv_bytes_per_token,
                    "free_bytes": free,
                    "total_bytes": total,
                }
            }
        del engine, loaded  # they hold nearly all of the memory, which the next model needs
        release()
