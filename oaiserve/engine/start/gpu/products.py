"""Compares products of kernels, with packed matrices and experts, with plain torch: layers use them if they agree."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import torch

from oaiserve.engine.model.gpu.device_matrices import ExpertMatrices, Multiply, PackedMatrix, expanded_product
from oaiserve.engine.start.compare import Difference, compare, layer_tolerance
from oaiserve.engine.start.gpu.timing import Seconds, device_seconds
from oaiserve.engine.start.gpu.trials import Trials

log = logging.getLogger(__name__)

EXPERT_ROWS = (1, 20, 40, 200)  # of x, each with tiles of its own
PRODUCT_ROWS = (*EXPERT_ROWS, 2048)
UNPACKED_ROWS = (512, 1024, 2048)  # from which on matrices may be unpacked: more than most steps have decodes
CHOSEN_EXPERTS = 4  # of each row, in this comparison


@torch.inference_mode()
def multiply_checked(
    matrices: Sequence[PackedMatrix], dtype: torch.dtype, find: Callable[[], Multiply], trials: Trials
) -> Multiply | None:
    """Return the products with these matrices that `find` returns, if they are those in plain torch."""
    dense = [one for one in matrices if not isinstance(one, ExpertMatrices)]
    kinds = {(one.kind, one.shape, one.zeros is None): one for one in dense}

    def problem(multiply: Multiply) -> Difference | None:
        named = (
            (f"{num_rows} rows times a matrix of {matrix.kind}", (matrix, rows_for(matrix, num_rows, dtype)))
            for matrix in kinds.values()
            for num_rows in PRODUCT_ROWS
        )
        return compare(_product(multiply), _product(expanded_product), named, layer_tolerance(dtype))

    if not dense:
        trials.off["packed_weights"] = "the model has none"
        return None
    return trials.tried("packed_weights", find, problem)


@torch.inference_mode()
def unpacking_where_faster(
    matrices: Sequence[PackedMatrix],
    dtype: torch.dtype,
    multiply: Callable[..., torch.Tensor],
    seconds: Seconds = device_seconds,
) -> Multiply:
    """Return the products that unpack a matrix from the number of rows on where this takes less time, as is measured
    with the largest."""
    dense = (one for one in matrices if not isinstance(one, ExpertMatrices))
    matrix = max(dense, key=lambda one: one.codes.numel())
    for num_rows in UNPACKED_ROWS:
        x = rows_for(matrix, num_rows, dtype)
        packed, unpacked = (
            seconds(partial(multiply, x, matrix, None, unpacked_from=least)) for least in (num_rows + 1, num_rows)
        )
        if unpacked < packed:
            log.debug("Matrices are unpacked for %d rows or more: %.2g s, not %.2g s", num_rows, unpacked, packed)
            return partial(multiply, unpacked_from=num_rows)
    return partial(multiply, unpacked_from=sys.maxsize)


@torch.inference_mode()
def experts_checked(
    matrices: Sequence[PackedMatrix], dtype: torch.dtype, find: Callable[[], ModuleType], trials: Trials
) -> ModuleType | None:
    """Return the kernels of experts that `find` returns, if their products are those in plain torch."""
    kinds = {(one.kind, one.codes.shape): one for one in matrices if isinstance(one, ExpertMatrices)}
    if not kinds:
        trials.off["packed_experts"] = "the model has none"
        return None

    def problem(kernels: ModuleType) -> Difference | None:
        def product(given: tuple[ExpertMatrices, torch.Tensor, torch.Tensor]) -> torch.Tensor:
            of_experts, x, chosen = given
            plan = kernels.planned(chosen, len(of_experts.codes))
            out: torch.Tensor = kernels.product(x, of_experts, plan, pairs_of_row=chosen.shape[1], factors=None)
            return out

        named = (
            (f"{num_rows} rows and experts in {one.kind}", (one, *_expert_inputs(one, num_rows, dtype)))
            for one in kinds.values()
            for num_rows in EXPERT_ROWS
        )
        return compare(product, plain_expert_products, named, layer_tolerance(dtype))

    return trials.tried("packed_experts", find, problem)


def plain_expert_products(given: tuple[ExpertMatrices, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the products [pairs, n] of rows [T, columns] with the matrices of their experts [T, top_k]."""
    of_experts, x, chosen = given
    top_k = chosen.shape[1]
    out = x.new_empty(chosen.numel(), of_experts.shape[0])
    for expert in chosen.unique().tolist():
        pairs = (chosen.flatten() == expert).nonzero()[:, 0]
        bias = None if of_experts.bias is None else of_experts.bias[expert]
        out[pairs] = expanded_product(x[pairs // top_k], of_experts.of(expert), bias)
    return out


def _product(multiply: Multiply) -> Callable[[tuple[PackedMatrix, torch.Tensor]], torch.Tensor]:
    return lambda given: multiply(given[1], given[0], None)


def rows_for(matrix: PackedMatrix, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows [num_rows, columns] of x for a matrix, always the same."""
    device = matrix.codes.device
    generator = torch.Generator(device).manual_seed(num_rows)
    return torch.randn(num_rows, matrix.shape[1], generator=generator, device=device).to(dtype)


def _expert_inputs(matrices: ExpertMatrices, num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    number = len(matrices.codes)
    chosen = torch.rand(num_rows, number, generator=generator).topk(min(CHOSEN_EXPERTS, number)).indices
    return rows_for(matrices, num_rows, dtype), chosen.to(matrices.codes.device)
