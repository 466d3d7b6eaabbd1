"""Compares kernels with plain torch: those of layers, draws and adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.executor import CudaExecutor, CudaWeights
from oaiserve.engine.executors.cuda.kernels import Kernels
from oaiserve.engine.executors.reference.products import Products
from oaiserve.engine.model.adapters import Adapter, AdapterPart
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.rehearsal import prompt, prompts_and_decodes
from oaiserve.engine.model.sampling import numpy_sampling
from oaiserve.engine.model.sampling.draw_rows import GREEDY, DrawRow
from oaiserve.engine.model.sampling.logit_edits import apply_masks_in_torch
from oaiserve.engine.model.states import States
from oaiserve.engine.start.check import batch_of
from oaiserve.engine.start.compare import Difference, difference, layer_tolerance, tolerance, worst
from oaiserve.engine.step import Chunk, Step

if TYPE_CHECKING:  # The import needs Triton.
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

# The lengths of the sequences whose logits are compared. Several programs read the keys of the last one.
LENGTHS = (9, 40, 17, 600)
CHUNK_TOKENS = 5  # tokens of the last one, in a step in which the others decode
# The lengths of prompts alone. Products have tiles of their own for each of these, and unpack matrices for the last.
ROWS = (20, 40, 100, 300, 2048)
ADAPTED_LENGTHS = [3, 20, 9]
ADAPTER_RANKS = (8, 24)
_DRAWS = [
    GREEDY,
    DrawRow(1.0, 0.0, 0.0, 1.0, 11),
    DrawRow(0.7, 0.05, 0.0, 1.0, 12),
    DrawRow(0.7, 0.0, 40.0, 0.9, 13),
    DrawRow(3.0, 0.0, 0.0, 0.9, 15),  # The distribution is so flat that most ids are candidates.
    DrawRow(1.0, 0.0, 0.0, 1.0, 14),  # Its logits are not finite.
]


def kernels_problem(
    spec: ModelSpec,
    weights: CudaWeights,
    kernels: Kernels,
    *,
    adaptable: Mapping[str, tuple[int, int]],
    block_size: int,
) -> object | None:
    """Compare all kernels, and return the first difference. `adaptable` has rows and columns of the modules that
    adapters may name."""
    problem: object | None = logits_problem(spec, weights, kernels, block_size)
    problem = problem or sampling_problem(spec, kernels.sampling)
    if problem is None and kernels.adapters is not None:
        return adapters_problem(spec, adaptable, kernels.adapters, block_size)
    return problem


@torch.inference_mode()
def logits_problem(spec: ModelSpec, weights: CudaWeights, kernels: Kernels, block_size: int) -> Difference | None:
    """Compare the logits of prompts, decodes and both together with those in plain torch, also at the model's last
    position, where rotary tables end."""
    lengths = [_possible(length, spec) for length in LENGTHS]
    prompts, decodes = prompts_and_decodes(lengths, spec.vocab_size, block_size)
    whole = Step([chunk._replace(max_draws=1) for chunk in prompts.chunks])
    *others, longest = decodes.chunks
    start = max(0, longest.end - CHUNK_TOKENS)
    mixed = Step([*others, Chunk(longest.sequence, start, longest.end - start)])
    alone = [prompt(_possible(length, spec), spec.vocab_size, block_size) for length in ROWS]
    steps = [whole, decodes, mixed, *alone]
    num_blocks = 1 + max(block for step in steps for chunk in step.chunks for block in chunk.sequence.blocks)
    results: list[list[torch.Tensor]] = []
    for which in (kernels, Kernels()):
        executor = CudaExecutor(weights, spec.kv_shapes, num_blocks=num_blocks, block_size=block_size, kernels=which)
        states = States.of(spec, len(lengths))
        logits = [executor.forward(batch_of(step, spec, block_size, states)).clone() for step in steps]
        last = batch_of(decodes, spec, block_size, states)
        last = replace(last, positions=torch.full_like(last.positions, spec.max_model_len - 1))
        results.append([*logits, executor.forward(last).clone()])
    limit = tolerance(spec.dtype, has_float8_cache=spec.has_float8_cache)
    return worst(Difference("the outputs", difference(*pair), limit) for pair in zip(*results, strict=True))


def _possible(length: int, spec: ModelSpec) -> int:
    """Return a length that `prompts_and_decodes` and the model take."""
    return max(3, min(length, spec.max_model_len))


@torch.inference_mode()
def sampling_problem(spec: ModelSpec, sampler: Any) -> str | None:
    """Compare the draws and masks of a module with those of plain torch."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(len(_DRAWS), spec.vocab_size, generator=generator) * 3
    logits = numbers.to(spec.device, spec.dtype)
    logits[-1] = torch.inf
    for rows in (_DRAWS[:1], _DRAWS[:3], _DRAWS):  # Each of them uses other kernels.
        some = logits[: len(rows)]
        got_ids, got_finite = sampler.sample_ids(some, rows)
        want_ids, want_finite = numpy_sampling.sample_ids(some, rows)
        are_equal = (got_ids == want_ids) | ~want_finite.bool()
        if not bool((got_finite.bool() == want_finite.bool()).all()) or not bool(are_equal.all()):
            return f"of {len(rows)} draws, {int((~are_equal).sum())} would be others"
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, -(-spec.vocab_size // 32)), dtype=np.uint32)
    masked, expected = (logits[:3].to(torch.float32, copy=True) for _ in range(2))
    sampler.apply_masks(masked, [0, 2], words)
    apply_masks_in_torch(expected, [0, 2], words)
    return None if torch.equal(masked, expected) else "masks of grammars would let other tokens come"


@torch.inference_mode()
def adapters_problem(
    spec: ModelSpec, adaptable: Mapping[str, tuple[int, int]], adapters: TritonAdapters, block_size: int
) -> Difference | None:
    """Compare products with adapters with those of plain torch, for one layer of each shape.

    In the step, one sequence has an adapter, one has another with a larger rank, and one has none.
    """
    prompts, _ = prompts_and_decodes(ADAPTED_LENGTHS, spec.vocab_size, block_size)
    shapes = {shape: name for name, shape in adaptable.items()}
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(spec.device, spec.dtype) / math.sqrt(sizes[-1])

    first, second = (
        Adapter(str(rank), {n: AdapterPart(numbers(rank, k), numbers(m, rank), 0.5) for (m, k), n in shapes.items()})
        for rank in ADAPTER_RANKS
    )
    batch = build_batch(prompts, block_size, spec.device)
    batch.adapters = [first, None, second]
    addition = adapters.of_batch(batch)
    products = Products(batch)
    limit = layer_tolerance(spec.dtype)
    differences = []
    for (rows, columns), name in shapes.items():
        x = numbers(len(batch.input_ids), columns) * math.sqrt(columns)
        got, want = (x.new_zeros(len(x), rows) for _ in range(2))
        addition(name, x, got)
        products.add_to(name, x, want)
        differences.append(Difference(f"products of '{name}'", difference(got, want), limit))
    return worst(differences)
