"""Compares what kernels compute of a mixture of experts with plain torch, and has layers use them if they agree.

The experts are packed or in 16 bits. Packed ones may round their inputs to 8 bits, too, for the many rows of prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from oaiserve.engine.model.gpu.device_experts import (
    Compute,
    PackedExperts,
    compute_by,
    compute_few_rows_by,
    packed_experts,
    plain_experts,
    plain_experts_of,
)
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.compare import Difference, compare, layer_tolerance
from oaiserve.engine.start.gpu.checks.matrices import PRODUCT_ROWS
from oaiserve.engine.start.gpu.checks.usable import tried

ROUNDED_EXPERTS_TOLERANCE = 0.08  # of what follows from two products whose inputs are rounded to floats of 8 bits
ROUNDED_EXPERT_ROWS = 300
CHOSEN_EXPERTS = 4  # of each row, in this comparison
FEW_EXPERT_ROWS = 64  # of each expert, on average: with more, its products take longer than reading it


class RoundedExperts(Protocol):
    """Experts whose inputs are rounded, as `triton_experts` has them."""

    def compute(
        self,
        experts: PackedExperts,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        *,
        is_rounded: bool = False,
    ) -> torch.Tensor: ...

    def compute_rounding_many(
        self, experts: PackedExperts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor: ...


@torch.inference_mode()
def compute_experts_checked(loaded: LoadedModel, find: Callable[[], Compute]) -> bool:
    """Let packed experts compute in the way that `find` returns, if what they give is what plain torch does. Return
    whether they do."""
    layers = packed_experts(loaded.model)
    if not layers:
        return False
    instead = "each one expands its matrices, which is much slower"
    problem = partial(experts_problem, layers, dtype=loaded.dtype)
    compute = tried("Packed experts by kernels", instead, find, problem, loaded.sums)
    if compute is None:
        return False
    compute_by(loaded.model, compute)
    return True


@torch.inference_mode()
def compute_plain_experts_checked(loaded: LoadedModel, find: Callable[[], Compute]) -> bool:
    """Let experts in 16 bits that have few rows compute in the way that `find` returns, if what they give is what plain
    torch does. Return whether they do. Many rows stay with transformers' grouped products."""
    made = [(module, plain_experts_of(module)) for module in loaded.model.modules()]
    layers = [(module, experts) for module, experts in made if experts is not None]
    if not layers:
        return False
    name, instead = "Experts in 16 bits by kernels", "they are transformers' grouped products"
    problem = partial(experts_problem, [experts for _, experts in layers], dtype=loaded.dtype)
    compute = tried(name, instead, find, problem, loaded.sums)
    if compute is None:
        return False
    for module, experts in layers:
        experts.compute = compute
        compute_few_rows_by(module, experts, None if loaded.sums is None else loaded.sums.add_up, FEW_EXPERT_ROWS)
    return True


@torch.inference_mode()
def round_experts_checked(loaded: LoadedModel, find: Callable[[], RoundedExperts]) -> bool:
    """Use products of 8 bits for many rows of packed experts in floats of 8 bits, and return whether they are used.

    They must differ from plain torch by the rounding of their inputs alone. This is for experts of kernels."""
    layers = [one for one in packed_experts(loaded.model) if one.gate_up.kind == one.down.kind == "float8"]
    if not layers:
        return False

    def problem(rounded: RoundedExperts) -> Difference | None:
        shapes = {(one.gate_up.shape, one.num_experts): one for one in layers}
        named = (("outputs", (one, _expert_inputs(one, ROUNDED_EXPERT_ROWS, loaded.dtype))) for one in shapes.values())
        compute = partial(rounded.compute, is_rounded=True)
        return compare(_outputs(compute), _outputs(plain_experts), named, ROUNDED_EXPERTS_TOLERANCE)

    rounded = tried("Experts in 8 bits", "prompts are multiplied in 16, at half the rate", find, problem, loaded.sums)
    if rounded is None:
        return False
    for experts in layers:
        experts.compute = rounded.compute_rounding_many
    return True


def experts_problem(layers: list[PackedExperts], compute: Compute, dtype: torch.dtype) -> Difference | None:
    """Compare outputs of experts with those in plain torch, for one layer of each kind."""
    kinds = {(one.gate_up.kind, one.gate_up.shape, one.num_experts): one for one in layers}
    named = (
        (f"{num_rows} rows and experts in {kind}", (experts, _expert_inputs(experts, num_rows, dtype)))
        for (kind, *_), experts in kinds.items()
        for num_rows in PRODUCT_ROWS
    )
    return compare(_outputs(compute), _outputs(plain_experts), named, layer_tolerance(dtype))


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden states, the experts of each row, and their weights


def _outputs(compute: Compute) -> Callable[[tuple[PackedExperts, Inputs]], torch.Tensor]:
    return lambda given: compute(given[0], *given[1])


def _expert_inputs(experts: PackedExperts, num_rows: int, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(num_rows)
    device, number = experts.gate_up.codes.device, experts.num_experts
    x = torch.randn(num_rows, experts.gate_up.shape[1], generator=generator).to(device, dtype)
    chosen = torch.rand(num_rows, number, generator=generator).topk(min(CHOSEN_EXPERTS, number)).indices.to(device)
    return x, chosen, torch.rand(*chosen.shape, generator=generator).to(device, dtype)
