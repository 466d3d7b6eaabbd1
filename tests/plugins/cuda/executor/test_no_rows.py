"""Kernels launched for no rows compute nothing, and raise nothing: a step of a prompt's middle draws no token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oaiserve.engine.decoder.description import Norm
from oaiserve.plugins.cuda.executor.device_matrices import ExpertMatrices, PackedMatrix, of_integers
from oaiserve.plugins.cuda.executor.product_ways import ProductWays
from tests.plugins.cuda.executor.packed_matrices import in_blocks_of_128, integers, numbers

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.executor import triton_layers, triton_products, triton_sampling

pytestmark = pytest.mark.kernels

INT4 = of_integers(integers(4, 64, 128, 32, zeros=True))
FLOAT8 = in_blocks_of_128(numbers(256, 128))
EXPERTS = ExpertMatrices("dense", numbers(3, 64, 128), numbers(1, 1, 1), None)


def of_experts(x: torch.Tensor) -> torch.Tensor:
    plan = triton_products.planned(torch.empty(0, 2, dtype=torch.int64), 3)
    return triton_products.product(x, EXPERTS, plan, pairs_of_row=2, factors=None)


def multiplied(matrix: PackedMatrix | None, **ways: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    assert matrix is not None
    return lambda x: triton_products.multiply(x, matrix, None, ProductWays(**ways))


def normed(x: torch.Tensor) -> torch.Tensor:
    return triton_layers.add_and_norm(x, (x,), None, Norm(torch.ones(128), None, 1e-6, subtracts_mean=False))[1]


# By operation on rows of 128 numbers: its results and their widths.
OPERATIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "products in 4 bits": (multiplied(INT4, unpacked_from=None), 64),
    "products that unpack": (multiplied(INT4, unpacked_from=0), 64),
    "products in FP8": (multiplied(FLOAT8, unpacked_from=None), 256),
    "products of experts": (of_experts, 64),
    "rounded rows": (lambda x: triton_products.rounded_rows(x, 128).codes, 128),
    "norms": (normed, 128),
    "activations": (lambda x: triton_layers.activate(x, "silu", is_gated=True), 64),
    "draws": (lambda x: triton_sampling.sample_ids(x, [])[0][:, None], 1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_rows_have_no_results(name: str) -> None:
    operation, width = OPERATIONS[name]
    assert operation(torch.empty(0, 128)).shape == (0, width)
