"""Runners of small models, in which a test can replace some parts, engines on them, and sequences with their blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.attention import Backend
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.states import States
from oaiserve.engine.request import Event, Request, SamplingParams, Terminal, TokenChunk
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.step import Chunk, Step
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.engine.doubles import Inbox
from tests.models.decoders import byte_tokenizer

CPU = torch.device("cpu")
_OF_SEQUENCE = {"draw_key", "stop_ids", "bad_words", "adapter", "constraint"}


PROMPTS = [[5, 9, 2, 40, 11], [7] * 9, [3, 1, 4, 1, 5, 9, 2, 6], [8, 8]]  # of `decode`


def eager_runner(
    loaded: LoadedModel,
    *,
    num_blocks: int,
    block_size: int,
    backend: Backend = ReferenceAttention,
    executor: type[EagerExecutor] = EagerExecutor,
    **arguments: Any,
) -> ModelRunner:
    """Return a runner on an eager executor; `arguments` are those of ModelRunner."""
    eager = executor.with_cache(loaded, num_blocks=num_blocks, block_size=block_size, backend=backend)
    states = States(loaded.state_shapes, 8, loaded.device) if loaded.state_shapes else None
    return ModelRunner(eager, loaded.device, block_size, states=states, **arguments)


def make_engine(
    loaded: LoadedModel, runner: ModelRunner, num_blocks: int, *, max_model_len: int = 48, eos: int = -1, **options: Any
) -> Engine:
    """Return an engine whose tokenizer has a token for each byte, with blocks of 4 tokens if the options do not say."""
    return Engine(
        ServedModel(
            tokenizer=Tokenizer(byte_tokenizer()),
            runner=runner,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=loaded.vocab_size,
            eos_token_ids=frozenset([eos]) - {-1},
            num_states=8 if loaded.state_shapes else 0,
        ),
        EngineOptions(**{"block_size": 4, **options}),
    )


def run_requests(
    engine: Engine, requests: list[Request], inbox: Inbox | None = None
) -> tuple[dict[str, Terminal], list[Event]]:
    """Submit requests all at once, and return the last event of each, and all events."""
    inbox = inbox or Inbox()
    for asked in requests:
        engine.submit(asked, inbox)
    ended = inbox.wait_terminal(*(asked.request_id for asked in requests))
    return ended, [event for events in inbox.hand_overs for event in events]


def chunks_of(events: Iterable[Event]) -> dict[tuple[str, int], list[TokenChunk]]:
    """Return the chunks of each request's choices."""
    found: dict[tuple[str, int], list[TokenChunk]] = {}
    for event in events:
        if isinstance(event, TokenChunk):
            found.setdefault((event.request_id, event.index), []).append(event)
    return found


def token_ids_of(events: Iterable[Event]) -> dict[tuple[str, int], list[int]]:
    """Return the ids of each request's choices."""
    return {key: [i for chunk in chunks for i in chunk.token_ids] for key, chunks in chunks_of(events).items()}


def sequence_of(
    token_ids: list[int], blocks: Iterable[int] = (), *, name: str = "r", max_len: int = 99, **others: Any
) -> Sequence:
    """Return a sequence with these blocks. `others` are parameters of its request, or arguments of `Sequence`."""
    own = {key: others.pop(key) for key in _OF_SEQUENCE & others.keys()}
    sequence = Sequence(name, 0, token_ids, SamplingParams(**others), max_len=max_len, **own)
    sequence.blocks = list(blocks)
    return sequence


def decode(runner: ModelRunner, prompts: list[list[int]], adapters: list[int], num_tokens: int) -> list[list[int]]:
    """Return greedy answers to prompts with these adapters, all in the same steps."""
    sequences = [
        sequence_of(prompt, range(index * 4, index * 4 + 4), temperature=0.0, adapter=adapter)
        for index, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
    ]
    chunks = [Chunk(sequence, 0, len(sequence.token_ids)) for sequence in sequences]
    for _ in range(num_tokens):
        results = runner.collect(runner.launch(Step(chunks))).chunks
        for sequence, result in zip(sequences, results, strict=True):
            sequence.token_ids += result.token_ids
        chunks = [Chunk(sequence, len(sequence.token_ids) - 1, 1) for sequence in sequences]
    return [sequence.token_ids[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
