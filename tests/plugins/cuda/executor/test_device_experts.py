"""Matrices of experts on a GPU: what the kernels compute, in Triton's interpreter, is what plain torch does."""

import numpy as np
import pytest
import torch

from oaiserve.engine.decoder.blocks import FORMATS, MXFP4, Blocks
from oaiserve.plugins.cuda.executor.device_matrices import ExpertMatrices, expanded_product, of_integers, stacked
from oaiserve.plugins.cuda.executor.packed import packed as packed_in_blocks
from tests.plugins.cuda.executor.packed_matrices import floats_in_blocks, integers, numbers, relative

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.executor import triton_products

# exp of a large number is infinity, and the activation is the number itself, which is right.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:overflow encountered in exp")]

NUM_EXPERTS = 5
WIDTH = 64


def in_mxfp4(n: int, columns: int, seed: int) -> ExpertMatrices:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (NUM_EXPERTS, n, columns // 2), generator=generator).to(torch.uint8)
    scales = torch.randint(120, 124, (NUM_EXPERTS, columns // 32, n), generator=generator).to(torch.uint8)
    return ExpertMatrices("mxfp4", codes, scales, None, bias=numbers(NUM_EXPERTS, n, seed=seed))


def packed(kind: str, n: int, columns: int, seed: int) -> ExpertMatrices:
    if kind == "mxfp4":
        return in_mxfp4(n, columns, seed)
    made = {
        "int4": lambda: integers(4, n, columns, 32, zeros=True),
        "int8": lambda: integers(8, n, columns, 32, zeros=False),
        "float8": lambda: floats_in_blocks(n, columns, None),
    }
    return stacked([of_integers(made[kind]()) for _ in range(NUM_EXPERTS)])


def plain_products(given: tuple[ExpertMatrices, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the products [pairs, n] of rows [T, columns] with the matrices of their experts [T, top_k]."""
    matrices, x, chosen = given
    out = x.new_empty(chosen.numel(), matrices.shape[0])
    for expert in chosen.unique().tolist():
        pairs = (chosen.flatten() == expert).nonzero()[:, 0]
        bias = None if matrices.bias is None else matrices.bias[expert]
        out[pairs] = expanded_product(x[pairs // chosen.shape[1]], matrices.of(expert), bias)
    return out


def by_kernels(given: tuple[ExpertMatrices, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    matrices, x, chosen = given
    plan = triton_products.planned(chosen, NUM_EXPERTS)
    return triton_products.product(x, matrices, plan, pairs_of_row=chosen.shape[1], factors=None)


@pytest.mark.parametrize("kind", ["mxfp4", "int4", "int8", "float8"])
def test_products_of_the_kernels_are_those_of_plain_torch(kind: str) -> None:
    for n, columns in ((192, WIDTH), (WIDTH, 128)):
        matrices = packed(kind, n, columns, 1)
        for num_rows, dtype in ((1, torch.float32), (23, torch.bfloat16)):
            generator = torch.Generator().manual_seed(num_rows)
            x = torch.randn(num_rows, columns, generator=generator).to(dtype)
            chosen = torch.stack([torch.randperm(NUM_EXPERTS - 1, generator=generator)[:2] for _ in range(num_rows)])
            want = plain_products((matrices, x.float(), chosen))
            found = by_kernels((matrices, x, chosen)).float()
            assert relative(found, want) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_columns_of_experts_are_split_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    given = in_mxfp4(256, 256, 1), numbers(2, 256), torch.tensor([[0, 3], [3, 1]])
    want = by_kernels(given)
    monkeypatch.setattr(triton_products, "num_multiprocessors", lambda device: 16)
    for _ in range(2):  # the counters are as they were
        torch.testing.assert_close(by_kernels(given), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_rows_are_sorted_by_expert_and_cut_into_tiles(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randint(7, (num_rows, 3), generator=generator)
    chosen[chosen == 4] = 6  # expert 4 has no rows
    order, tile_expert, tile_first, tile_end, tiles = triton_products.planned(chosen, 7)
    pairs = chosen.flatten()
    assert order.tolist() == pairs.argsort(stable=True).tolist()
    found = [
        (expert, first, end)
        for expert, first, end in zip(*(one.tolist() for one in (tile_expert, tile_first, tile_end)), strict=True)
        if expert >= 0
    ]
    wanted = []
    begin = 0
    for expert, count in enumerate(pairs.bincount(minlength=7).tolist()):
        wanted += [(expert, first, begin + count) for first in range(begin, begin + count, tiles.rows)]
        begin += count
    assert found == wanted
    assert begin == 3 * num_rows


def test_experts_that_are_stored_in_different_ways_are_not_stacked() -> None:
    assert stacked([of_integers(integers(bits, 8, 128, 32, zeros=True)) for bits in (4, 8)]) is None
    assert stacked([of_integers(integers(4, 8, 128, 32, zeros=True, any_order=True))] * 2) is None


def test_a_matrix_in_mxfp4_may_have_an_odd_number_of_groups() -> None:
    generator = np.random.default_rng(0)
    data = generator.integers(0, 256, (8, 3 * FORMATS[MXFP4].num_bytes), dtype=np.uint8)
    data[:, :: FORMATS[MXFP4].num_bytes] = generator.integers(61, 189, (8, 3))
    matrix = packed_in_blocks(Blocks(data, MXFP4, np.arange(8)), torch.device("cpu"))
    assert matrix is not None
    assert matrix.shape == (8, 96)
    experts = stacked([matrix])
    x = numbers(2, 96)
    found = triton_products.product(
        x, experts, triton_products.planned(torch.zeros(2, 1, dtype=torch.int64), 1), pairs_of_row=1, factors=None
    )
    assert relative(found, expanded_product(x, matrix, None)) < 1e-5
