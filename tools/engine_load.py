"""Sends requests to an engine in this process and reports what they took. No HTTP."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from loadtest.intervals import percentile
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, Event, Finished, Request, SamplingParams, TextPrompt, TokenPrompt
from oaiserve.engine.sequences.sequence import Sequence as TokenSequence
from oaiserve.engine.sequences.step import Chunk, Step

_request_ids = itertools.count()


def greedy(num_tokens: int) -> SamplingParams:
    """Ask for a greedy answer of exactly `num_tokens`."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [generator.choices(range(vocab_size), k=length) for _ in range(count)]


def random_step(
    lengths: Sequence[tuple[int, int]], block_size: int, vocab_size: int = 2, rng: random.Random | None = None
) -> Step:
    """Make a step of sequences by (tokens in the KV cache, new tokens), whose blocks are in random order."""
    rng = rng or random.Random(0)
    blocks_each = [-(-(cached + new) // block_size) for cached, new in lengths]
    blocks = iter(rng.sample(range(sum(blocks_each)), sum(blocks_each)))
    step = Step()
    for number, ((cached, new), num_blocks) in enumerate(zip(lengths, blocks_each, strict=True)):
        ids = rng.choices(range(vocab_size), k=cached + new)
        sequence = TokenSequence(str(number), 0, ids, greedy(1), max_len=len(ids) + 1)
        sequence.num_computed = cached
        sequence.blocks = list(itertools.islice(blocks, num_blocks))
        step.chunks.append(Chunk(sequence, cached, new))
    return step


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Requests from the first submit until the last one has finished."""

    seconds: float
    requests: list[Finished]  # in the order in which they ended
    submit_ms: list[float]  # time of each call of `submit`
    num_tokens: int  # tokens of each answer

    @property
    def ttft_ms(self) -> list[float]:
        return [(request.times.time_to_first_token_ns or 0) / 1e6 for request in self.requests]

    @property
    def tpot_ms(self) -> list[float]:
        return [(request.times.time_per_output_token_ns(self.num_tokens) or 0) / 1e6 for request in self.requests]


def complete(
    engine: Engine,
    prompts: Sequence[str | list[int]],
    num_tokens: int,
    *,
    clients: int | None = None,
    params: SamplingParams | None = None,
) -> EngineRun:
    """Compute answers to all prompts, greedy ones unless there are `params`.

    The requests come all at once, or from this number of `clients`, which each send the next request after the last
    answer. Raises RuntimeError if a request does not finish with all its tokens.
    """
    inbox: SimpleQueue[list[Event]] = SimpleQueue()
    params = params or greedy(num_tokens)
    submit_ms = list[float]()
    requests = [
        Request(
            f"load-{next(_request_ids)}",
            (TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt),),
            params,
        )
        for prompt in prompts
    ]
    waiting = iter(requests)

    def send(most: int) -> None:
        for request in itertools.islice(waiting, most):
            began_ns = time.perf_counter_ns()
            engine.submit(request, inbox.put)
            submit_ms.append((time.perf_counter_ns() - began_ns) / 1e6)

    started = time.perf_counter()
    send(clients or len(requests))
    finished: list[Finished] = []
    while len(finished) < len(requests):
        for event in inbox.get():
            if isinstance(event, TERMINAL):
                if not isinstance(event, Finished) or event.usage.completion_tokens != num_tokens:
                    raise RuntimeError(f"A request did not finish with {num_tokens} tokens: {event}")
                finished.append(event)
                if clients:
                    send(1)
    return EngineRun(time.perf_counter() - started, finished, submit_ms, num_tokens)


def figures(runs: Sequence[EngineRun]) -> dict[str, Any]:
    """Return medians over the runs. Percentiles are over the requests of one run."""
    rates = [len(run.requests) * run.num_tokens / run.seconds for run in runs]
    values = {
        "requests": len(runs[0].requests),
        "tokens_each": runs[0].num_tokens,
        "repeats": len(runs),
        "output_tokens_per_second": statistics.median(rates),
        "output_tokens_per_second_least": min(rates),
        "output_tokens_per_second_most": max(rates),
    }
    for kind in ("ttft", "tpot", "submit"):
        for share in (50, 99):
            each_run = [percentile(sorted(getattr(run, f"{kind}_ms")), share) for run in runs]
            values[f"{kind}_p{share}_ms"] = statistics.median(each_run)
    return values
