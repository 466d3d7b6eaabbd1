"""Checks that the host waits for the device in no launch, whatever a request asks for: torch raises where it would."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Step
from tools.gpu.sections import Target
from tools.gpu.workload import files_of, started

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "top_k, top_p, min_p": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "min_tokens": {"min_tokens": 8},
    "bad_words": {},
    "logit_bias": {"logit_bias": {7: 1.0}},
    "allowed_token_ids": {"allowed_token_ids": (5, 6, 7)},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 2},
}
PROMPT_TOKENS = 20


def run(target: Target) -> Iterator[dict[str, Any]]:
    with files_of("smollm2-135m", target) as files:
        model = started(files, EngineOptions(kv_blocks=64, max_running=8))
    model.warm_up()
    for name, asked in ASKED.items():
        yield {name: check(model.runner, name, asked)}


def check(runner: ModelRunner, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Launch a prompt and two decodes next to a greedy sequence, once to compile, and once watched."""
    for is_watched in (False, True):
        sequences = [sequence(0, name, asked), sequence(1, "greedy", {"temperature": 0.0})]
        try:
            for first, num_tokens in ((0, PROMPT_TOKENS), (PROMPT_TOKENS, 1), (PROMPT_TOKENS + 1, 1)):
                step = Step([Chunk(one, first, num_tokens) for one in sequences])
                with watched() if is_watched else nullcontext():
                    launched = runner.launch(step)
                    runner.draw(launched)
                for one, result in zip(sequences, runner.collect(launched).chunks, strict=True):
                    one.token_ids += result.token_ids
                    one.num_tokens += 1
        except RuntimeError as error:
            return {"equal": False, "problem": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"equal": True}


@contextmanager
def watched() -> Iterator[None]:
    """Let torch raise for whatever waits for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sequence(number: int, name: str, asked: dict[str, Any]) -> Sequence:
    ids = [(3 * i + number) % 97 for i in range(PROMPT_TOKENS)]
    bad_words = [[9], [5, 6]] * (name == "bad_words")
    params = SamplingParams(**asked)
    stop_ids = frozenset([2])
    made = Sequence(str(number), 0, ids, params, max_len=99, stop_ids=stop_ids, bad_words=bad_words)
    made.wants_prompt_logprobs = "prompt_logprobs" in asked
    made.blocks = list(range(4 * number, 4 * number + 4))
    return made
