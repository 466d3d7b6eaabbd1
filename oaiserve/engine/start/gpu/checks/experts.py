"""Compares what kernels compute of a mixture of experts with plain torch, and has layers use them if they agree.

The experts are packed or in 16 bits. Packed ones may round their inputs to 8 bits, too, for the many rows of prompts.
"""

from __future__ import annotations

from collections.abc import Callable
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
from oaiserve.engine.model.rehearsal import difference, layer_tolerance
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.gpu.checks.matrices import PRODUCT_ROWS
from oaiserve.engine.start.gpu.checks.usable import is_usable

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
    found: list[Compute] = []

    def problem() -> str | None:
        found.append(find())
        return experts_problem(layers, found[0], loaded.dtype)

    instead = "each one expands its matrices, which is much slower"
    if not is_usable("Packed experts by kernels", instead, problem, loaded.sums):
        return False
    compute_by(loaded.model, found[0])
    return True


@torch.inference_mode()
def compute_plain_experts_checked(loaded: LoadedModel, find: Callable[[], Compute]) -> bool:
    """Let experts in 16 bits that have few rows compute in the way that `find` returns, if what they give is what plain
    torch does. Return whether they do. Many rows stay with transformers' grouped products."""
    made = [(module, plain_experts_of(module)) for module in loaded.model.modules()]
    layers = [(module, experts) for module, experts in made if experts is not None]
    if not layers:
        return False
    found: list[Compute] = []

    def problem() -> str | None:
        found.append(find())
        return experts_problem([experts for _, experts in layers], found[0], loaded.dtype)

    name, instead = "Experts in 16 bits by kernels", "they are transformers' grouped products"
    if not is_usable(name, instead, problem, loaded.sums):
        return False
    for module, experts in layers:
        experts.compute = found[0]
        compute_few_rows_by(module, experts, None if loaded.sums is None else loaded.sums.add_up, FEW_EXPERT_ROWS)
    return True


@torch.inference_mode()
def round_experts_checked(loaded: LoadedModel, find: Callable[[], RoundedExperts]) -> bool:
    """Let packed experts in floats of 8 bits that have many rows be multiplied by the products of 8 bits, if these
    differ by the rounding of their inputs alone. Return whether they are. This is for experts that kernels compute."""
    layers = [one for one in packed_experts(loaded.model) if one.gate_up.kind == one.down.kind == "float8"]
    if not layers:
        return False
    found: list[RoundedExperts] = []

    def problem() -> str | None:
        found.append(find())
        for experts in {(one.gate_up.shape, one.num_experts): one for one in layers}.values():
            given = _expert_inputs(experts, ROUNDED_EXPERT_ROWS, loaded.dtype)
            differs = difference(found[0].compute(experts, *given, is_rounded=True), plain_experts(experts, *given))
            if not differs <= ROUNDED_EXPERTS_TOLERANCE:
                return f"outputs would differ by {differs:.1%} (allowed: {ROUNDED_EXPERTS_TOLERANCE:.1%})"
        return None

    if not is_usable("Experts in 8 bits", "prompts are multiplied in 16, at half the rate", problem, loaded.sums):
        return False
    for experts in layers:
        experts.compute = found[0].compute_rounding_many
    return True


def experts_problem(layers: list[PackedExperts], compute: Compute, dtype: torch.dtype) -> str | None:
    """Return how outputs of experts differ from those in plain torch, for one layer of each kind, if they do."""
    kinds = {(one.gate_up.kind, one.gate_up.shape, one.num_experts): one for one in layers}
    limit = layer_tolerance(dtype)
    for (kind, *_), experts in kinds.items():
        for num_rows in PRODUCT_ROWS:
            given = _expert_inputs(experts, num_rows, dtype)
            found = difference(compute(experts, *given), plain_experts(experts, *given))
            if not found <= limit:
                return f"{num_rows} rows and experts in {kind} would differ by {found:.1%} (allowed: {limit:.1%})"
    return None


def _expert_inputs(
    experts: PackedExperts, num_rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, the experts of each row, and their weights."""
    generator = torch.Generator().manual_seed(num_rows)
    device, number = experts.gate_up.codes.device, experts.num_experts
    x = torch.randn(num_rows, experts.gate_up.shape[1], generator=generator).to(device, dtype)
    chosen = torch.rand(num_rows, number, generator=generator).topk(min(CHOSEN_EXPERTS, number)).indices.to(device)
    return x, chosen, torch.rand(*chosen.shape, generator=generator).to(device, dtype)
