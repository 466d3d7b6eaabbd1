"""Compares what kernels add for adapters with plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from oaiserve.engine.model.adapted_modules import AddTo, adaptable, plain
from oaiserve.engine.model.adapters import Adapter, AdapterPart
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.rehearsal import prompts_and_decodes
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.compare import Difference, compare, layer_tolerance

ADAPTED_LENGTHS = [3, 20, 9]
ADAPTER_RANKS = (8, 24)


@torch.inference_mode()
def adapters_problem(loaded: LoadedModel, add: Callable[[Batch], AddTo], block_size: int) -> Difference | None:
    """Compare products with adapters with those in plain torch, for one layer of each shape.

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
    fast, slow = add(batch), plain(batch)

    def added_by(way: AddTo) -> Callable[[tuple[str, int, torch.Tensor]], torch.Tensor]:
        def added(given: tuple[str, int, torch.Tensor]) -> torch.Tensor:
            name, rows, x = given
            out = x.new_zeros(len(x), rows)
            way(name, x, out)
            return out

        return added

    named = (
        (f"products of '{name}'", (name, rows, numbers(len(batch.input_ids), columns) * math.sqrt(columns)))
        for (rows, columns), name in shapes.items()
    )
    return compare(added_by(fast), added_by(slow), named, layer_tolerance(loaded.dtype))
