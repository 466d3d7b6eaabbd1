"""Products with bfloat16 matrices are those of a plain reference, at any number of rows and alike in any company."""

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from oaiserve.engine.executors.native.library import Library, Normalize, StepInput
from tests.engine.executors.native.small_models import EMULATED_AMX, compiled_for

pytestmark = [pytest.mark.kernels, pytest.mark.compiler]
MOST_ROWS = 300  # more than an item has


@pytest.fixture(scope="module", params=["native", "x86-64-v3", EMULATED_AMX])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    with compiled_for(request.param):
        yield Library(torch.bfloat16)


class Product:
    """A decoder that has one matrix with a bias: its logits are rows of a table times that matrix."""

    def __init__(self, library: Library, matrix: torch.Tensor, bias: torch.Tensor, table: torch.Tensor) -> None:
        self._n, k = matrix.shape
        self._library = library
        self._kept = (matrix, bias, table)
        self._decoder = library.decoder()
        self._pool = library.pool(2)
        hidden = library.add_floats(self._decoder, k, 1)
        x = library.add_elements(self._decoder, k, 1)
        weights = library.add_weights(self._decoder, matrix.data_ptr(), self._n, k, bias.data_ptr())

        def add(operation: str, *arguments: object) -> None:
            library.add(self._decoder, operation, *arguments, keep=torch.Tensor.data_ptr)

        add("embed", hidden, table, len(table), None, k, 1.0)
        add("norm", hidden, x, Normalize.of(None, k), True)
        add("logits", x, weights, 1.0, 0.0)

    def __del__(self) -> None:
        self._library.free_decoder(self._decoder)
        self._library.free_pool(self._pool)

    def of(self, rows: range) -> NDArray[np.float32]:
        ids = np.array(rows, np.int32)
        places = np.arange(len(rows), dtype=np.int32)
        logits = np.full((len(rows), self._n), np.nan, np.float32)
        arrays = (ids, places, places, places, places, places, places, logits)
        step = StepInput(len(rows), 0, 0, len(rows), *(array.ctypes.data for array in arrays))
        assert self._library.step(self._decoder, self._pool, ctypes.byref(step)) == 0
        return logits


# Several tiles of rows share a block of weights: 576 numbers of 32 columns are one block, and 592 are two.
@pytest.mark.parametrize("k", [16, 48, 576, 592, 1104])
@pytest.mark.parametrize("n", [32, 33, 80])
def test_products_are_those_of_the_reference_and_do_not_depend_on_other_rows(library: Library, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    matrix, table = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (n, MOST_ROWS))
    bias = torch.randn(n, generator=generator)
    product = Product(library, matrix, bias, table)
    together = product.of(range(MOST_ROWS))
    expected = table.double() @ matrix.double().T + bias.double()
    np.testing.assert_allclose(together, expected, atol=1e-4 * k**0.5, rtol=1e-4)
    first = 0
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 129, 255, 257):
        some = range(first, first + rows)
        assert (product.of(some) == together[some.start : some.stop]).all(), rows
        first = (first + 1) % (MOST_ROWS - 257)
