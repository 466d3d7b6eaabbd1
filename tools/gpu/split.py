"""Measures a model that is split over two GPUs, with and without CUDA graphs, beside the same model on one of them.

At the end, a worker is killed while its part is replayed: the engine has to notice, although its device waits for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from transformers import AutoConfig

from oaiserve.engine.engine import Engine
from oaiserve.engine.model.parallel.workers import Workers
from oaiserve.engine.request import Event, Failed, Request, TokenPrompt
from oaiserve.facts.times import monotonic_ns
from tests.models.decoders import byte_tokenizer, random_model
from tests.models.packed import Packing, write_checkpoint
from tools.engine_load import greedy, random_prompts
from tools.gpu.sections import Target
from tools.gpu.steps import measure_decodes
from tools.gpu.workload import PROMPTS, QWEN3_MOE, SIZES, ids, release, saved_model

KILLED_SECONDS = 30.0  # within which an engine without its worker has to fail
FEATURES = ("attention", "fused_layers", "decode_graphs", "prompt_graphs")
# Families whose layers are cut in different ways: experts, one module for queries, keys and values, norms of all heads.
SPLIT: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3_MOE,
    "phi3": {"pad_token_id": None},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
}


def run(target: Target) -> Iterator[dict[str, Any]]:
    if target.is_gpu and torch.cuda.device_count() < 2:
        yield {"left_out": "there is one GPU"}
        return
    for family in SPLIT:
        yield {family: check_packed(family, target)}
    batch, length, num_tokens = (2, 16, 8) if target.quick else (64, 448, 128)
    rows: list[dict[str, Any]] = []
    answers: list[list[list[int]]] = []
    with saved_model("llama-3.2-1b", target) as folder:
        for number, has_graphs in ((1, True), (2, True), (2, False)):
            options: dict[str, Any] = {"max_running": batch, "kv_blocks": 64 * batch, "prefix_cache": False}
            with split(folder, target, number, cuda_graph=has_graphs, **options) as engine:
                prompts = random_prompts(batch, length, engine.vocab_size)
                answers.append(ids(engine, prompts[:4], greedy(num_tokens)))
                features = {name: engine.features.get(name, False) for name in FEATURES}
                found = measure_decodes(engine, prompts, num_tokens, repeats=1 if target.quick else 2)
                rows.append({"gpus": number, **features, **found})
            yield {"decodes": rows}
            release()
        yield killed(folder, prompts[0], target)
    # Rounding may decide between two tokens that are as good as equal, so these are no checks, but few should differ.
    alone, with_graphs, without = answers
    yield {
        "same_share": same_share(alone, with_graphs),
        "same_share_without_graphs": same_share(without, with_graphs),
    }


def split(folder: str, target: Target, number: int, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, device=target.device.type, tensor_parallel=number, **options)


def check_packed(family: str, target: Target) -> dict[str, Any]:
    """Compare the answers of a packed checkpoint on two devices with those on one, in float32."""
    found = []
    # On a CPU, the native step would round what it multiplies, in one process alone.
    options: dict[str, Any] = {"dtype": "float32", "kv_blocks": 64, "max_running": 8, "compile": target.is_gpu}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(AutoConfig.for_model(family, **{**SIZES, "vocab_size": 96, **SPLIT[family]}))
        write_checkpoint(Path(folder), model, Packing("awq"))
        byte_tokenizer().save_pretrained(folder)
        for number in (1, 2):
            with split(folder, target, number, **options) as engine:
                found.append(ids(engine, PROMPTS, greedy(12)))
                features = dict(engine.features)
            release()
    is_on = not target.is_gpu or (features["packed_weights"] and features["fused_layers"])
    return {"equal": found[0] == found[1] and is_on, "found": found[1], "expected": found[0], "features": features}


def killed(folder: str, prompt: list[int], target: Target) -> dict[str, Any]:
    """Return how long an engine takes to fail after its worker has been killed."""
    with split(folder, target, 2, kv_blocks=64) as engine:
        events: SimpleQueue[list[Event]] = SimpleQueue()
        engine.submit(Request("long", (TokenPrompt(prompt),), greedy(512)), events.put)
        events.get()  # its first token
        assert isinstance(engine._processes, Workers)
        began_ns = monotonic_ns()
        engine._processes._workers[0].process.kill()
        while not isinstance(events.get(timeout=KILLED_SECONDS)[-1], Failed):
            pass
        return {"killed_worker_noticed_s": (monotonic_ns() - began_ns) / 1e9, "failure": str(engine.failure)}


def same_share(some: list[list[int]], others: list[list[int]]) -> float:
    """Return the share of tokens that are the same at the same place."""
    same = [a == b for pair in zip(some, others, strict=True) for a, b in zip(*pair, strict=True)]
    return sum(same) / len(same)
