"""Measures oaiserve and transformers' own continuous batching with the same requests, in turn on one device."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from tests.models.decoders import random_model, real_shape
from tools.engine_load import complete, figures, random_prompts
from tools.gpu.target import Target
from tools.gpu.workload import blocks_for, load, release, running_engine

log = logging.getLogger(__name__)

PROMPT_TOKENS = 128
STEP_TOKENS = 2048  # as ours


def run(target: Target, model: str) -> Iterator[dict[str, Any]]:
    batches, num_tokens = ((1, 4), 8) if target.quick else ((1, 16, 64, 256), 64)
    most, length = max(batches), PROMPT_TOKENS
    ours: dict[int, Any] = {}
    loaded = load(model, target)
    kv_blocks = blocks_for(most, length + num_tokens)
    with running_engine(loaded, kv_blocks=kv_blocks, max_running=most, prefix_cache=False) as engine:
        for batch in batches:
            prompts = random_prompts(batch, length, loaded.vocab_size)
            complete(engine, prompts, num_tokens)
            ours[batch] = figures([complete(engine, prompts, num_tokens) for _ in range(1 if target.quick else 3)])
    vocab_size = loaded.vocab_size
    del engine, loaded
    release()
    found: dict[str, Any] = {"model": model, "prompt_tokens": length, "num_tokens": num_tokens, "oaiserve": ours}
    yield found | {"transformers": {}}

    theirs = random_model(
        real_shape(model, tiny=target.quick), dtype=torch.bfloat16, device=target.device, attn_implementation="sdpa"
    )
    rates: dict[str, dict[int, float]] = {}
    problems: dict[str, str] = {}
    config = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0)
    for name, settings in their_settings(most, target).items():
        rates[name] = {}
        try:
            with theirs.continuous_batching_context_manager(  # type: ignore[operator]
                generation_config=config, continuous_batching_config=settings, timeout=10
            ) as manager:
                for batch in batches:
                    prompts = random_prompts(batch, length, vocab_size)
                    their_seconds(manager, prompts, num_tokens)  # the warm-up captures and compiles
                    times = [their_seconds(manager, prompts, num_tokens) for _ in range(1 if target.quick else 2)]
                    rates[name][batch] = batch * num_tokens / statistics.median(times)
                    yield {"transformers": rates, "attention": attention_of(theirs)}
        except Exception as error:  # their code raises what it likes, and other settings may work
            log.exception("transformers, %s", name)
            problems[name] = f"{type(error).__name__}: {error}"
            yield {"problems": problems}
        release()


def their_settings(most: int, target: Target) -> dict[str, ContinuousBatchingConfig]:
    """Return settings by their name in the report. A cache of just the needed size keeps the attention masks small."""
    sized: dict[str, Any] = {
        "num_blocks": 2 * most + 16,
        "max_batch_tokens": STEP_TOKENS,
        "max_requests_per_batch": most,
    }
    found = {"sized": ContinuousBatchingConfig(**sized)}
    if target.is_gpu:
        graphs: dict[str, Any] = {"use_cuda_graph": True, "use_async_batching": True, "kv_padding_interval_size": 4096}
        found["sized, CUDA graphs, asynchronous"] = ContinuousBatchingConfig(**sized, **graphs)
        found["as it comes"] = ContinuousBatchingConfig()
    return found


def attention_of(model: PreTrainedModel) -> str:
    return str(model.config._attn_implementation)


def their_seconds(manager: ContinuousBatchingManager, prompts: list[list[int]], num_tokens: int) -> float:
    """Return the time from the first request until the last one has all its tokens. Raises RuntimeError if a request
    ends without."""
    began = time.perf_counter()
    manager.add_requests(prompts, max_new_tokens=num_tokens)
    num_open = len(prompts)
    while num_open:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' generation loop has ended before its requests.")
        elif result.is_finished():
            if result.error is not None or len(result.generated_tokens) != num_tokens:
                got = len(result.generated_tokens)
                raise RuntimeError(f"transformers gave {got} tokens of {num_tokens}: {result.error}")
            num_open -= 1
    return time.perf_counter() - began
