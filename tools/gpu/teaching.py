"""Measures GPT-2 124M in the whole engine: many short answers, and many text prompts with one new token each."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from typing import Any

from tools.engine_load import complete, figures, random_prompts
from tools.gpu.parts import step_figures
from tools.gpu.target import Target
from tools.gpu.workload import blocks_for, load, running_engine

MODEL = "gpt2-124m"
PROMPT_TOKENS = 16


def run(target: Target) -> Iterator[dict[str, Any]]:
    loaded = load(MODEL, target)
    count, num_tokens, batch, repeats = (8, 8, 4, 1) if target.quick else (256, 64, 64, 5)
    prompts = [random_prompts(count, PROMPT_TOKENS, loaded.vocab_size, seed) for seed in range(2 * repeats + 2)]
    kv_blocks = blocks_for(batch, PROMPT_TOKENS + num_tokens)
    with running_engine(loaded, max_running=batch, kv_blocks=kv_blocks) as engine:
        complete(engine, prompts.pop(), num_tokens)
        engine.take_steps()
        runs = [complete(engine, prompts.pop(), num_tokens) for _ in range(repeats)]
        yield {"batch": batch, "at_once": figures(runs), "steps": step_figures(engine.take_steps(), batch)}
        complete(engine, prompts.pop(), num_tokens, clients=batch)
        runs = [complete(engine, prompts.pop(), num_tokens, clients=batch) for _ in range(repeats)]
        yield {"clients": figures(runs)}

    count, length, batch, repeats = (8, 19, 4, 1) if target.quick else (256, 259, 16, 5)
    generator = random.Random(0)
    texts = [
        ["".join(generator.choices(string.ascii_letters, k=length)) for _ in range(count)] for _ in range(repeats + 1)
    ]
    with running_engine(loaded, max_running=batch, kv_blocks=blocks_for(batch, length + 1)) as engine:
        complete(engine, texts.pop(), 1)
        runs = [complete(engine, texts.pop(), 1) for _ in range(repeats)]
        yield {"one_token": {"batch": batch, "prompt_tokens": length, **figures(runs)}}
