"""Compares products with packed matrices with those in plain torch, and has layers use them if they agree.

There are products in 16 bits, and for the many rows of prompts those in 8, whose inputs are rounded, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from oaiserve.engine.model.gpu.device_matrices import (
    Multiply,
    PackedLinear,
    PackedMatrix,
    expanded_product,
    multiply_by,
    packed_linears,
)
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.compare import Difference, compare, layer_tolerance
from oaiserve.engine.start.gpu.checks.usable import is_usable, reason, tried

log = logging.getLogger(__name__)

PRODUCT_ROWS = (1, 20, 40, 200)  # of x, each with tiles of its own
ROUNDED_TOLERANCE = 0.05  # of a product whose inputs are rounded to floats of 8 bits


class ScaledProducts(Protocol):
    """Products of 8 bits, as `triton_scaled` has them."""

    LEAST_ROWS: int

    def ways(self, matrix: PackedMatrix) -> list[Multiply]: ...

    def scaled_or(self, scaled: Multiply, multiply: Multiply) -> Multiply: ...


@torch.inference_mode()
def multiply_checked(loaded: LoadedModel, find: Callable[[], Multiply]) -> bool:
    """Let a model multiply with its packed matrices in the way that `find` returns, if products are those in plain
    torch. Return whether it does."""
    layers = packed_linears(loaded.model)
    if not layers:  # nor has another member of a tensor-parallel model: shards are alike
        return False
    instead = "each one expands its matrix, which is much slower"
    problem = partial(packed_problem, layers, dtype=loaded.dtype)
    multiply = tried("Products with packed weights", instead, find, problem, loaded.sums)
    if multiply is None:
        return False
    multiply_by(loaded.model, multiply)
    return True


def packed_problem(layers: list[PackedLinear], multiply: Multiply, dtype: torch.dtype) -> Difference | None:
    """Compare products with those in plain torch, for one layer of each kind."""
    kinds = {(one.matrix.kind, one.matrix.shape, one.matrix.zeros is None, one.bias is None): one for one in layers}
    named = (
        (f"{num_rows} rows times a matrix of {layer.matrix.kind}", (layer, random_rows(layer, num_rows, dtype)))
        for layer in kinds.values()
        for num_rows in PRODUCT_ROWS
    )
    return compare(_product(multiply), _product(expanded_product), named, layer_tolerance(dtype))


def _product(multiply: Multiply) -> Callable[[tuple[PackedLinear, torch.Tensor]], torch.Tensor]:
    return lambda given: multiply(given[1], given[0].matrix, given[0].bias)


def random_rows(layer: PackedLinear, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(num_rows, layer.matrix.shape[1], generator=torch.Generator().manual_seed(num_rows))
    return x.to(layer.matrix.codes.device, dtype)


@torch.inference_mode()
def scale_checked(loaded: LoadedModel, find: Callable[[], ScaledProducts]) -> bool:
    """Use `find`'s products of 8 bits for prompts and matrices in floats of 8 bits, and return whether they are used.

    They must differ from plain torch by the rounding of their inputs alone."""
    layers = [one for one in packed_linears(loaded.model) if one.matrix.kind == "float8"]
    if not layers:
        return False
    kinds = {_scaled_kind(one): one for one in layers}
    chosen: dict[tuple[object, ...], Multiply] = {}

    def problem() -> object | None:
        scaled = find()
        for kind, layer in kinds.items():
            problems: list[object] = []
            for way in scaled.ways(layer.matrix):
                found = _scaled_problem(layer, way, scaled.LEAST_ROWS, loaded.dtype)
                if found is None:
                    chosen[kind] = scaled.scaled_or(way, layer.multiply)
                    break
                problems.append(found)
            else:
                return problems[-1]
            for other in problems:
                log.info("Products in 8 bits with matrices of %d x %d: not torch's, %s", *layer.matrix.shape, other)
        return None

    if not is_usable("Products in 8 bits", "prompts are multiplied in 16, at half the rate", problem, loaded.sums):
        return False
    for layer in layers:
        layer.multiply = chosen[_scaled_kind(layer)]
    return True


def _scaled_kind(layer: PackedLinear) -> tuple[object, ...]:
    return layer.matrix.shape, len(layer.matrix.scales), layer.bias is None


def _scaled_problem(layer: PackedLinear, way: Multiply, num_rows: int, dtype: torch.dtype) -> object | None:
    """Find the reason why this layer cannot use a way to multiply in 8 bits."""
    given = layer, random_rows(layer, num_rows, dtype)
    try:
        return compare(_product(way), _product(expanded_product), [("products", given)], ROUNDED_TOLERANCE)
    except Exception as error:  # as in `is_usable`; there may be another way
        return reason(error)
