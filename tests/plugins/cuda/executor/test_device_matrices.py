"""Packed matrices on a GPU: products of the kernel are those of the expanded weights, for every format that is read."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from oaiserve.engine.decoder.sources.integer_layouts import BadLayout, floats
from oaiserve.plugins.cuda.executor.device_matrices import (
    expanded_product,
    joined,
    of_integers,
)
from oaiserve.plugins.cuda.executor.product_ways import ProductWays
from tests.plugins.cuda.executor.packed_matrices import floats_in_blocks, integers, numbers, relative

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.executor import triton_products

pytestmark = pytest.mark.kernels

MATRICES = {
    "4 bits": integers(4, 70, 128, 32, zeros=False),
    "4 bits with zeros": integers(4, 70, 256, 128, zeros=True),
    "4 bits, half a tile": integers(4, 70, 192, 64, zeros=True),
    "4 bits, by row": integers(4, 70, 96, 96, zeros=True),
    "4 bits, any order": integers(4, 70, 128, 64, zeros=True, any_order=True),
    "8 bits": integers(8, 70, 128, 32, zeros=False),
    "8 bits in groups of 96": integers(8, 70, 192, 96, zeros=True),
    "8 bits with zeros": integers(8, 70, 128, 128, zeros=True),
    "FP8 by row, with a rest": floats_in_blocks(70, 160, None),
    "FP8 by row": floats_in_blocks(70, 128, None),
    "FP8 in blocks": floats_in_blocks(70, 256, (64, 128)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_expanded_weights_are_those_of_the_format(name: str) -> None:
    packed = of_integers(MATRICES[name])
    assert packed.shape == MATRICES[name].codes.shape
    torch.testing.assert_close(packed.expand(torch.float32), MATRICES[name].expand(), rtol=0, atol=0)


def test_a_row_with_a_code_of_nan_gives_nan_in_kernels_too() -> None:
    matrix = floats_in_blocks(70, 128, None)
    matrix.codes.view(torch.uint8)[3, 5] = 0xFF
    packed = of_integers(matrix)
    assert packed.scales.isnan().nonzero().tolist() == [[0, 3]]  # Only a compiled kernel reads the code as a number.
    product = triton_products.multiply(numbers(2, 128, seed=1), packed, None)
    assert product.isnan().any(0).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(("num_rows", "dtype"), [(1, torch.bfloat16), (20, torch.float32), (70, torch.float16)])
@pytest.mark.parametrize("name", MATRICES)
def test_products_of_the_kernel_are_those_of_expanded_weights(name: str, num_rows: int, dtype: torch.dtype) -> None:
    packed = of_integers(MATRICES[name])
    x = numbers(num_rows, packed.shape[1], seed=1).to(dtype)
    bias = numbers(packed.shape[0], seed=2).to(dtype) if num_rows == 20 else None
    want = expanded_product(x.float(), packed, None if bias is None else bias.float())
    found = triton_products.multiply(x, packed, bias).float()
    assert relative(found, want) < {torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MATRICES)
def test_many_rows_are_multiplied_with_unpacked_weights(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = of_integers(MATRICES[name])
    stored = replace(packed, order=None)
    rtol = 2**-7 if dtype == torch.bfloat16 else 0  # where Triton's interpreter cuts off instead of rounding
    torch.testing.assert_close(triton_products.unpacked(stored, dtype), stored.expand(dtype), rtol=rtol, atol=0)
    kernel = Mock(wraps=triton_products.unpacked)
    monkeypatch.setattr(triton_products, "unpacked", kernel)
    bias = numbers(70).to(dtype)
    for num_rows, added in ((6, None), (6, bias), (5, bias)):
        x = numbers(num_rows, packed.shape[1]).to(dtype)
        want = expanded_product(x.float(), packed, None if added is None else added.float())
        limit = 1e-2 if dtype == torch.bfloat16 else 5e-3  # scaled weights are cut off, too
        assert relative(triton_products.multiply(x, packed, added, ProductWays(unpacked_from=6)).float(), want) < limit
    assert kernel.call_count == 2


def test_a_row_is_multiplied_alike_in_255_rows_and_in_256() -> None:
    packed = of_integers(MATRICES["FP8 in blocks"])
    x = numbers(256, 256).bfloat16()
    together = triton_products.multiply(x, packed, None)
    assert torch.equal(triton_products.multiply(x[:255], packed, None), together[:255])


def test_columns_are_split_so_that_there_are_enough_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = of_integers(MATRICES["4 bits"])
    x = numbers(3, 128)
    want = triton_products.multiply(x, packed, None)
    monkeypatch.setattr(triton_products, "num_multiprocessors", lambda device: 2)
    for _ in range(2):  # the counters are as they were
        torch.testing.assert_close(triton_products.multiply(x, packed, None), want, rtol=1e-5, atol=1e-5)
    assert triton_products.num_splits(1, 4, x.device, 4) == 4
    monkeypatch.setattr(triton_products, "num_multiprocessors", lambda device: 132)
    assert triton_products.num_splits(1, 3, x.device, 4) == 2
    assert triton_products.num_splits(64, 112, x.device, 4) == 16
    assert triton_products.num_splits(1000, 112, x.device, 4) == 1


def test_matrices_with_small_groups_are_expanded() -> None:
    assert of_integers(integers(4, 8, 96, 16, zeros=True)) is None


def test_matrices_are_joined_if_they_are_stored_alike() -> None:
    one, other = (of_integers(integers(4, n, 128, 32, zeros=True)) for n in (8, 24))
    both = joined([one, other])
    torch.testing.assert_close(both.expand(torch.float32)[8:], other.expand(torch.float32), rtol=0, atol=0)
    for bits, group in ((4, 64), (8, 32)):
        assert joined([one, of_integers(integers(bits, 8, 128, group, zeros=True))]) is None


@pytest.mark.parametrize(
    ("shape", "block", "problem"),
    [
        ((2, 3), None, "says nothing of blocks"),
        ((2, 3), (32, 32), r"scales of the shape \(2, 3\), and not \(3, 3\)"),
        ((3, 2), (32, 64), "no whole blocks of 64"),
    ],
)
def test_scales_of_blocks_that_do_not_fit_are_refused(
    shape: tuple[int, int], block: tuple[int, int] | None, problem: str
) -> None:
    with pytest.raises(BadLayout, match=problem):
        floats(torch.zeros(70, 96, dtype=torch.float8_e4m3fn), torch.zeros(shape), block)
