"""Sends requests to an engine in this process. No HTTP."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from queue import SimpleQueue

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, Event, Finished, Request, SamplingParams, TokenPrompt
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


def complete(
    engine: Engine, prompts: Sequence[list[int]], num_tokens: int, *, params: SamplingParams | None = None
) -> None:
    """Send a request for each prompt at once, and wait for all answers: greedy ones unless there are `params`.

    Raises RuntimeError if a request does not finish with all its tokens.
    """
    inbox: SimpleQueue[list[Event]] = SimpleQueue()
    for prompt in prompts:
        request = Request(f"load-{next(_request_ids)}", (TokenPrompt(prompt),), params or greedy(num_tokens))
        engine.submit(request, inbox.put)
    num_open = len(prompts)
    while num_open:
        for event in inbox.get():
            if isinstance(event, TERMINAL):
                if not isinstance(event, Finished) or event.usage.completion_tokens != num_tokens:
                    raise RuntimeError(f"A request did not finish with {num_tokens} tokens: {event}")
                num_open -= 1
