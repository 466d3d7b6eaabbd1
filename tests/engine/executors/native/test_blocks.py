"""Weights in blocks of GGUF files are packed without loss, and multiplied as a reference does, alike in any company."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from oaiserve.engine.decoder.blocks import FORMATS, Blocks, of_integers
from oaiserve.engine.decoder.grids import IN_NATIVE_CODE, points_of
from oaiserve.engine.executors.native.library import Library, Normalize, StepInput, WeightRange
from oaiserve.engine.executors.native.pack_weights import padded
from tests.engine.executors.native.small_models import AVX_VNNI, EMULATED_AMX, compiled_for
from tests.models.gguf_files import random_blocks
from tests.models.in_blocks import finer

pytestmark = [pytest.mark.kernels, pytest.mark.compiler]
KINDS = list(FORMATS)
OUR_KINDS = [kind for kind in FORMATS if kind > 1000]
EXACT_KINDS = (*IN_NATIVE_CODE, 34, 35)  # without minimums that were rounded
LONG_KIND = 1104  # a kind with scales for 128 numbers
SCALES = {  # where a block has scales of 16 bits
    2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 20: (0,), 39: (), 1004: (0,), 1008: (0,),
    10: (80, 82), 11: (108,), 12: (0, 2), 13: (0, 2), 14: (208,), 23: (0,), 1104: (0, 2),
    16: (0,), 17: (0,), 18: (0,), 19: (0,), 21: (0,), 22: (0,), 29: (), 34: (52,), 35: (64,),
}  # fmt: skip
# The last panel has more columns than n, and the rows make tiles of several heights.
N = 80
K = 512
ROWS = 21


@pytest.fixture(scope="module", params=["native", "x86-64-v3", "x86-64-v4", AVX_VNNI, EMULATED_AMX])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    with compiled_for(request.param):
        yield Library(torch.float32)


class Product:
    """A decoder that has one matrix: its logits are rows of a table, in eight bits, times that matrix.

    The matrix may have parts in several formats, which are whole panels except for the last one.
    """

    def __init__(
        self,
        library: Library,
        matrix: Blocks,
        table: torch.Tensor,
        num_threads: int,
        *more: Blocks,
        with_rests: bool = False,
    ) -> None:
        parts = [matrix, *more]
        n = sum(map(len, parts))
        k = matrix.shape[1]
        self._library = library
        self._table = table
        self._n = n
        self._decoder = library.decoder()
        self._pool = library.pool(num_threads)
        self._columns = matrix.columns
        order = None if matrix.columns is None else matrix.columns.ctypes.data
        hidden = library.add_floats(self._decoder, k, 1)
        x = library.add_elements(self._decoder, k, 1)
        groups = library.add_groups(self._decoder, k, 1)
        rows = padded(np.concatenate([part.addresses() for part in parts]), 32)
        kinds = np.concatenate([np.full(-(-len(part) // 32), part.kind, np.int32) for part in parts])
        scales = None if (result := matrix.scale_addresses()) is None else padded(result, 32)
        packed = (rows.ctypes.data, None if scales is None else scales.ctypes.data, kinds.ctypes.data)
        library.set_grids(part.kind for part in parts)
        self.weights = library.add_blocks(self._decoder, *packed, n, k, None)
        library.pack(self._decoder, self._pool)

        def add(operation: str, *arguments: object) -> None:
            library.add(self._decoder, operation, *arguments, keep=torch.Tensor.data_ptr)

        add("embed", hidden, table, len(table), None, k, 1.0)
        add("norm", hidden, x, Normalize.of(None, k), True)
        add("quantize", x, groups, k, WeightRange(self.weights, 1), True, with_rests, order, 1)
        add("logits", groups, self.weights, 1.0, 0.0)

    def __del__(self) -> None:
        self._library.free_decoder(self._decoder)
        self._library.free_pool(self._pool)

    def of(self, rows: list[int]) -> NDArray[np.float32]:
        ids = np.array(rows, np.int32)
        places = np.arange(len(rows), dtype=np.int32)
        logits = np.zeros((len(rows), self._n), np.float32)
        arrays = (ids, places, places, places, places, places, places, logits)
        step = StepInput(len(rows), 0, 0, len(rows), *(array.ctypes.data for array in arrays))
        assert self._library.step(self._decoder, self._pool, ctypes.byref(step)) == 0
        return logits

    def row(self, index: int, k: int) -> NDArray[np.float32]:
        out = np.zeros(k, np.float32)
        self._library.expand_row(self._decoder, self.weights, index, out.ctypes.data)
        return out


def random_matrix(kind: int) -> Blocks:
    rng = np.random.default_rng(kind)
    if kind not in OUR_KINDS:
        # In another order than the file's, as the queries and keys of some families are.
        return Blocks(random_blocks(rng, Kind(kind), N, K), kind, rng.permutation(N))
    weights = FORMATS[kind].weights
    num_bytes = FORMATS[kind].num_bytes
    bits = 4 if num_bytes < weights else 8
    groups = K // 128 if kind == LONG_KIND else K // 64
    codes, of_groups = (torch.from_numpy(rng.integers(0, 1 << bits, (N, k), np.uint8)) for k in (K, groups))
    scales = torch.from_numpy(rng.uniform(-0.01, 0.01, (N, groups)).astype(np.float16))
    # Columns in another order than the input's, as where GPTQ has quantized those first that matter most.
    blocks = of_integers(codes, scales, of_groups, bits, torch.from_numpy(rng.permutation(K)), is_long=True)
    assert blocks.kind == kind
    return blocks


def in_integers(x: NDArray[np.float32], kind: int, *, in_tiles: bool) -> NDArray[np.float64]:
    """Round rows as a format reads them: as many numbers share a scale as weights of a block do.

    They have eight bits, or eleven for formats that have a scale for 128 weights. Of 256 numbers of eight bits, each 32
    may have a scale that is finer by a power of two.
    """
    groups = x.reshape(-1, FORMATS[kind].weights)
    largest = np.float32(127 * 8 + 3 if kind == LONG_KIND else 127)
    most = np.abs(groups).max(1, keepdims=True)
    power = np.float32(1)
    if FORMATS[kind].weights == 256 and kind != LONG_KIND:
        power = finer(torch.from_numpy(groups), in_tiles=in_tiles).numpy()
    integers = np.rint(groups * (largest * power / most))  # near a half, a quotient may be rounded to the other one
    return (integers * (most / largest / power).astype(np.float64)).reshape(x.shape)


def inputs() -> torch.Tensor:
    """Make rows of numbers that are alike, that differ by group, and of which one is far larger than the others."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(ROWS, K, generator=generator)
    sizes = torch.randint(0, 5, (ROWS, K // 32), generator=generator)
    sizes[::3] = 0
    table *= torch.exp2(sizes.repeat_interleave(32, dim=1))
    table[1::4, 77] = table[2::5, 300] = -500
    return table


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: FORMATS[kind].name)
def test_packed_weights_are_those_of_the_reference(library: Library, kind: int) -> None:
    matrix = random_matrix(kind)
    product = Product(library, matrix, torch.zeros(1, K), 1)
    actual = np.stack([product.row(index, K) for index in range(N)])
    if kind in OUR_KINDS:
        assert (actual == matrix.expand().numpy()[:, matrix.columns]).all()
    else:
        expected = gguf.dequantize(matrix.data, Kind(kind))[matrix.rows]
        tolerance = 0.0 if kind in EXACT_KINDS else 1e-6
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("kind", IN_NATIVE_CODE, ids=lambda kind: FORMATS[kind].name)
def test_every_place_of_a_table_has_the_weights_of_the_reference(library: Library, kind: int) -> None:
    rng = np.random.default_rng(kind)
    blocks = rng.integers(0, 256, (2048, FORMATS[kind].num_bytes), np.uint8)
    # All scales are one, and all integers that weights are multiplied with, too.
    if kind == Kind.IQ1_M:
        blocks[:, 48:] = [0, 0, 0, 0, 0, 0xC0, 0, 0x30]
    else:
        blocks[:, :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    integers, mask = {
        16: (slice(9, 66, 8), 0x0F), 17: (slice(66, 74), 0), 18: (slice(69, 98, 4), 0x0F), 19: (slice(35, 50, 2), 0x8F),
        21: (slice(106, 110), 0), 22: (slice(74, 82), 0), 29: (slice(0), 0),
    }[kind]  # fmt: skip
    blocks[:, integers] &= mask
    data = blocks.reshape(1024, -1)
    expected = gguf.dequantize(data, Kind(kind))
    points = points_of(kind)
    number_of_points = len(points) * (2 if kind in (Kind.IQ1_S, Kind.IQ1_M) else 1)  # those are shifted in two ways
    unsigned = expected if kind in (Kind.IQ1_S, Kind.IQ1_M) else np.abs(expected)
    assert len(np.unique(unsigned.reshape(-1, points.shape[1]), axis=0)) == number_of_points
    product = Product(library, Blocks(data, kind, np.arange(1024)), torch.zeros(1, K), 1)
    for row, weights in enumerate(expected):
        np.testing.assert_array_equal(product.row(row, K), weights)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("is_long", [False, True])
def test_integers_in_blocks_are_exact(bits: int, has_zeros: bool, groups: int, is_long: bool) -> None:
    rng = np.random.default_rng(bits)
    n = 5
    k = 512 if is_long else 128
    half = 1 << (bits - 1)
    codes = torch.from_numpy(rng.integers(0, 1 << bits, (n, k), np.uint8))
    zeros = torch.from_numpy(rng.integers(0, 1 << bits, (n, groups), np.uint8)) if has_zeros else None
    scales = torch.from_numpy(rng.uniform(-2, 2, (n, groups)).astype(np.float16))
    columns = torch.from_numpy(rng.permutation(k))
    expected = torch.empty(n, k)
    for row in range(n):
        for place in range(k):
            group = place // (k // groups)
            zero = half if zeros is None else int(zeros[row, group])
            expected[row, columns[place]] = (int(codes[row, place]) - zero) * float(scales[row, group])
    blocks = of_integers(codes, scales, zeros, bits, columns, is_long=is_long)
    assert (blocks.kind == LONG_KIND) == (is_long and bits == 4)
    assert torch.equal(blocks.expand(), expected)
    assert torch.equal(blocks[1:3].expand(), expected[1:3])


def test_what_no_block_can_hold_makes_none() -> None:
    codes = torch.zeros(3, 96, dtype=torch.uint8)
    scales = torch.ones(3, 2)
    assert of_integers(codes, scales, None, 4) is None  # groups of 48
    for size, groups in ((384, 3), (512, 8)):  # no whole blocks of 256, and groups of 64
        matrix = torch.zeros(3, size, dtype=torch.uint8), torch.ones(3, groups)
        blocks = of_integers(*matrix, None, 4, is_long=True)
        assert blocks.kind != LONG_KIND
    scales = torch.ones(3, 3)
    assert of_integers(codes, scales, None, 4) is not None
    for scale in (1e6, 1e-9):
        scales[1, 1] = scale
        assert of_integers(codes, scales, None, 4) is None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: FORMATS[kind].name)
def test_products_are_those_of_the_reference_and_do_not_depend_on_rows_or_threads(library: Library, kind: int) -> None:
    matrix = random_matrix(kind)
    table = inputs()
    product = Product(library, matrix, table, 1)
    together = product.of(list(range(ROWS)))
    columns = np.arange(K) if matrix.columns is None else matrix.columns
    rounded = in_integers(table.numpy()[:, columns], kind, in_tiles=bool(library.has_integer_tiles()))
    weights = matrix.expand().double().numpy()[:, columns].T
    for row, each in zip(rounded, together, strict=True):
        np.testing.assert_allclose(each, row @ weights, atol=2e-5 * np.abs(row @ weights).max())
    for rows in ([3], [0, 14], [5, 4, 3, 2, 1, 0], list(range(1, 14))):
        assert (product.of(rows) == together[rows]).all()
    assert (Product(library, matrix, table, 3).of(list(range(ROWS))) == together).all()


@pytest.mark.parametrize("kind", [10, 11, 12, 13, 14, 23, 22, 35], ids=lambda kind: FORMATS[kind].name)
def test_rows_with_a_number_far_from_the_others_have_more_bits(library: Library, kind: int) -> None:
    matrix = random_matrix(kind)
    table = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(1))
    table[::3, 100] = 2000
    exact = table.double().numpy() @ matrix.expand().double().numpy().T
    products = [Product(library, matrix, table, 1, with_rests=with_rests) for with_rests in (False, True)]
    plain, with_rests = (product.of(list(range(ROWS))) for product in products)
    far = np.arange(ROWS) % 3 == 0
    assert (with_rests[~far] == plain[~far]).all()
    size = np.abs(exact[~far]).max()
    assert np.abs(with_rests - exact)[far].max() < 0.03 * size < np.abs(plain - exact)[far].max()
    for rows in ([3], [0, 14], list(range(1, 14))):
        assert (products[1].of(rows) == with_rests[rows]).all()


def test_parts_of_a_matrix_read_a_row_as_their_formats_do(library: Library) -> None:
    kinds = [int(kind) for kind in (Kind.Q4_K, Kind.Q8_0, Kind.Q6_K)]
    matrices = [random_matrix(kind) for kind in kinds]
    parts = [*(matrix[:32] for matrix in matrices[:-1]), matrices[-1]]
    table = inputs()
    alone = [Product(library, part, table, 1).of(list(range(ROWS))) for part in parts]
    together = Product(library, parts[0], table, 2, *parts[1:]).of(list(range(ROWS)))
    assert (together == np.concatenate(alone, axis=1)).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: FORMATS[kind].name)
def test_the_largest_sums_have_no_error(library: Library, kind: int) -> None:
    """All codes, scales and numbers are as large as they can be, so a sum that overflows somewhere would be wrong."""
    for byte in (0x00, 0x77, 0x80, 0xFF):
        data = np.full((N, K // FORMATS[kind].weights * FORMATS[kind].num_bytes), byte, np.uint8)
        halves = np.frombuffer(np.float16(1 / 64).tobytes(), np.uint8)
        blocks = data.reshape(-1, FORMATS[kind].num_bytes)
        for at in SCALES[kind]:
            blocks[:, at : at + 2] = halves
        if kind in (1004, 1104):  # Their zeros have four bits, too: 7 or -8.
            blocks[:, slice(2, 3) if kind == 1004 else slice(4, 6)] = 7 if byte == 0 else 0xF8
        if kind == 39:
            blocks[:, 0] = 127  # the exponent
        if kind == 29:
            blocks[:, 55] = 0x20  # the sign and the first bits of the exponent
        matrix = Blocks(data, kind, np.arange(N))
        table = torch.ones(ROWS, K)
        table[1::2] = -1
        if kind != LONG_KIND and not library.has_integer_tiles():  # those have one scale for 256
            table[::5, 64:256] *= 8  # shifted by three, next to others that are not
            table[::7, 256:288] *= 8
        expected = table.double().numpy() @ matrix.expand().double().numpy().T
        actual = Product(library, matrix, table, 1).of(list(range(ROWS)))
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def apart(matrix: Blocks) -> Blocks:
    """Return a matrix in MXFP4 as checkpoints have it: scales apart, and neighbours in the same byte."""
    blocks = matrix.data.reshape(N, K // 32, 17)
    codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    neighbours = codes[..., ::2] | codes[..., 1::2] << 4
    return replace(matrix, data=neighbours.reshape(N, -1), scales=np.ascontiguousarray(blocks[..., 0]))


def test_mxfp4_of_checkpoints_is_that_of_gguf_files_in_another_order(library: Library) -> None:
    matrix = random_matrix(Kind.MXFP4)
    other = apart(matrix)
    assert other.shape == matrix.shape
    assert torch.equal(other.expand(), matrix.expand())
    table = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(1))
    products = [Product(library, each, table, 2) for each in (matrix, other)]
    assert (products[0].of(list(range(ROWS))) == products[1].of(list(range(ROWS)))).all()
    for row in (0, 33, N - 1):
        np.testing.assert_array_equal(products[1].row(row, K), matrix.expand()[row])


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 252])
def test_scales_of_mxfp4_are_exact_over_their_whole_range(library: Library, exponent: int) -> None:
    data = random_matrix(Kind.MXFP4).data.copy()
    data.reshape(-1, 17)[:, 0] = exponent
    matrix = Blocks(data, int(Kind.MXFP4), np.arange(N))
    product = Product(library, matrix, torch.zeros(1, K), 1)
    np.testing.assert_array_equal(product.row(5, K), gguf.dequantize(data, Kind.MXFP4)[5])


def test_numbers_that_are_not_finite_make_products_that_are_not(library: Library) -> None:
    table = torch.ones(3, K)
    table[1, 7] = float("inf")
    table[2, 300] = float("nan")
    result = Product(library, random_matrix(int(Kind.Q4_K)), table, 1).of([0, 1, 2])
    assert np.isfinite(result[0]).all()
    assert not np.isfinite(result[1:]).any()
