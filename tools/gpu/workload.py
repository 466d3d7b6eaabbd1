"""An engine with a model of random weights, requests to it, and what they took. No HTTP."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.load import prepare
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.request import TERMINAL, Event, Finished, Prompt, Request, SamplingParams, TextPrompt, TokenPrompt
from oaiserve.engine.tokenize import Tokenizer
from tools.gpu.roofline import percentile
from tools.gpu.target import Target
from tools.random_models import byte_tokenizer, random_model, real_shape

BLOCK_SIZE = 16
_request_ids = itertools.count()


def load(name: str, target: Target, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    """One of REAL_SHAPES, with random weights."""
    config = real_shape(name, tiny=target.quick)
    return prepare(random_model(config, dtype=dtype, device=target.device), name)


@contextmanager
def running(loaded: LoadedModel, **settings: Any) -> Iterator[Engine]:
    """An engine, started as the server starts it. Its memory is free again afterwards, once the caller has let go of
    it. On a CPU without the native step: this is about the code that a GPU runs."""
    if loaded.device.type == "cpu":
        settings |= {"compile": False}
    with Engine.from_loaded(loaded, _tokenizer(loaded.vocab_size), EngineOptions(**settings)) as engine:
        yield engine
    del engine
    release()


@functools.cache
def _tokenizer(vocab_size: int) -> Tokenizer:
    return Tokenizer(byte_tokenizer(vocab_size))


def has_graphs(engine: Engine) -> bool:
    """Whether it captured its decode steps: one that cannot says so in its log, and goes on without."""
    return engine._loop._runner.has_graphs  # type: ignore[attr-defined]


def release() -> None:
    """Gives the memory of what has been deleted back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def blocks_for(sequences: int, tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """KV blocks for so many sequences of so many tokens, and a little more."""
    return sequences * (-(-tokens // block_size) + 1)


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [generator.choices(range(vocab_size), k=length) for _ in range(count)]


def answers(num_tokens: int) -> SamplingParams:
    """Greedy, and exactly as long."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Run:
    """Requests from the first submit until the last one had finished."""

    seconds: float
    requests: list[Finished]
    submit_ns: list[int]  # that each call of `submit` took
    num_tokens: int  # of each answer


def complete(engine: Engine, prompts: Sequence[str | list[int]], num_tokens: int, *, clients: int | None = None) -> Run:
    """All at once; or by so many `clients`, each of which sends its next request when it has the last answer. Raises
    RuntimeError for a request that did not finish with all its tokens."""
    inbox: SimpleQueue[list[Event]] = SimpleQueue()
    params = answers(num_tokens)
    requests = [Request(f"check-{next(_request_ids)}", (_as_prompt(prompt),), params) for prompt in prompts]
    waiting = iter(requests)
    submit_ns = []

    def send(most: int) -> None:
        for request in itertools.islice(waiting, most):
            began_ns = time.perf_counter_ns()
            engine.submit(request, inbox.put)
            submit_ns.append(time.perf_counter_ns() - began_ns)

    started = time.perf_counter()
    send(clients or len(requests))
    ended: list[Finished] = []
    while len(ended) < len(requests):
        for event in inbox.get():
            if isinstance(event, TERMINAL):
                if not isinstance(event, Finished) or event.usage.completion_tokens != num_tokens:
                    raise RuntimeError(f"A request was to finish with {num_tokens} tokens, and ended so: {event}")
                ended.append(event)
                if clients:
                    send(1)
    return Run(time.perf_counter() - started, ended, submit_ns, num_tokens)


def _as_prompt(prompt: str | list[int]) -> Prompt:
    return TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt)


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians over the repeats; percentiles are over the requests of one."""

    rates = [len(run.requests) * run.num_tokens / run.seconds for run in runs]
    ttft = [[(r.times.time_to_first_token_ns or 0) / 1e6 for r in run.requests] for run in runs]
    tpot = [[(r.times.time_per_output_token_ns(run.num_tokens) or 0) / 1e6 for r in run.requests] for run in runs]
    submit = [[ns / 1e6 for ns in run.submit_ns] for run in runs]
    return {
        "requests": len(runs[0].requests),
        "tokens_each": runs[0].num_tokens,
        "repeats": len(runs),
        "output_tokens_per_second": statistics.median(rates),
        "output_tokens_per_second_least": min(rates),
        "output_tokens_per_second_most": max(rates),
        "ttft_p50_ms": statistics.median([percentile(values, 0.5) for values in ttft]),
        "ttft_p99_ms": statistics.median([percentile(values, 0.99) for values in ttft]),
        "tpot_p50_ms": statistics.median([percentile(values, 0.5) for values in tpot]),
        "tpot_p99_ms": statistics.median([percentile(values, 0.99) for values in tpot]),
        "submit_p50_ms": statistics.median([percentile(values, 0.5) for values in submit]),
        "submit_p99_ms": statistics.median([percentile(values, 0.99) for values in submit]),
    }
