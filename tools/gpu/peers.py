"""Compares decodes and prompts with those of vLLM, where that is installed, on the same files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tools.engine_load import greedy, random_prompts
from tools.gpu.sections import Target
from tools.gpu.workload import Files, blocks_for, files_of, ids, running_engine

MODEL = "llama-3.2-1b"
# By name: prompts, their tokens, and new tokens for each.
LOADS = {"decodes of 1": (1, 448, 128), "decodes of 64": (64, 448, 128), "prompts of 2,048": (16, 2048, 1)}
TINY_LOADS = {"decodes of 2": (2, 8, 4)}
Generate = Callable[[list[list[int]], int], object]


def run(target: Target) -> Iterator[dict[str, Any]]:
    if find_spec("vllm") is None:
        yield {"problem": "vLLM is not installed"}
        return
    loads = TINY_LOADS if target.quick else LOADS
    with files_of(MODEL, target) as files:
        yield {"oaiserve": ours(files, loads)}
        yield {"vllm": vllm(files, loads)}


def ours(files: Files, loads: dict[str, tuple[int, int, int]]) -> dict[str, float]:
    most = max(count for count, *_ in loads.values())
    longest = max(length + new for _, length, new in loads.values())
    settings: dict[str, Any] = {"max_running": most, "kv_blocks": blocks_for(most, longest), "prefix_cache": False}
    with running_engine(files, **settings) as engine:
        return _seconds(files, loads, lambda prompts, new: ids(engine, prompts, greedy(new)))


def vllm(files: Files, loads: dict[str, tuple[int, int, int]]) -> dict[str, float]:
    package = import_module("vllm")
    longest = max(length + new for _, length, new in loads.values())
    server = package.LLM(
        files.folder,
        skip_tokenizer_init=True,
        max_model_len=longest,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], new: int) -> object:
        params = package.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        return server.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)

    return _seconds(files, loads, generate)


def _seconds(files: Files, loads: dict[str, tuple[int, int, int]], generate: Generate) -> dict[str, float]:
    """Return the seconds that each load takes, after one that is not counted."""
    found = {}
    for name, (count, length, new) in loads.items():
        for seed in range(2):
            prompts = random_prompts(count, length, files.spec.vocab_size, seed)
            began = time.perf_counter()
            generate(prompts, new)
            found[name] = time.perf_counter() - began
    return found
