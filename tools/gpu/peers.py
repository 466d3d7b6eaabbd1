"""Compares decodes with the one peer that is always there: the continuous batching of transformers, in process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.models.decoders import random_model, real_shape
from tools.engine_load import random_prompts
from tools.gpu.sections import Target
from tools.gpu.workload import release

MODEL = "llama-3.2-1b"
BLOCK_TOKENS = 256  # its default


def run(target: Target) -> Iterator[dict[str, Any]]:
    if target.is_dry:  # Only our own kernels know the fake device.
        target = Target(torch.device("cpu"), quick=True, turns=target.turns)
    count, prompt_len, num_tokens = (4, 8, 8) if target.quick else (64, 448, 128)
    config = real_shape(MODEL, tiny=target.quick)
    with target.starting():
        model = random_model(config, dtype=torch.bfloat16, device=target.device)
        model.set_attn_implementation("sdpa")
    prompts = random_prompts(count, prompt_len, config.vocab_size)
    asked = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = count * (-(-(prompt_len + num_tokens) // BLOCK_TOKENS) + 1)
    sizes = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=2048)
    with target.turn():
        began = time.perf_counter()
        found = model.generate_batch(
            prompts, generation_config=asked, continuous_batching_config=sizes, record_timestamps=True
        )
        seconds = time.perf_counter() - began
    yield {"seconds_with_start": seconds, **token_times([one.timestamps for one in found.values()])}
    del model, found
    release()


def token_times(timestamps: list[list[float]]) -> dict[str, Any]:
    """Return the rate of all tokens from the first to the last, and the median time between two of a sequence, of those
    that came while all sequences decoded."""
    first = min(one[0] for one in timestamps)
    last = max(one[-1] for one in timestamps)
    all_decode = max(one[0] for one in timestamps)
    until = min(one[-1] for one in timestamps)
    apart = [
        later - earlier
        for one in timestamps
        for earlier, later in pairwise(one)
        if earlier >= all_decode and later <= until
    ]
    return {
        "sequences": len(timestamps),
        "output_tokens_per_second": sum(map(len, timestamps)) / (last - first),
        "step_ms": 1e3 * statistics.median(apart) if apart else None,
    }
