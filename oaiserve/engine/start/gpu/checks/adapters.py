"""Compares what kernels add for adapters with plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from oaiserve.engine.model.adapted_modules import AddTo, adaptable, plain
from oaiserve.engine.model.adapters import Adapter, AdapterPart
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.rehearsal import difference, layer_tolerance, prompts_and_decodes
from oaiserve.engine.model.spec import LoadedModel

ADAPTED_LENGTHS = [3, 20, 9]
ADAPTER_RANKS = (8, 24)


@torch.inference_mode()
def adapters_problem(loaded: LoadedModel, add: Callable[[Batch], AddTo], block_size: int) -> str | None:
    """Return how products with adapters differ from those in plain torch, for one layer of each shape, if they do.

    In a step, one sequence has an adapter, one another of a larger rank, and one none.
    """
    prompts, _ = prompts_and_decodes(ADAPTED_LENGTHS, loaded.vocab_size, block_size)
    shapes = {shape: name for name, shape in adaptable(loaded.model).items()}
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(loaded.device, loaded.dtype) / math.sqrt(sizes[-1])

    adapters = [
        Adapter(str(rank), {n: AdapterPart(numbers(rank, k), numbers(m, rank), 0.5) for (m, k), n in shapes.items()})
        for rank in ADAPTER_RANKS
    ]
    batch = build_batch(prompts, block_size, loaded.device)
    batch.adapters = [adapters[0], None, adapters[1]]
    limit = layer_tolerance(loaded.dtype)
    ways = add(batch), plain(batch)
    for (rows, columns), name in shapes.items():
        x = numbers(len(batch.input_ids), columns) * math.sqrt(columns)
        outs = [x.new_zeros(len(x), rows) for _ in ways]
        for way, out in zip(ways, outs, strict=True):
            way(name, x, out)
        found = difference(*outs)
        if not found <= limit:
            return f"products of '{name}' would differ by {found:.1%} (allowed: {limit:.1%})"
    return None
