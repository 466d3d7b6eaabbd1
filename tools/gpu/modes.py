"""Measures what compiled layers, CUDA graphs and overlap gain: the same decodes with and without each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.engine_load import random_prompts
from tools.gpu.answers import modes
from tools.gpu.parts import measure_decodes
from tools.gpu.target import Target
from tools.gpu.workload import blocks_for, load, release, running_engine

MODELS = ("llama-3.2-1b", "gpt2-124m")


def run(target: Target) -> Iterator[dict[str, Any]]:
    batch, length, num_tokens = (4, 16, 8) if target.quick else (64, 448, 128)
    for name in MODELS:
        loaded = load(name, target)
        rows: list[dict[str, Any]] = []
        for mode in modes(target):
            kv_blocks = blocks_for(batch, length + num_tokens)
            with running_engine(loaded, kv_blocks=kv_blocks, max_running=batch, prefix_cache=False, **mode) as engine:
                prompts = random_prompts(batch, length, loaded.vocab_size)
                rows.append(mode | measure_decodes(engine, prompts, num_tokens, repeats=1 if target.quick else 2))
            yield {name: rows}
        del engine, loaded
        release()
