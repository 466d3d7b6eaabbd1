"""Random adapters, and models with an adapter in their weights, which are what adapters are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oaiserve.engine.model.adapters import Adapter, AdapterPart
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.runners import sequence_of

PROMPTS = [[5, 9, 2, 40, 11], [7] * 9, [3, 1, 4, 1, 5, 9, 2, 6], [8, 8]]


def random_adapter(
    shapes: Mapping[str, tuple[int, int]], seed: int, *, rank: int = 4, dtype: torch.dtype = torch.float32
) -> Adapter:
    """Return an adapter for layers of these shapes that changes answers. Its ranks differ from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for index, (name, (rows, columns)) in enumerate(shapes.items()):
        own_rank = rank + index % 3
        a = torch.randn(own_rank, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, own_rank, generator=generator) * 0.5
        parts[name] = AdapterPart(a.to(dtype), b.to(dtype), 0.7 + 0.1 * (index % 4))
    return Adapter(f"random {seed}", parts)


@torch.no_grad()
def merged(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """Return a copy of the model with the adapter in its weights: W + scale * B A, the definition of LoRA."""
    copied = deepcopy(model)
    for name, part in adapter.parts.items():
        module = copied.get_submodule(name)
        added = part.scale * part.b @ part.a
        module.weight += added.T if isinstance(module, Conv1D) else added
    return copied


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
