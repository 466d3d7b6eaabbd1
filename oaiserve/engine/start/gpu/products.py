"""Compares products of kernels, with packed matrices and experts, with plain torch: layers use them if they agree."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial

import torch

from oaiserve.engine.model.gpu.device_experts import (
    Compute,
    PackedExperts,
    compute_by,
    packed_experts,
    plain_experts,
)
from oaiserve.engine.model.gpu.device_matrices import (
    Multiply,
    PackedLinear,
    expanded_product,
    multiply_by,
    packed_linears,
)
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.start.compare import Difference, compare, layer_tolerance
from oaiserve.engine.start.gpu.timing import Seconds, device_seconds
from oaiserve.engine.start.gpu.trials import Trials

log = logging.getLogger(__name__)

EXPERT_ROWS = (1, 20, 40, 200)  # of x, each with tiles of its own
PRODUCT_ROWS = (*EXPERT_ROWS, 2048)
UNPACKED_ROWS = (512, 1024, 2048)  # from which on matrices may be unpacked: more than most steps have decodes
CHOSEN_EXPERTS = 4  # of each row, in this comparison

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden states, the experts of each row, and their weights


@torch.inference_mode()
def multiply_checked(loaded: LoadedModel, find: Callable[[], Multiply], trials: Trials) -> bool:
    """Let a model multiply with its packed matrices in the way that `find` returns, if products are those in plain
    torch. Return whether it does."""
    layers = packed_linears(loaded.model)
    kinds = {(one.matrix.kind, one.matrix.shape, one.matrix.zeros is None, one.bias is None): one for one in layers}

    def problem(multiply: Multiply) -> Difference | None:
        named = (
            (f"{num_rows} rows times a matrix of {layer.matrix.kind}", (layer, _rows(layer, num_rows, loaded.dtype)))
            for layer in kinds.values()
            for num_rows in PRODUCT_ROWS
        )
        return compare(_product(multiply), _product(expanded_product), named, layer_tolerance(loaded.dtype))

    if not layers:
        trials.off["packed_weights"] = "the model has none"
        return False
    multiply = trials.tried("packed_weights", find, problem)
    if multiply is not None:
        multiply_by(loaded.model, multiply)
    return multiply is not None


@torch.inference_mode()
def unpacking_where_faster(
    loaded: LoadedModel, multiply: Callable[..., torch.Tensor], seconds: Seconds = device_seconds
) -> Multiply:
    """Return the products that unpack a matrix from the number of rows on where this takes less time, as is measured
    with the largest."""
    layer = max(packed_linears(loaded.model), key=lambda layer: layer.matrix.codes.numel())
    for num_rows in UNPACKED_ROWS:
        x = _rows(layer, num_rows, loaded.dtype)
        packed, unpacked = (
            seconds(partial(multiply, x, layer.matrix, layer.bias, unpacked_from=least))
            for least in (num_rows + 1, num_rows)
        )
        if unpacked < packed:
            log.debug("Matrices are unpacked for %d rows or more: %.2g s, not %.2g s", num_rows, unpacked, packed)
            return partial(multiply, unpacked_from=num_rows)
    return partial(multiply, unpacked_from=sys.maxsize)


def _product(multiply: Multiply) -> Callable[[tuple[PackedLinear, torch.Tensor]], torch.Tensor]:
    return lambda given: multiply(given[1], given[0].matrix, given[0].bias)


def _rows(layer: PackedLinear, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    device = layer.matrix.codes.device
    generator = torch.Generator(device).manual_seed(num_rows)
    return torch.randn(num_rows, layer.matrix.shape[1], generator=generator, device=device).to(dtype)


@torch.inference_mode()
def compute_experts_checked(loaded: LoadedModel, find: Callable[[], Compute], trials: Trials) -> bool:
    """Let packed experts compute in the way that `find` returns, if what they give is what plain torch does. Return
    whether they do."""
    layers = packed_experts(loaded.model)
    if not layers:
        trials.off["packed_experts"] = "the model has none"
        return False
    problem = partial(_experts_problem, layers, dtype=loaded.dtype)
    compute = trials.tried("packed_experts", find, problem)
    if compute is not None:
        compute_by(loaded.model, compute)
    return compute is not None


def _experts_problem(layers: list[PackedExperts], compute: Compute, dtype: torch.dtype) -> Difference | None:
    """Compare outputs of experts with those in plain torch, for one layer of each kind."""
    kinds = {(one.gate_up.kind, one.gate_up.shape, one.num_experts): one for one in layers}
    named = (
        (f"{num_rows} rows and experts in {kind}", (experts, _expert_inputs(experts, num_rows, dtype)))
        for (kind, *_), experts in kinds.items()
        for num_rows in EXPERT_ROWS
    )
    return compare(_outputs(compute), _outputs(plain_experts), named, layer_tolerance(dtype))


def _outputs(compute: Compute) -> Callable[[tuple[PackedExperts, Inputs]], torch.Tensor]:
    return lambda given: compute(given[0], *given[1])


def _expert_inputs(experts: PackedExperts, num_rows: int, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(num_rows)
    device, number = experts.gate_up.codes.device, experts.num_experts
    x = torch.randn(num_rows, experts.gate_up.shape[1], generator=generator).to(device, dtype)
    chosen = torch.rand(num_rows, number, generator=generator).topk(min(CHOSEN_EXPERTS, number)).indices.to(device)
    return x, chosen, torch.rand(*chosen.shape, generator=generator).to(device, dtype)
