"""Steps for nobody, before a GPU serves anybody: what a first step of each kind has to compile, is compiled then."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Step

# The ways to choose a token that have kernels of their own, each for the model's logits and for those that are edited.
WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
)
BIASES: tuple[dict[int, float], ...] = ({}, {0: 1.0})


def warm_up(runner: ModelRunner) -> None:
    """Writes into the first block of the KV cache, which nobody may use yet. Long prompts, and decodes of long
    sequences, have been computed when memory was measured."""
    for params, logit_bias in product(WAYS, BIASES):
        params = replace(params, logit_bias=logit_bias)
        runner.collect(runner.launch(Step([_chunk(1, params), _chunk(2, params)])))


def _chunk(num_tokens: int, params: SamplingParams) -> Chunk:
    """A prompt as short as this."""
    sequence = Sequence("warm up", 0, [0] * num_tokens, params, max_len=num_tokens + 1)
    sequence.blocks = [0] * num_tokens
    return Chunk(sequence, 0, num_tokens)
