"""Compares kernels' products with packed matrices and experts with plain torch, and has layers use them if they agree.

Products are in 16 bits. For the many rows of prompts there are some in 8 bits, whose inputs are rounded, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

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
from oaiserve.engine.model.gpu.device_matrices import (
    Multiply,
    PackedLinear,
    expanded_product,
    multiply_by,
    packed_linears,
)
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.compare import Difference, compare, layer_tolerance
from oaiserve.engine.start.gpu.usable import is_usable, tried
from oaiserve.files.load_errors import named

log = logging.getLogger(__name__)

PRODUCT_ROWS = (1, 20, 40, 200)  # of x, each with tiles of its own
ROUNDED_TOLERANCE = 0.05  # of a product whose inputs are rounded to floats of 8 bits
ROUNDED_EXPERTS_TOLERANCE = 0.08  # of what follows from two such products
ROUNDED_EXPERT_ROWS = 300
CHOSEN_EXPERTS = 4  # of each row, in this comparison
FEW_EXPERT_ROWS = 64  # of each expert, on average: with more, its products take longer than reading it

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden states, the experts of each row, and their weights


@torch.inference_mode()
def multiply_checked(loaded: LoadedModel, find: Callable[[], Multiply]) -> bool:
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
        return False
    instead = "each one expands its matrix, which is much slower"
    multiply = tried("Products with packed weights", instead, find, problem)
    if multiply is not None:
        multiply_by(loaded.model, multiply)
    return multiply is not None


@torch.inference_mode()
def scale_checked(loaded: LoadedModel, find: Callable[[], Any]) -> bool:
    """Use the products of 8 bits of `find`, as `triton_scaled` has them, for prompts and matrices in floats of 8 bits.

    They must differ from plain torch by the rounding of their inputs alone. Return whether they are used."""
    layers = [one for one in packed_linears(loaded.model) if one.matrix.kind == "float8"]
    kinds = {_scaled_kind(one): one for one in layers}
    chosen: dict[tuple[object, ...], Multiply] = {}

    def problem_of(layer: PackedLinear, way: Multiply, num_rows: int) -> object | None:
        given = layer, _rows(layer, num_rows, loaded.dtype)
        try:
            return compare(_product(way), _product(expanded_product), [("products", given)], ROUNDED_TOLERANCE)
        except Exception as error:  # as in `is_usable`; there may be another way
            return named(error)

    def problem() -> object | None:
        scaled = find()
        for kind, layer in kinds.items():
            problems: list[object] = []
            for way in scaled.ways(layer.matrix):
                found = problem_of(layer, way, scaled.LEAST_ROWS)
                if found is None:
                    chosen[kind] = scaled.scaled_or(way, layer.multiply)
                    break
                problems.append(found)
            else:
                return problems[-1]
            for other in problems:
                log.info("Products in 8 bits with matrices of %d x %d: not torch's, %s", *layer.matrix.shape, other)
        return None

    instead = "prompts are multiplied in 16, at half the rate"
    if not layers or not is_usable("Products in 8 bits", instead, problem):
        return False
    for layer in layers:
        layer.multiply = chosen[_scaled_kind(layer)]
    return True


def _scaled_kind(layer: PackedLinear) -> tuple[object, ...]:
    return layer.matrix.shape, len(layer.matrix.scales), layer.bias is None


def _product(multiply: Multiply) -> Callable[[tuple[PackedLinear, torch.Tensor]], torch.Tensor]:
    return lambda given: multiply(given[1], given[0].matrix, given[0].bias)


def _rows(layer: PackedLinear, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(num_rows, layer.matrix.shape[1], generator=torch.Generator().manual_seed(num_rows))
    return x.to(layer.matrix.codes.device, dtype)


@torch.inference_mode()
def compute_experts_checked(loaded: LoadedModel, find: Callable[[], Compute]) -> bool:
    """Let packed experts compute in the way that `find` returns, if what they give is what plain torch does. Return
    whether they do."""
    layers = packed_experts(loaded.model)
    if not layers:
        return False
    instead = "each one expands its matrices, which is much slower"
    problem = partial(_experts_problem, layers, dtype=loaded.dtype)
    compute = tried("Packed experts by kernels", instead, find, problem)
    if compute is not None:
        compute_by(loaded.model, compute)
    return compute is not None


@torch.inference_mode()
def compute_plain_experts_checked(loaded: LoadedModel, find: Callable[[], Compute]) -> bool:
    """Let experts in 16 bits that have few rows compute in the way that `find` returns, if what they give is what plain
    torch does. Return whether they do. Many rows stay with transformers' grouped products."""
    made = [(module, plain_experts_of(module)) for module in loaded.model.modules()]
    layers = [(module, experts) for module, experts in made if experts is not None]
    if not layers:
        return False
    name, instead = "Experts in 16 bits by kernels", "they are transformers' grouped products"
    problem = partial(_experts_problem, [experts for _, experts in layers], dtype=loaded.dtype)
    compute = tried(name, instead, find, problem)
    if compute is None:
        return False
    for module, experts in layers:
        experts.compute = compute
        compute_few_rows_by(module, experts, FEW_EXPERT_ROWS)
    return True


@torch.inference_mode()
def round_experts_checked(loaded: LoadedModel, find: Callable[[], Any]) -> bool:
    """Use the products of 8 bits of `find`, as `triton_experts` has them, for many rows of experts in floats of 8 bits.

    They must differ from plain torch by the rounding of their inputs alone. Return whether they are used."""
    layers = [one for one in packed_experts(loaded.model) if one.gate_up.kind == one.down.kind == "float8"]

    def problem(rounded: Any) -> Difference | None:
        shapes = {(one.gate_up.shape, one.num_experts): one for one in layers}
        named = (("outputs", (one, _expert_inputs(one, ROUNDED_EXPERT_ROWS, loaded.dtype))) for one in shapes.values())
        compute = partial(rounded.compute, is_rounded=True)
        return compare(_outputs(compute), _outputs(plain_experts), named, ROUNDED_EXPERTS_TOLERANCE)

    if not layers:
        return False
    rounded = tried("Experts in 8 bits", "prompts are multiplied in 16, at half the rate", find, problem)
    if rounded is None:
        return False
    for experts in layers:
        experts.compute = rounded.compute_rounding_many
    return True


def _experts_problem(layers: list[PackedExperts], compute: Compute, dtype: torch.dtype) -> Difference | None:
    """Compare outputs of experts with those in plain torch, for one layer of each kind."""
    kinds = {(one.gate_up.kind, one.gate_up.shape, one.num_experts): one for one in layers}
    named = (
        (f"{num_rows} rows and experts in {kind}", (experts, _expert_inputs(experts, num_rows, dtype)))
        for (kind, *_), experts in kinds.items()
        for num_rows in PRODUCT_ROWS
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
