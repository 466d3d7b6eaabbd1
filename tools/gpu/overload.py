"""Checks that answers stay the same and nothing is left over under overload.

The KV cache holds a part of the requests, clients leave, and the device's memory runs out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, Aborted, Event, Finished, Request, TokenChunk, TokenPrompt
from tests.models.decoders import FAMILIES, random_model, real_shape
from tools.engine_load import greedy, random_prompts
from tools.gpu.answers import compare
from tools.gpu.sections import NOT_ON_CPU, Target
from tools.gpu.workload import blocks_for, ids, running_engine, saved

NUM_TOKENS = 24
LEAVE_AFTER_TOKENS = 6
BLOCK_SIZE = 4


def run(target: Target) -> Iterator[dict[str, Any]]:
    yield {"preemption": preemption(target)}
    yield {"out_of_memory": out_of_memory(target)}


def preemption(target: Target) -> dict[str, Any]:
    """Send four times as many tokens as the KV cache holds. Every fifth client leaves in the middle of its answer."""
    count = 16 if target.quick else 48
    generator = random.Random(0)
    prompts = [generator.choices(range(97), k=generator.randrange(4, 40)) for _ in range(count)]
    leaving = set(range(2, count, 5))
    num_blocks = sum(-(-(len(prompt) + NUM_TOKENS) // BLOCK_SIZE) for prompt in prompts)
    settings: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_running": 32, "max_step_tokens": 64}
    with saved(random_model(FAMILIES["llama"], device=target.device)) as files:
        with running_engine(files, kv_blocks=num_blocks + count, **settings) as engine:
            expected = answers(engine, prompts, leaving=set())
        with running_engine(files, kv_blocks=num_blocks // 4, **settings) as engine:
            got = answers(engine, prompts, leaving=leaving)
            end = engine.snapshot()
    wrong = wrong_answers(expected, got, leaving)
    left_over = {name: getattr(end, name) for name in ("blocks_used", "num_running", "num_waiting", "num_tokenizing")}
    return {
        "equal": not wrong and not any(left_over.values()) and end.num_preemptions > 0,
        "requests": count,
        "left_early": len(leaving),
        "preemptions": end.num_preemptions,
        "wrong": wrong,
        "left_over": left_over,
    }


def wrong_answers(expected: list[list[int]], got: list[list[int]], leaving: set[int]) -> list[int]:
    """Return the indices of wrong answers. A client that leaves early must have the beginning of its answer."""
    pairs = enumerate(zip(expected, got, strict=True))
    return [index for index, (want, have) in pairs if have != (want[: len(have)] if index in leaving else want)]


def answers(engine: Engine, prompts: list[list[int]], *, leaving: set[int]) -> list[list[int]]:
    """Return the tokens of each answer, every other one drawn, up to its last event. Clients of `leaving` abort in the
    middle."""
    inbox: SimpleQueue[list[Event]] = SimpleQueue()
    found: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        params = replace(greedy(NUM_TOKENS), temperature=(0.0, 0.9)[index % 2], seed=index)
        engine.submit(Request(str(index), (TokenPrompt(prompt),), params), inbox.put)
    num_open = len(prompts)
    while num_open:
        for event in inbox.get():
            index = int(event.request_id)
            if isinstance(event, TokenChunk):
                found[index] += event.token_ids
                if index in leaving and len(found[index]) >= LEAVE_AFTER_TOKENS:
                    engine.abort(event.request_id)
            elif isinstance(event, TERMINAL):
                allowed = (Finished, Aborted) if index in leaving else Finished
                if not isinstance(event, allowed):
                    raise RuntimeError(f"Request {index} must not end like this: {event}")
                num_open -= 1
    return found


def out_of_memory(target: Target) -> dict[str, Any]:
    """Compute prompts whose steps need more memory than the process may have.

    The limit is lowered once the engine has started. The engine must compute the steps in parts, with the same answers.
    """
    if not target.is_gpu:
        return {"problem": NOT_ON_CPU}
    # In float32: in bfloat16, steps of other sizes round so much away that some answers differ.
    model = random_model(real_shape("llama-3.2-1b"), dtype=torch.float32, device=target.device)
    prompts = random_prompts(8, 1000, model.config.vocab_size)
    settings: dict[str, Any] = {"kv_blocks": blocks_for(16, 1100), "max_step_tokens": 8192, "max_running": 16}
    settings["prefix_cache"] = False  # else the second run reuses the KV cache of the first
    with saved(model) as files, running_engine(files, **settings) as engine:
        ids(engine, prompts, greedy(8))  # compiles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved()
        expected = ids(engine, prompts, greedy(8))
        needed = torch.cuda.max_memory_reserved() - held
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info(target.device)
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + needed * 0.6) / total)
        try:
            got = ids(engine, prompts, greedy(8))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        num_short = engine.snapshot().num_out_of_memory
    different = list(compare(model, prompts, expected, got))
    return {
        "equal": not different,
        "needed_bytes": needed,
        "steps_out_of_memory": num_short,
        "different": different,
        **({} if num_short else {"problem": "memory did not run out, so this shows nothing"}),
    }
